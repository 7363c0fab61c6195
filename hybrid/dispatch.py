"""Dispatch: which rank of a worker group gets which part of a call's arguments, and how the answers become one.

| dispatch     | arguments                                           | result                                         |
|--------------|-----------------------------------------------------|------------------------------------------------|
| `ONE_TO_ALL` | the same to every rank                              | list, one entry per rank                       |
| `ALL`        | each argument is a list with one entry per rank     | list, one entry per rank                       |
| `DP`         | batches cut into one part per rank                  | joined over all ranks                          |
| `THREE_D`    | batches cut over `dp` of the training mesh, the     | joined over `dp`, from the last `pp` stage,    |
|              | same part to all its `tp`/`pp` peers                | index 0 on every other axis                    |
| `MICRO_DP`   | batches cut over `dp` x `micro_dp` of the           | joined over `dp` x `micro_dp`, likewise        |
|              | generation mesh, `dp` outermost                     |                                                |

Batches are `TensorDict` arguments, and the arguments that `register(split=...)` names (lists, tuples, tensors); they
are cut along their first dimension into parts of one size. The rest goes to every rank as it is. Results that are all
`TensorDict` are concatenated; others come as a list, one entry per part. `MICRO_DP` cuts each `dp` part further, so
generation and training agree on which rows belong to a `dp` index. Where the number of rows isn't a multiple of the
number of parts, `uneven` decides: `refuse` raises, and `pad` repeats the last row and drops what comes of it from
the joined result. Padding suits methods that treat rows one by one (generation, log-probs), never an update.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from hybrid import batch as batches
from hybrid.errors import DispatchError
from reshard.mesh import Mesh

Uneven = Literal["refuse", "pad"]


class Dispatch(enum.Enum):
    """How a call is spread over a worker group; the table is at the head of this module."""

    ONE_TO_ALL = "one_to_all"
    ALL = "all"
    DP = "dp"
    THREE_D = "3d"
    MICRO_DP = "micro_dp"

    @property
    def splits(self) -> bool:
        """Whether batches are cut into parts."""
        return self in (Dispatch.DP, Dispatch.THREE_D, Dispatch.MICRO_DP)


@dataclasses.dataclass(frozen=True, slots=True)
class RegisteredMethod:
    """A worker's method together with its dispatch. Calls on an instance run it locally."""

    function: Callable[..., Any]
    dispatch: Dispatch
    split: tuple[str, ...]
    uneven: Uneven

    @property
    def name(self) -> str:
        """The method's name."""
        return self.function.__name__

    def __get__(self, instance: object, owner: type) -> Any:
        """Return itself from the class, and the bound function from an instance."""
        return self if instance is None else self.function.__get__(instance, owner)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments by name; TypeError for a call that Python would refuse too."""
        try:
            bound = inspect.signature(self.function).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.function.__qualname__}: {error}") from None
        return dict(list(bound.arguments.items())[1:])


def register(
    *, dispatch: Dispatch, split: tuple[str, ...] = (), uneven: Uneven = "refuse"
) -> Callable[[Callable[..., Any]], RegisteredMethod]:
    """Let the controller call a worker's method.

    Args:
        dispatch: how arguments are spread and results joined.
        split: names of parameters that are cut although they aren't `TensorDict`.
        uneven: what to do with rows that don't divide; see the module's text.

    Raises:
        TypeError: the method takes `*args`, `**kwargs` or positional-only parameters, `split` names none of its
            parameters, or `split` or `uneven` stand beside a dispatch that cuts nothing.
    """

    def decorate(function: Callable[..., Any]) -> RegisteredMethod:
        parameters = inspect.signature(function).parameters
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        odd = [name for name, parameter in parameters.items() if parameter.kind not in plain]
        if odd:
            raise TypeError(f"{function.__qualname__}: registered methods take named parameters only, not {odd}")
        unknown = [name for name in split if name not in parameters]
        if unknown:
            raise TypeError(
                f"{function.__qualname__}: split names {unknown}, but its parameters are {list(parameters)}"
            )
        if not dispatch.splits and (split or uneven != "refuse"):
            raise TypeError(f"{function.__qualname__}: {dispatch.name} cuts nothing, so drop split and uneven")
        return RegisteredMethod(function, dispatch, split, uneven)

    return decorate


@dataclasses.dataclass(frozen=True, slots=True)
class Scattered:
    """A call's arguments, spread.

    Attributes:
        arguments: by rank, in rank order; ranks of one part share it.
        collect: ranks whose values make the result, in the order of the parts.
        num_rows: rows of the batches before padding; None if nothing was cut.
        num_padding: rows added at the end.
    """

    arguments: tuple[Mapping[str, object], ...]
    collect: tuple[int, ...]
    num_rows: int | None
    num_padding: int


def part_of(dispatch: Dispatch, rank: int, *, mesh: Mesh, generation_mesh: Mesh) -> int:
    """Return the index of the part that a rank gets; DispatchError for a dispatch that cuts nothing."""
    if not dispatch.splits:
        raise DispatchError(f"{dispatch.name} cuts nothing, so no rank has a part")
    return _parts(dispatch, mesh, generation_mesh)[0][rank]


def scatter(
    method: RegisteredMethod, arguments: Mapping[str, object], *, mesh: Mesh, generation_mesh: Mesh
) -> Scattered:
    """Spread a call's arguments over the ranks of `mesh`; DispatchError if they don't fit."""
    ranks = range(mesh.size)
    if method.dispatch is Dispatch.ONE_TO_ALL:
        return Scattered(tuple(dict(arguments) for _ in ranks), tuple(ranks), None, 0)
    if method.dispatch is Dispatch.ALL:
        return Scattered(_one_each(method, arguments, mesh.size), tuple(ranks), None, 0)
    parts, collect = _parts(method.dispatch, mesh, generation_mesh)
    cut = {name for name, value in arguments.items() if name in method.split or isinstance(value, TensorDictBase)}
    if not cut:
        return Scattered(tuple(dict(arguments) for _ in ranks), collect, None, 0)
    num_rows = _common_rows(method, {name: arguments[name] for name in sorted(cut)})
    num_padding = _padding(method, num_rows, len(collect))
    size = (num_rows + num_padding) // len(collect)
    padded = {name: _pad(arguments[name], num_padding) for name in cut}
    spread = []
    for rank in ranks:
        rows = slice(parts[rank] * size, (parts[rank] + 1) * size)
        spread.append({name: padded[name][rows] if name in cut else value for name, value in arguments.items()})
    return Scattered(tuple(spread), collect, num_rows, num_padding)


def gather(method: RegisteredMethod, scattered: Scattered, values: Mapping[int, object]) -> Any:
    """Join the values of `scattered.collect` (by rank) into the call's result."""
    results = [values[rank] for rank in scattered.collect]
    if not method.dispatch.splits or not all(isinstance(result, TensorDictBase) for result in results):
        return results
    joined = concatenate([result for result in results if isinstance(result, TensorDictBase)])
    if scattered.num_rows is None or not scattered.num_padding:
        return joined
    num_sent = scattered.num_rows + scattered.num_padding
    num_joined = joined.batch_size[0]
    if num_joined % num_sent:
        raise DispatchError(
            f"{method.name}: {num_sent} rows were sent, {scattered.num_padding} of them padding, and {num_joined} came "
            "back; which of them to drop is unknown. Return a fixed number of rows per row, or use uneven='refuse'"
        )
    return joined[: num_joined // num_sent * scattered.num_rows]


def concatenate(parts: Sequence[TensorDictBase]) -> TensorDict:
    """Join batches along their rows; those of samples (docs/batch.md) are padded to the widest first."""
    if len(parts) == 1:
        return TensorDict(dict(parts[0].items()), batch_size=parts[0].batch_size)
    samples = [
        part for part in parts if isinstance(part, TensorDict) and "response_ids" in part and "prompt_ids" in part
    ]
    if len(samples) == len(parts):
        return batches.concatenate(samples)
    shapes = [{name: (tuple(value.shape[1:]), value.dtype) for name, value in part.items()} for part in parts]
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise DispatchError(
                f"parts don't join: one has {shapes[0]}, another {shape} (field: trailing shape, dtype)"
            )
    return TensorDict(
        {name: torch.cat([part[name] for part in parts]) for name in shapes[0]},
        batch_size=[sum(part.batch_size[0] for part in parts)],
    )


def _one_each(
    method: RegisteredMethod, arguments: Mapping[str, object], num_ranks: int
) -> tuple[Mapping[str, object], ...]:
    spread: list[dict[str, object]] = [{} for _ in range(num_ranks)]
    for name, value in arguments.items():
        if not isinstance(value, (list, tuple)) or len(value) != num_ranks:
            came = f"{len(value)} entries" if isinstance(value, (list, tuple)) else type(value).__name__
            raise DispatchError(f"{method.name}: ALL needs a list of {num_ranks} entries for {name!r}, got {came}")
        for rank, entry in enumerate(value):
            spread[rank][name] = entry
    return tuple(spread)


def _parts(dispatch: Dispatch, mesh: Mesh, generation_mesh: Mesh) -> tuple[dict[int, int], tuple[int, ...]]:
    """Return the part that each rank gets, and the rank that each part's value comes from."""
    if dispatch is Dispatch.DP:
        return {rank: rank for rank in range(mesh.size)}, tuple(range(mesh.size))
    grid, axes = (mesh, ("dp",)) if dispatch is Dispatch.THREE_D else (generation_mesh, ("dp", "micro_dp"))
    parts, collect = {}, {}
    for rank in grid.ranks:
        place = grid.coordinate(rank)
        part = 0
        for axis in axes:
            part = part * grid.axis_size(axis) + place.get(axis, 0)
        parts[rank] = part
        rest = [index for axis, index in place.items() if axis not in (*axes, "pp")]
        if place.get("pp", 0) == grid.axis_size("pp") - 1 and not any(rest):
            collect[part] = rank
    return parts, tuple(collect[part] for part in sorted(collect))


def _num_rows(value: object) -> int:
    if isinstance(value, TensorDictBase):
        if len(value.batch_size) != 1:
            raise DispatchError(f"expected a batch with batch size [B], got {list(value.batch_size)}")
        return int(value.batch_size[0])
    if isinstance(value, (list, tuple, torch.Tensor)):
        return len(value)
    raise DispatchError(f"expected a TensorDict, list, tuple or tensor to cut, got {type(value).__name__}")


def _common_rows(method: RegisteredMethod, cut: Mapping[str, object]) -> int:
    rows = {name: _num_rows(value) for name, value in cut.items()}
    if len(set(rows.values())) > 1:
        raise DispatchError(f"{method.name}: arguments that are cut together differ in their rows: {rows}")
    return next(iter(rows.values()))


def _padding(method: RegisteredMethod, num_rows: int, num_parts: int) -> int:
    num_padding = -num_rows % num_parts
    if num_padding and method.uneven == "refuse":
        raise DispatchError(
            f"{method.name}: {num_rows} rows don't divide into {num_parts} parts ({method.dispatch.name}); send a "
            f"multiple of {num_parts}, or register the method with uneven='pad' if it treats rows one by one"
        )
    return num_padding


def _pad(value: Any, num_padding: int) -> Any:
    if not num_padding:
        return value
    if isinstance(value, (list, tuple)):
        return [*value, *([value[-1]] * num_padding)]
    last = torch.full((num_padding,), len(value) - 1, dtype=torch.int64)
    return torch.cat([value, value[last]])
