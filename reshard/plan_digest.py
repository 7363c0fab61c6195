"""Digests of plans, and the check that all ranks plan from the same inputs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import PlanError
from reshard.layout import Layout
from reshard.plan import Plan, PlanInputs

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class DigestReport:
    """What one rank tells the others before the first transfer. ``to_bytes``/``from_bytes`` carry it; no pickle.

    ``source`` and ``destination`` are a digest per tensor, ``options`` the casts, topology and ignored names as text.
    ``sends`` and ``receives`` digest the copies that this rank exchanges with each peer.
    """

    rank: int
    digest: str
    options: str
    source: Mapping[str, str]
    destination: Mapping[str, str]
    sends: Mapping[int, str]
    receives: Mapping[int, str]

    def to_bytes(self) -> bytes:
        """JSON, as UTF-8."""
        fields = {
            "rank": self.rank,
            "digest": self.digest,
            "options": self.options,
            "source": dict(self.source),
            "destination": dict(self.destination),
            "sends": {str(peer): digest for peer, digest in self.sends.items()},
            "receives": {str(peer): digest for peer, digest in self.receives.items()},
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "DigestReport":
        """Inverse of ``to_bytes``."""
        fields = json.loads(data)
        for edge in ("sends", "receives"):
            fields[edge] = {int(peer): digest for peer, digest in fields[edge].items()}
        return cls(**fields)


def options_text(inputs: PlanInputs) -> str:
    """Everything but the layouts that a plan depends on, as one line."""
    casts = sorted(f"{a.value}>{b.value}" for a, b in inputs.casts)
    topology = None if inputs.topology is None else inputs.topology.to_json()
    return json.dumps([FORMAT_VERSION, casts, topology, inputs.ignore], separators=(",", ":"))


def inputs_digest(inputs: PlanInputs) -> str:
    """SHA-256 over both layouts and the options, as hex. ``inputs.ranks`` is no part of it."""
    text = f"{inputs.source.digest}\n{inputs.destination.digest}\n{options_text(inputs)}"
    return hashlib.sha256(text.encode()).hexdigest()


def digest_report(plan: Plan, rank: int) -> DigestReport:
    """This rank's report on its plan."""
    own = plan.for_rank(rank)
    return DigestReport(
        rank=rank,
        digest=plan.digest,
        options=options_text(plan.inputs),
        source=plan.source.digests,
        destination=plan.destination.digests,
        sends=_by_peer(plan, own.sends.rows.tolist(), receiving=False),
        receives=_by_peer(plan, own.receives.rows.tolist(), receiving=True),
    )


def _by_peer(plan: Plan, rows: Sequence[int], *, receiving: bool) -> dict[int, str]:
    table = plan.table
    peers: dict[int, hashlib._Hash] = {}
    for row in rows:
        peer = int((table.src_rank if receiving else table.dst_rank)[row])
        storages = table.storages[table.src_storage[row]], table.storages[table.dst_storage[row]]
        text = (table.names[table.name_idx[row]], table.start[row].tolist(), table.stop[row].tolist(), storages)
        peers.setdefault(peer, hashlib.sha256()).update(repr((*text, int(table.hop[row]))).encode())
    return {peer: digest.hexdigest()[:16] for peer, digest in peers.items()}


def check_reports(reports: Sequence[DigestReport]) -> None:
    """Raise PlanError unless all ranks planned from the same inputs and every send meets its receive.

    The message names the ranks that differ from most others and the first difference: a tensor of the source or
    destination layout, the options, or a pair of ranks whose copies don't match.
    """
    counts: dict[str, list[DigestReport]] = {}
    for report in reports:
        counts.setdefault(report.digest, []).append(report)
    agreed = max(counts.values(), key=lambda group: (len(group), -group[0].rank))
    odd = [report for report in reports if report.digest != agreed[0].digest]
    if odd:
        ranks = sorted(report.rank for report in odd)
        raise PlanError(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} planned from other inputs than the "
            f"{len(agreed)} ranks like rank {agreed[0].rank}: {_first_difference(agreed[0], odd[0])}"
        )
    _check_edges({report.rank: report for report in reports})


def _first_difference(expected: DigestReport, found: DigestReport) -> str:
    for side, ours, theirs in (
        ("source", expected.source, found.source),
        ("destination", expected.destination, found.destination),
    ):
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                how = (
                    "is missing there"
                    if name not in theirs
                    else "is only there"
                    if name not in ours
                    else "lies elsewhere"
                )
                return f"first difference in the {side} layout: tensor {name!r} {how}"
    if expected.options != found.options:
        return f"the options differ: {expected.options[:200]} and {found.options[:200]}"
    return "ranks, ties, opaque storages or memory labels of the layouts differ"


def _check_edges(reports: Mapping[int, DigestReport]) -> None:
    for rank, report in sorted(reports.items()):
        for peer in sorted(set(report.sends) | {p for p, other in reports.items() if rank in other.receives}):
            if peer in reports and report.sends.get(peer) != reports[peer].receives.get(rank):
                raise PlanError(
                    f"what rank {rank} sends to rank {peer} is not what rank {peer} expects: one of both plans is stale"
                )


def compare_layouts(first: Layout, second: Layout) -> list[str]:
    """Names of tensors on which two layouts differ, sorted."""
    names = {*first.digests, *second.digests}
    return sorted(name for name in names if first.digests.get(name) != second.digests.get(name))
