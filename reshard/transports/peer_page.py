"""The page of counters that each rank of the ``peer`` transport opens to the ranks that send to it.

Note "counters of a transition". Ranks count transitions alike: number ``e`` is the e-th that each of them began or
abandoned. All counters only grow, and each has one writer:

=================  =======================  ==========================================================================
counter            written by               says
=================  =======================  ==========================================================================
ready              owner of the page        its destination may be written in transition ``e``
released           owner                    its generation from the weights of transition ``e`` is over
failed             owner, and each sender   it gave up on transition ``e``; the word beside it is the culprit's rank
done, a part       each sender              ``e * MAX_HOPS + hop + 1``: its copies of that hop have arrived
=================  =======================  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard import _C
from reshard.arena import Arena, ArenaRegion

LINE_BYTES = 64
"""A cache line: what one rank writes lies apart from what others write."""
WORD_BYTES = 4
MAX_HOPS = 16


@dataclass(frozen=True, slots=True)
class Failed:
    """Two words: the last transition that a rank gave up on, and the rank that it holds responsible."""

    address: int

    def store(self, epoch: int, culprit: int) -> None:
        """Publish a failure; the culprit first, so that whoever sees the number sees it too."""
        _C.counter_store(self.address + WORD_BYTES, culprit)
        _C.counter_store(self.address, epoch)

    @property
    def epoch(self) -> int:
        """The last transition that failed."""
        return _C.counter_load(self.address)

    @property
    def culprit(self) -> int:
        """Who is responsible for it."""
        return _C.counter_load(self.address + WORD_BYTES)


@dataclass(frozen=True, slots=True)
class Page:
    """Where the counters are, in this process's mapping of a page."""

    address: int
    num_parts: int

    @property
    def ready(self) -> int:
        """Address of the owner's counter."""
        return self.address

    @property
    def released(self) -> int:
        """Address of the owner's counter."""
        return self.address + WORD_BYTES

    @property
    def failed(self) -> Failed:
        """The owner's failures."""
        return Failed(self.address + 2 * WORD_BYTES)

    def sender_failed(self, sender: int) -> Failed:
        """The failures of a sender."""
        return Failed(self._block(sender))

    def done(self, sender: int, part: int) -> int:
        """Address of a sender's counter for one part."""
        return self._block(sender) + (2 + part) * WORD_BYTES

    def _block(self, sender: int) -> int:
        return self.address + LINE_BYTES + sender * block_bytes(self.num_parts)


def block_bytes(num_parts: int) -> int:
    """Bytes of one sender's counters."""
    return -(-(2 + num_parts) * WORD_BYTES // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True, slots=True)
class OwnPage:
    """This rank's page and the arena of its own that it lives in."""

    arena: Arena
    region: ArenaRegion
    page: Page

    @classmethod
    def allocate(cls, num_ranks: int, num_parts: int) -> OwnPage:
        """A page of zeros with room for senders numbered below `num_ranks`."""
        arena = Arena.host()
        region = arena.allocate("counters", LINE_BYTES + num_ranks * block_bytes(num_parts))
        region.tensor().zero_()
        return cls(arena, region, Page(region.address, num_parts))
