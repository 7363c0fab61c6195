"""Token ids of a prompt by the model's own chat template. The length filter and the rollout both get them from here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from algos.data.rows import Message, Row
from algos.errors import InputError


@dataclass(frozen=True, slots=True)
class Encoded:
    """A whole prompt's ids. The last ``num_header`` of them open the assistant's turn; the first may be BOS."""

    ids: list[int]
    num_header: int
    has_bos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Renders rows with one tokenizer.

    A prompt that is text becomes a user's message where the tokenizer has a chat template, and stays plain text where
    it has none or ``raw_text`` is set. ``template_options`` go to the template (``{"enable_thinking": False}``).
    A model that has a BOS at the start of its texts gets exactly one, whether its template, its tokenizer, both or
    none would write it.
    """

    tokenizer: Any
    raw_text: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)

    def encode(self, rows: Sequence[Row]) -> list[Encoded]:
        """Token ids of each row's prompt, tool schemas included, up to and with the assistant's header.

        Raises:
            InputError: messages without a chat template, or a template that refuses a row (which is named).
        """
        texts = [self._render(row) for row in rows]
        ids = self._tokenize([text for text, _ in texts])
        adds_bos = self._tokenizer_adds_bos()
        joined = [self._with_one_bos(row_ids, adds_bos=adds_bos) for row_ids in ids]
        headers = {header: self._tokenize([header])[0] for header in {header for _, header in texts if header}}
        return [
            Encoded(row_ids, self._num_header_tokens(row_ids, header, headers.get(header, [])), has_bos=has_bos)
            for (row_ids, has_bos), (_, header) in zip(joined, texts, strict=True)
        ]

    def _render(self, row: Row) -> tuple[str, str]:
        """The prompt's text and, of its end, the text that opens the assistant's turn."""
        messages = self._messages(row)
        if messages is None:
            return str(row.prompt), ""
        closed = self._apply_template(messages, row, add_generation_prompt=False)
        opened = self._apply_template(messages, row, add_generation_prompt=True)
        return opened, opened[len(closed) :] if opened.startswith(closed) else ""

    def _messages(self, row: Row) -> list[Message] | None:
        has_template = bool(self.tokenizer.chat_template)
        if isinstance(row.prompt, str):
            return [{"role": "user", "content": row.prompt}] if has_template and not self.raw_text else None
        if not has_template:
            raise InputError(
                f"row {row.index} of {row.data_source!r} is a list of messages, but the tokenizer has no chat "
                "template; use a model with one, or prompts that are plain text"
            )
        return row.prompt

    def _apply_template(self, messages: list[Message], row: Row, *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_options,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InputError(
                f"the chat template refuses row {row.index} of {row.data_source!r} "
                f"(roles: {', '.join(message['role'] for message in messages)}): {error}"
            ) from error
        return str(text)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []

    def _with_one_bos(self, ids: list[int], *, adds_bos: bool) -> tuple[list[int], bool]:
        """The ids with one BOS where there were several or the tokenizer adds it; and whether they begin with one."""
        bos = self.tokenizer.bos_token_id
        num_bos = 0
        while bos is not None and num_bos < len(ids) and ids[num_bos] == bos:
            num_bos += 1
        if num_bos == 0 and adds_bos:
            return [bos, *ids], True
        return ids[max(0, num_bos - 1) :], num_bos > 0

    def _num_header_tokens(self, ids: list[int], header: str, header_ids: list[int]) -> int:
        """How many ids at the end hold the header; ``header_ids`` are its own, but it may begin inside a token."""
        if ids[-len(header_ids) :] == header_ids or not header.strip():
            return len(header_ids)
        num_tokens = 1
        while num_tokens < len(ids) and header.strip() not in self.tokenizer.decode(ids[-num_tokens:]):
            num_tokens += 1
        return num_tokens

    def _tokenizer_adds_bos(self) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
