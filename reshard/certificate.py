"""Certificate: the least that every rank and node must receive, computed from the layouts alone, beside what a plan
moves.

The floor of a rank is |needed \\ held|: the bytes of the destination's elements that the rank does not hold in the
source, each once, in the smaller of both element types. The floor of a node is the same with the union over its ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Certificate:
    """Per rank: bytes needed, already held, and the floor between them. Per node: the floor of what must enter it.

    ``node_floor_bytes`` has the topology's own node numbers; it is empty for a plan without a topology, for one that
    does not fan out inside nodes, and for a plan of only some ranks.
    """

    needed_bytes: Mapping[int, int]
    held_bytes: Mapping[int, int]
    node_floor_bytes: Mapping[int, int]

    def floor_bytes(self, rank: int) -> int:
        """The least number of bytes that the rank must receive."""
        return self.needed_bytes[rank] - self.held_bytes[rank]
