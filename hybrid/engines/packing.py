"""How samples of different lengths become the rows that a model runs on, with next to no padding.

A *piece* is a prompt followed by one or more of its responses, laid end to end. Each response attends to the prompt and
to itself, and its positions go on from the prompt's end, so every token sees what it would see in a sequence of its
own: the mathematics is the same, and the prompt is computed once, not once per sample. In the mode

- `shared_prefix` a piece holds all samples of a micro-batch that have the same prompt tokens;
- `separate` a piece holds one sample;
- `padded` a row holds one sample and Transformers makes the mask. Costs padding, and suits any architecture.

Pieces fill rows as wide as the longest piece (first fit, longest first), so a block of attention is never much larger
than the longest piece needs. Prompts of 45 tokens with 8 responses of 12 take 141 tokens per group and not 456.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict

Packing = Literal["shared_prefix", "separate", "padded"]
PACKINGS: tuple[Packing, ...] = ("shared_prefix", "separate", "padded")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Samples (rows of a batch) that share one copy of their prompt, and the tokens that they take together."""

    samples: tuple[int, ...]
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """A micro-batch as the model takes it: N rows of W places, T response tokens in them.

    Attributes:
        input_ids: int64 [N, W].
        position_ids: int64 [N, W].
        attention_mask: bool [N, 1, W, W], True where a place attends to a place; bool [N, W] in the mode `padded`.
        predictors: int64 [T], the place (row * W + column) whose logits predict each response token.
        targets: int64 [T], the response tokens.
        places: int64 [T], where each belongs in a [B, R] tensor, as row * R + column.
        shape: (B, R) of the micro-batch.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    shape: tuple[int, int]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return [B, R] with the values [T] of the response tokens in their places and 0 elsewhere; differentiable."""
        num_rows, width = self.shape
        flat = values.new_zeros(num_rows * width)
        return flat.index_put((self.places.to(values.device),), values).view(num_rows, width)


def split_micro_batches(
    batch: TensorDict, packing: Packing, *, max_tokens: int | None, max_samples: int | None
) -> list[list[int]]:
    """Return the rows of `batch` that make up each micro-batch; every row is in exactly one.

    Args:
        batch: a batch, on the host.
        packing: samples of one prompt stay together where the limits allow if it is `shared_prefix`.
        max_tokens: limit on the tokens of a micro-batch after packing; one sample alone may pass it. None: no limit.
        max_samples: limit on the samples of a micro-batch. None: no limit.
    """
    pieces = make_pieces(batch, packing, max_tokens=max_tokens, max_samples=max_samples)
    bins = _first_fit(pieces, max_tokens=max_tokens, max_samples=max_samples)
    return [[sample for piece in pieces_of_bin for sample in piece.samples] for pieces_of_bin in bins]


def make_pieces(
    batch: TensorDict, packing: Packing, *, max_tokens: int | None = None, max_samples: int | None = None
) -> list[Piece]:
    """Return the pieces of `batch`, in the order of their first samples; those over a limit are cut into several."""
    prompt_lens, response_lens = batch["prompt_len"].tolist(), batch["response_len"].tolist()
    prompts = batch["prompt_ids"].numpy()
    families: dict[object, list[int]] = {}
    for i, length in enumerate(prompt_lens):
        key = prompts[i, :length].tobytes() if packing == "shared_prefix" else i
        families.setdefault(key, []).append(i)
    pieces: list[Piece] = []
    for samples in families.values():
        members: list[int] = []
        num_tokens = prompt_lens[samples[0]]
        for sample in samples:
            is_over_tokens = max_tokens is not None and num_tokens + response_lens[sample] > max_tokens
            is_over_samples = max_samples is not None and len(members) == max_samples
            if members and (is_over_tokens or is_over_samples):
                pieces.append(Piece(tuple(members), num_tokens))
                members, num_tokens = [], prompt_lens[sample]
            members.append(sample)
            num_tokens += response_lens[sample]
        pieces.append(Piece(tuple(members), num_tokens))
    return pieces


