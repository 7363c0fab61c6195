"""The batch that every part passes on: one `TensorDict` of samples, described field by field in docs/batch.md.

A batch has batch size [B]; row i is one sampled response with its prompt. Ragged sequences are padded on the right, and
a mask always comes from a length, never from a token id, since the padding id may well be a token that was sampled.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import TensorDict

Axis = Literal["prompt", "response"]


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What a field of a batch must look like: its dtype, and the axis that follows B if there is one."""

    dtype: torch.dtype
    axis: Axis | None = None


REQUIRED_FIELDS: Mapping[str, Field] = {
    "prompt_ids": Field(torch.int64, "prompt"),
    "prompt_len": Field(torch.int64),
    "response_ids": Field(torch.int64, "response"),
    "response_len": Field(torch.int64),
    "group_id": Field(torch.int64),
    "truncated": Field(torch.bool),
    "version": Field(torch.int64),
    "rollout_log_probs": Field(torch.float32, "response"),
}
OPTIONAL_FIELDS: Mapping[str, Field] = {
    "old_log_probs": Field(torch.float32, "response"),
    "ref_log_probs": Field(torch.float32, "response"),
    "advantages": Field(torch.float32, "response"),
    "token_scores": Field(torch.float32, "response"),
    "loss_mask": Field(torch.bool, "response"),
    "scores": Field(torch.float32),
    "scored": Field(torch.bool),
}
FIELDS: Mapping[str, Field] = {**REQUIRED_FIELDS, **OPTIONAL_FIELDS}


def make_batch(
    *,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    group_ids: Sequence[int],
    truncated: Sequence[bool],
    version: int,
    pad_token_id: int = 0,
) -> TensorDict:
    """Build a batch of B samples from Python lists; every argument but the last two has B entries.

    Raises:
        ValueError: the lists differ in length, a prompt is empty, or a response and its log-probs differ in length.
    """
    num_rows = len(prompts)
    given = {"responses": responses, "log_probs": log_probs, "group_ids": group_ids, "truncated": truncated}
    for name, values in given.items():
        if len(values) != num_rows:
            raise ValueError(f"Expected {num_rows} {name}, one for each prompt, but got {len(values)}.")
    for i, (response, numbers) in enumerate(zip(responses, log_probs, strict=True)):
        if len(response) != len(numbers):
            raise ValueError(
                f"Expected as many, but row {i} has {len(response)} response tokens and {len(numbers)} log-probs."
            )
    fields = {
        "prompt_ids": pad_rows(prompts, dtype=torch.int64, value=pad_token_id),
        "prompt_len": torch.tensor([len(row) for row in prompts], dtype=torch.int64),
        "response_ids": pad_rows(responses, dtype=torch.int64, value=pad_token_id),
        "response_len": torch.tensor([len(row) for row in responses], dtype=torch.int64),
        "group_id": torch.tensor(list(group_ids), dtype=torch.int64),
        "truncated": torch.tensor(list(truncated), dtype=torch.bool),
        "version": torch.full((num_rows,), version, dtype=torch.int64),
        "rollout_log_probs": pad_rows(log_probs, dtype=torch.float32, value=0.0),
    }
    return validate(TensorDict(fields, batch_size=[num_rows]))


def pad_rows(rows: Sequence[Sequence[int] | Sequence[float]], *, dtype: torch.dtype, value: float) -> torch.Tensor:
    """Return [B, longest row] of `dtype`, each row padded on the right with `value`."""
    width = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def length_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return bool [B, width], True in the first `lengths[i]` places of row i."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def prompt_mask(batch: TensorDict) -> torch.Tensor:
    """Return bool [B, P]: which places of `prompt_ids` hold tokens."""
    return length_mask(batch["prompt_len"], batch["prompt_ids"].shape[1])


def response_mask(batch: TensorDict) -> torch.Tensor:
    """Return bool [B, R]: which places of `response_ids` hold tokens that were sampled, the stop token included."""
    return length_mask(batch["response_len"], batch["response_ids"].shape[1])


def loss_mask(batch: TensorDict) -> torch.Tensor:
    """Return bool [B, R]: the response tokens that are trained, that is `response_mask` and the field `loss_mask`."""
    mask = response_mask(batch)
    return mask & batch["loss_mask"] if "loss_mask" in batch else mask


