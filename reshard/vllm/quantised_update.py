"""Filling an engine's float8 parameters from full precision: from the trainer's own tensors, or from staging.

Where the trainer lives in this process and holds all parts of a parameter itself, each in whole groups of the
quantiser, the parts are quantised from there: the Plan sees them in place, so nothing moves and nothing is staged. All
others arrive in full precision in a tensor of this rank, as the loader would have filled the parameter.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from reshard.dtype import DType
from reshard.layout import Holding, Layout, TensorSpec
from reshard.quant import QuantEntry
from reshard.torch_layout import torch_dtype
from reshard.verify import box_view
from reshard.vllm.quantised import Part, QuantRule
from reshard.vllm.quantiser import Quantiser

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
LENT = "trainer:"
"""Storages of the trainer, in this process, that quantising copies read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lender:
    """What a trainer in this process holds itself: its own rank's part of a Layout, and the live tensors."""

    layout: Layout
    rank: int
    tensors: Mapping[str, torch.Tensor]

    def holdings(self) -> dict[str, list[Holding]]:
        """What it holds, by name of the checkpoint's tensor."""
        found: dict[str, list[Holding]] = {}
        for holding in self.layout.holdings(self.rank):
            found.setdefault(holding.region.name, []).append(holding)
        return found


class QuantisedUpdate:
    """One rank's float8 parameters.

    Args:
        rules: how each is filled.
        layout: this rank's, with the rules' staged storages in it.
        rank: its number there.
        live: the engine's tensors by name.
        allocate: makes a staging tensor.
        lender: the trainer of this process, if there is one.

    Attributes:
        layout: the rank's Layout with the storages that the weights arrive in.
        tensors: those storages, by name; the trainer's own among them.
        staging_bytes: memory of those that are not the trainer's.
        modes: of ``reshard.quant``, that are in use.
    """

    def __init__(
        self,
        rules: Iterable[QuantRule],
        layout: Layout,
        *,
        rank: int,
        live: Mapping[str, torch.Tensor],
        allocate: Allocate,
        lender: Lender | None,
    ) -> None:
        of_storage = {rule.staged: rule for rule in rules}
        self.modes = frozenset(rule.mode for rule in of_storage.values())
        self.tensors: dict[str, torch.Tensor] = {}
        self.staging_bytes = 0
        held = lender.holdings() if lender is not None else {}
        settled: list[Holding] = []
        staged: dict[str, list[Holding]] = {}
        for holding in layout.holdings(rank):
            of_rule = holding.address.storage in of_storage
            (staged.setdefault(holding.address.storage, []) if of_rule else settled).append(holding)
        entries: list[QuantEntry] = []
        for storage, holdings in staged.items():
            rule = of_storage[storage]
            lent = _lent(rule, holdings, held)
            if lender is not None and lent is not None:
                settled += [holding for holding, _ in lent]
                entries += self._borrow(rule, lent, live, lender)
            else:
                settled += holdings
                entries += self._stage(rule, live, allocate)
        self.layout = _rebuilt(layout, rank, settled)
        self._quantiser = Quantiser(entries, entries[0].dst.device)

    def _borrow(
        self,
        rule: QuantRule,
        lent: list[tuple[Holding, list[Part]]],
        live: Mapping[str, torch.Tensor],
        lender: Lender,
    ) -> Iterator[QuantEntry]:
        for holding, parts in lent:
            source = lender.tensors[holding.address.storage.removeprefix(LENT)]
            self.tensors[holding.address.storage] = source
            whole = box_view(source, holding.address, holding.region.shape)
            matrices = whole.unbind() if whole.dim() == 3 else (whole,)
            yield from (rule.entry(live, part, src) for part, src in zip(parts, matrices, strict=True))

    def _stage(self, rule: QuantRule, live: Mapping[str, torch.Tensor], allocate: Allocate) -> list[QuantEntry]:
        tensor = allocate(rule.staged, rule.shape, torch_dtype(rule.dtype)).zero_()
        self.tensors[rule.staged] = tensor
        self.staging_bytes += tensor.nbytes
        return rule.entries({**live, rule.staged: tensor})

    @property
    def num_launches(self) -> int:
        """Kernel launches of one update."""
        return self._quantiser.num_launches

    @property
    def num_bytes(self) -> int:
        """Bytes that one update reads and writes."""
        return self._quantiser.num_bytes

    def run(self) -> None:
        """Quantise what has arrived; on torch's current stream on a GPU."""
        self._quantiser.run()


def _rebuilt(layout: Layout, rank: int, holdings: list[Holding]) -> Layout:
    """``layout`` with these holdings; a tensor has the dtype that it is held in."""
    dtypes = {holding.region.name: holding.address.dtype for holding in holdings}
    specs = [TensorSpec(name, layout.specs[name].shape, dtype) for name, dtype in dtypes.items()]
    opaque = {rank: tuple(layout.opaque(rank))}
    return Layout.from_holdings(specs, holdings, ranks=[rank], memory=layout.memory, opaque=opaque)


def _lent(
    rule: QuantRule, holdings: Iterable[Holding], held: Mapping[str, list[Holding]]
) -> list[tuple[Holding, list[Part]]] | None:
    """The same regions where the trainer of this process has them, with the parts that they are; None unless all are.

    All: of every element of the parameter, in whole groups, and rounded on the way as they would be through staging.
    """
    found, num_elements = [], 0
    for holding in holdings:
        parts = _parts(rule, holding)
        owner = next((h for h in held.get(holding.region.name, []) if h.region.contains(holding.region)), None)
        if parts is None or owner is None:
            return None
        steps = [a - b for a, b in zip(holding.region.start, owner.region.start, strict=True)]
        address = owner.address.advance(steps)
        if not address.dtype.is_castable or not (rule.dtype is DType.BFLOAT16 or address.dtype is rule.dtype):
            return None
        found.append((replace(holding, address=replace(address, storage=LENT + address.storage)), parts))
        num_elements += holding.region.numel
    return found if num_elements == math.prod(rule.shape) else None


def _parts(rule: QuantRule, holding: Holding) -> list[Part] | None:
    """The matrices that a region is, inside the parameter; None if it is none of whole groups."""
    shape, address = holding.region.shape, holding.address
    rows, columns = rule.shape[-2:]
    if len(shape) not in (2, 3) or address.strides[-2:] != (columns, 1):
        return None
    if len(shape) == 3 and address.strides[0] != rows * columns:
        return None
    expert, within = divmod(address.offset_bytes // address.dtype.itemsize, rows * columns)
    row, column = divmod(within, columns)
    matrix = (shape[-2], shape[-1])
    parts = [Part(expert + i, row, column) for i in range(shape[0] if len(shape) == 3 else 1)]
    return parts if all(rule.ends_with_groups(part, matrix) for part in parts) else None