def _first_fit(pieces: Sequence[Piece], *, max_tokens: int | None, max_samples: int | None) -> list[list[Piece]]:
    """Put the pieces, largest first, each into the first bin that has room for it."""
    bins: list[list[Piece]] = []
    tokens_left: list[float] = []
    samples_left: list[float] = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_tokens):
        num_samples = len(piece.samples)
        for i in range(len(bins)):
            if piece.num_tokens <= tokens_left[i] and num_samples <= samples_left[i]:
                break
        else:
            i = len(bins)
            bins.append([])
            tokens_left.append(float("inf") if max_tokens is None else max_tokens)
            samples_left.append(float("inf") if max_samples is None else max_samples)
        bins[i].append(piece)
        tokens_left[i] -= piece.num_tokens
        samples_left[i] -= num_samples
    return bins


def pack(batch: TensorDict, packing: Packing) -> PackedRows:
    """Lay out the samples of `batch` (one micro-batch, on the host) for a model; the result is on the host too."""
    pieces = make_pieces(batch, packing)
    width = max(piece.num_tokens for piece in pieces)
    rows = [[piece] for piece in pieces]
    if packing != "padded":
        rows = _first_fit(pieces, max_tokens=width, max_samples=None)
    canvas = _Canvas(batch, num_rows=len(rows), width=width)
    for row, pieces_of_row in enumerate(rows):
        begin = 0
        for number, piece in enumerate(pieces_of_row):
            canvas.add(piece, row=row, begin=begin, number=number)
            begin += piece.num_tokens
    return canvas.finish(packing)


class _Canvas:
    """Arrays [N, W] that pieces are written into: ids, positions, and which piece and branch each place belongs to.

    Branch 0 is a prompt, branches 1, 2, ... its responses; what no piece covers has piece -1.
    """

    def __init__(self, batch: TensorDict, *, num_rows: int, width: int) -> None:
        self._prompts, self._responses = batch["prompt_ids"].numpy(), batch["response_ids"].numpy()
        self._prompt_lens, self._response_lens = batch["prompt_len"].tolist(), batch["response_len"].tolist()
        self._ids = np.zeros((num_rows, width), dtype=np.int64)
        self._positions = np.zeros((num_rows, width), dtype=np.int64)
        self._piece = np.full((num_rows, width), -1, dtype=np.int64)
        self._branch = np.zeros((num_rows, width), dtype=np.int64)
        self._predictors: list[np.ndarray] = []
        self._samples: list[int] = []

    def add(self, piece: Piece, *, row: int, begin: int, number: int) -> None:
        """Write a piece into a row, from column `begin` on, as the row's piece `number`."""
        first = piece.samples[0]
        prompt_len = self._prompt_lens[first]
        end = begin + prompt_len
        self._piece[row, begin : begin + piece.num_tokens] = number
        self._ids[row, begin:end] = self._prompts[first, :prompt_len]
        self._positions[row, begin:end] = np.arange(prompt_len)
        last_of_prompt = row * self._ids.shape[1] + end - 1
        for branch, sample in enumerate(piece.samples, start=1):
            length = self._response_lens[sample]
            here = slice(end, end + length)
            self._ids[row, here] = self._responses[sample, :length]
            self._positions[row, here] = prompt_len + np.arange(length)
            self._branch[row, here] = branch
            predictors = row * self._ids.shape[1] + end - 1 + np.arange(length)
            predictors[:1] = last_of_prompt
            self._predictors.append(predictors)
            self._samples.append(sample)
            end += length

    def finish(self, packing: Packing) -> PackedRows:
        """Return the rows as tensors."""
        response_width = self._responses.shape[1]
        lengths = [self._response_lens[sample] for sample in self._samples]
        spans = zip(self._samples, lengths, strict=True)
        places = np.concatenate([sample * response_width + np.arange(length) for sample, length in spans])
        piece, branch = torch.from_numpy(self._piece), torch.from_numpy(self._branch)
        return PackedRows(
            input_ids=torch.from_numpy(self._ids),
            position_ids=torch.from_numpy(self._positions),
            attention_mask=piece >= 0 if packing == "padded" else tree_mask(piece, branch),
            predictors=torch.from_numpy(np.concatenate(self._predictors)),
            targets=torch.from_numpy(self._responses.reshape(-1)[places]),
            places=torch.from_numpy(places),
            shape=(len(self._samples), response_width),
        )


def tree_mask(piece: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    """Return bool [N, 1, W, W]: place i attends to j <= i of its piece if j is in the prompt or in i's own branch."""
    width = piece.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=piece.device).tril()
    same_piece = piece[:, :, None] == piece[:, None, :]
    visible = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
    return (causal & same_piece & visible)[:, None]