def validate(batch: TensorDict) -> TensorDict:
    """Return `batch` if it has every required field in the right shape and dtype, and lengths that fit; else raise.

    Fields that docs/batch.md does not name may be there; `concatenate` says what shapes they can have.

    Raises:
        ValueError: names the field, what was expected and what came.
    """
    missing = [name for name in REQUIRED_FIELDS if name not in batch]
    if missing:
        raise ValueError(f"The batch lacks {', '.join(missing)}; docs/batch.md lists the fields that it must have.")
    num_rows = batch.batch_size[0] if len(batch.batch_size) == 1 else -1
    if num_rows < 0:
        raise ValueError(f"Expected a batch with batch size [B], but got {list(batch.batch_size)}.")
    widths = {axis: batch[f"{axis}_ids"].shape[-1] for axis in ("prompt", "response")}
    for name, field in FIELDS.items():
        if name not in batch:
            continue
        shape = (num_rows,) if field.axis is None else (num_rows, widths[field.axis])
        tensor = batch[name]
        if tensor.shape != shape or tensor.dtype != field.dtype:
            raise ValueError(
                f"Expected {name} to be {field.dtype} of shape {list(shape)}, "
                f"but got {tensor.dtype} of shape {list(tensor.shape)}."
            )
    _check_lengths(batch, "prompt_len", smallest=1, largest=widths["prompt"])
    _check_lengths(batch, "response_len", smallest=0, largest=widths["response"])
    return batch


def _check_lengths(batch: TensorDict, name: str, *, smallest: int, largest: int) -> None:
    lengths = batch[name]
    wrong = ((lengths < smallest) | (lengths > largest)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"Expected {name} between {smallest} and {largest}, but row {row} has {int(lengths[row])}"
            + (f" ({len(wrong)} rows are wrong)." if len(wrong) > 1 else ".")
        )


def concatenate(batches: Sequence[TensorDict]) -> TensorDict:
    """Return one batch with the rows of all `batches` in order, padded to their widest prompt and response.

    Extra fields of shape [B] or [B, ...] with equal trailing sizes are joined as they are; extra fields of shape [B, R]
    or [B, P] named `prompt_*` are padded like the ids.

    Raises:
        ValueError: no batch was given, or a field is in some of them only.
    """
    if not batches:
        raise ValueError("Expected at least one batch to concatenate, but got none.")
    names = set(batches[0].keys())
    for i, batch in enumerate(batches):
        different = names ^ set(batch.keys())
        if different:
            raise ValueError(
                f"Expected batch {i} to have the fields of batch 0, but they differ in {sorted(different)}."
            )
    prompt_width = max(batch["prompt_ids"].shape[1] for batch in batches)
    response_width = max(batch["response_ids"].shape[1] for batch in batches)
    resized = [resize(batch, prompt_width=prompt_width, response_width=response_width) for batch in batches]
    fields = {name: torch.cat([batch[name] for batch in resized]) for name in batches[0].keys()}  # noqa: SIM118
    return TensorDict(fields, batch_size=[sum(batch.batch_size[0] for batch in batches)])


def select(batch: TensorDict, rows: Sequence[int] | torch.Tensor) -> TensorDict:
    """Return a batch of the given rows in the given order (an index may repeat), no wider than those rows need."""
    index = torch.as_tensor(rows, device=batch["prompt_len"].device)
    return trim(batch[index.nonzero().flatten() if index.dtype == torch.bool else index.long()])


def trim(batch: TensorDict) -> TensorDict:
    """Return `batch` cut to its longest prompt and response; all that is cut off is padding."""
    num_rows = batch.batch_size[0]
    longest = [int(batch[name].max()) if num_rows else 0 for name in ("prompt_len", "response_len")]
    return resize(batch, prompt_width=longest[0], response_width=longest[1])


def resize(batch: TensorDict, *, prompt_width: int, response_width: int) -> TensorDict:
    """Return `batch` with P and R set to the given widths, by cutting or adding padding on the right.

    Added places hold 0 or False. The caller sees to it that no token is cut off (`trim` does).
    """
    old = {axis: batch[f"{axis}_ids"].shape[1] for axis in ("prompt", "response")}
    new = {"prompt": prompt_width, "response": response_width}
    fields = {}
    for name in batch.keys():  # noqa: SIM118
        axis = _axis_of(name, batch[name], old)
        fields[name] = batch[name] if axis is None else _with_width(batch[name], new[axis])
    return TensorDict(fields, batch_size=batch.batch_size)


def _axis_of(name: str, tensor: torch.Tensor, widths: Mapping[str, int]) -> Axis | None:
    if name in FIELDS:
        return FIELDS[name].axis
    if tensor.ndim < 2:
        return None
    if name.startswith("prompt_"):
        return "prompt" if tensor.shape[1] == widths["prompt"] else None
    return "response" if tensor.shape[1] == widths["response"] else None


def _with_width(tensor: torch.Tensor, width: int) -> torch.Tensor:
    if tensor.shape[1] >= width:
        return tensor[:, :width]
    padding = tensor.new_zeros((tensor.shape[0], width - tensor.shape[1], *tensor.shape[2:]))
    return torch.cat([tensor, padding], dim=1)
