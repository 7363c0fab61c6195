"""Push weights while the backward pass still runs: the optimizer steps each parameter as soon as its gradient is whole.

Fusing the optimizer's step into backward frees gradients early, and makes a layer's weights final while earlier layers
are still being differentiated. `BackwardPush` hooks the parameters that a Resharder reads, and pushes a part when the
last of its parameters has been stepped::

    with Resharder(plan, source, destination, parts="layers") as resharder:
        steps = {p: torch.optim.AdamW([p]) for p in model.parameters()}
        with BackwardPush(resharder, dict(model.named_parameters()), update=lambda p: steps[p].step()) as push:
            for batch in batches:
                push.begin()                  # generation has stopped; the next backward is the last before it
                loss(model, batch).backward()
                resharder.wait_part(0)        # generation may use the first part
                resharder.wait()
                model.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from reshard.errors import LayoutError
from reshard.resharder import Resharder, State
from reshard.transports.base import rank_copies

if TYPE_CHECKING:
    import torch


class BackwardPush:
    """Steps and pushes from hooks that run when a parameter's gradient has been accumulated.

    Outside a transition backward passes only accumulate gradients. Between `begin` and `Resharder.wait`, each parameter
    is updated once, by its hook. One that gets no gradient is not updated, and its part travels with
    `Resharder.wait`. Hooks run in autograd's threads, on the stream of the parameter's forward pass.

    Args:
        resharder: bound to the parameters as its source.
        parameters: every tensor that the transition reads, by the storage names of the source Layout; those that need
            no gradient are taken for final when the transition begins.
        update: called once per transition with each parameter whose gradient is whole, before its part is pushed.

    Raises:
        LayoutError: a storage that the Resharder reads is none of `parameters`; it could change after its push.
    """

    def __init__(
        self,
        resharder: Resharder,
        parameters: Mapping[str, torch.Tensor],
        *,
        update: Callable[[torch.Tensor], object],
    ) -> None:
        self._resharder, self._update = resharder, update
        number = resharder.parts.numbers()
        readers: list[set[str]] = [set() for _ in range(resharder.parts.num)]
        for copy in rank_copies(resharder.plan, resharder.rank):
            if copy.src_rank == resharder.rank and copy.hop == 0:
                readers[number[copy.region.name]].add(copy.src.storage)
        unknown = sorted(set().union(*readers) - set(parameters))
        if unknown:
            raise LayoutError(
                f"{len(unknown)} storages of the source are no parameters, first {unknown[0]!r}: pass every tensor "
                "that the transition reads, by its name in the source Layout"
            )
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._trained_of = [storages & set(trained) for storages in readers]
        self._parts_of: dict[str, list[int]] = {name: [] for name in trained}
        for part, names in enumerate(self._trained_of):
            for name in names:
                self._parts_of[name].append(part)
        self._left: list[set[str]] = []
        self._due: set[str] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in trained.items()]

    def begin(self, *, version: int | None = None) -> None:
        """Begin a transition (see `Resharder.begin`): the next backward pass updates and pushes."""
        self._resharder.begin(version=version)
        self._left = [set(names) for names in self._trained_of]
        self._due = set(self._parts_of)
        for part, names in enumerate(self._left):
            if not names:
                self._resharder.push(part)

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def accumulated(parameter: torch.Tensor) -> None:
            if name not in self._due or self._resharder.state is not State.TRANSITION:
                return
            self._due.remove(name)
            self._update(parameter)
            for part in self._parts_of[name]:
                self._left[part].remove(name)
                if not self._left[part]:
                    self._resharder.push(part)

        return accumulated

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the hooks."""
        self.close()
