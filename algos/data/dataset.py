"""PromptDataset: rows as token ids, each within the prompt's length limit."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from algos.data.chat import Chat, Encoded
from algos.data.rows import Row
from algos.errors import InputError

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle"]
_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the model reads it (``ids``, ending with the assistant's header) and the row that it comes from."""

    ids: list[int]
    row: Row


class PromptDataset:
    """Rows tokenised once, when made: every fault of the data shows before a model is loaded.

    ``truncation`` says what happens to a prompt longer than ``max_prompt_length`` tokens that ``filter_overlong`` has
    not dropped: ``error`` refuses the data; ``left`` drops the oldest tokens, ``right`` the newest, ``middle`` those
    between. BOS and the assistant's header are never cut.

    ``digest`` is a fingerprint of all token ids in their order, the same on every machine; ``num_filtered`` counts the
    prompts dropped.

    Raises:
        InputError: no rows, a wrong option, an overlong prompt with ``truncation="error"``, only overlong prompts with
            ``filter_overlong``, a limit that the header alone exceeds, or a row that the chat template refuses.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: object | None = None,
        *,
        max_prompt_length: int = 512,
        truncation: Truncation = "error",
        filter_overlong: bool = False,
        chat: Chat | None = None,
    ) -> None:
        if truncation not in get_args(Truncation):
            raise InputError(f"data.truncation must be one of {', '.join(get_args(Truncation))}, got {truncation!r}")
        if max_prompt_length < 1:
            raise InputError(f"data.max_prompt_length must be at least 1 token, got {max_prompt_length}")
        if not rows:
            raise InputError("a data set needs at least one row, got none")
        self._max_prompt_length = max_prompt_length
        self._truncation = truncation
        self._chat = chat if chat is not None else Chat(tokenizer=tokenizer)
        self._rows: list[Row] = []
        self._ids: list[np.ndarray] = []
        self._load(rows, filter_overlong)
        self.digest = self._hash_ids()
        self.num_filtered = len(rows) - len(self._rows)
        if self.num_filtered:
            logger.warning(
                "dropped %d of %d prompts longer than %d tokens", self.num_filtered, len(rows), max_prompt_length
            )

    def __len__(self) -> int:
        """The number of prompts kept."""
        return len(self._rows)

    def __getitem__(self, prompt_idx: int) -> Prompt:
        """The prompt at one place of the data set (not of the file: see ``prompt.row.index`` for that)."""
        return Prompt(self._ids[prompt_idx].tolist(), self._rows[prompt_idx])

    def _load(self, rows: Sequence[Row], filter_overlong: bool) -> None:
        longest = 0
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[start : start + _CHUNK_ROWS]
            for row, encoded in zip(chunk, self._chat.encode(chunk), strict=True):
                longest = max(longest, len(encoded.ids))
                if filter_overlong and len(encoded.ids) > self._max_prompt_length:
                    continue
                self._rows.append(row)
                self._ids.append(np.asarray(self._fit(encoded, row), dtype=np.int32))
        if not self._rows:
            raise InputError(
                f"all {len(rows)} prompts are longer than data.max_prompt_length={self._max_prompt_length} tokens "
                f"(the longest has {longest}); raise the limit or choose other data"
            )

    def _fit(self, encoded: Encoded, row: Row) -> list[int]:
        if not encoded.ids:
            raise InputError(
                f"row {row.index} of {row.data_source!r} has a prompt of no tokens; correct or drop the row"
            )
        if len(encoded.ids) <= self._max_prompt_length:
            return encoded.ids
        if self._truncation == "error":
            raise InputError(
                f"row {row.index} of {row.data_source!r} has a prompt of {len(encoded.ids)} tokens, more than "
                f"data.max_prompt_length={self._max_prompt_length}; raise the limit, drop such rows with "
                "data.filter_overlong_prompts=True, or cut them with data.truncation=left, right or middle"
            )
        return self._cut(encoded, row)

    def _cut(self, encoded: Encoded, row: Row) -> list[int]:
        num_bos = int(encoded.has_bos)
        body_end = len(encoded.ids) - encoded.num_header
        num_kept = self._max_prompt_length - num_bos - encoded.num_header
        if num_kept < 1:
            raise InputError(
                f"data.max_prompt_length={self._max_prompt_length} leaves no room for row {row.index}: its beginning "
                f"and the assistant's header take {num_bos + encoded.num_header} tokens; raise the limit"
            )
        body = encoded.ids[num_bos:body_end]
        num_first = {"left": 0, "right": num_kept, "middle": num_kept - num_kept // 2}[self._truncation]
        kept = body[:num_first] + body[len(body) - (num_kept - num_first) :]
        return encoded.ids[:num_bos] + kept + encoded.ids[body_end:]

    def _hash_ids(self) -> str:
        hasher = hashlib.sha256()
        for ids in self._ids:
            hasher.update(len(ids).to_bytes(8, "little"))
            hasher.update(ids.astype("<i4").tobytes())
        return hasher.hexdigest()[:16]
