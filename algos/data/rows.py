"""Rows: what one line of training data says, whatever file or task generator it comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from algos.data import tasks
from algos.data.files import Record, read_records
from algos.errors import InputError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt with what its reward function needs. ``index`` counts over all rows loaded together."""

    prompt: str | list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] | None
    index: int
    ability: str | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where rows come from and which of their columns mean what; a dot reaches into a nested column.

    ``files`` are paths (see `algos.data.files`) or task generators (see `algos.data.tasks`). ``data_source`` names the
    source of rows that have no such column. ``prompt_template`` makes the prompt's text out of the row's columns, as
    ``"What is {expression}?"`` does; ``prompt_suffix`` is added to the last message; ``system_prompt`` comes first.
    """

    files: tuple[str, ...]
    prompt_key: str = "prompt"
    answer_key: str = "reward_model.ground_truth"
    data_source_key: str = "data_source"
    extra_info_key: str = "extra_info"
    tools_key: str = "tools"
    data_source: str | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    prompt_suffix: str = ""
    max_rows: int | None = None


def load_rows(spec: DataSpec | str | Sequence[str]) -> list[Row]:
    """Reads every row of a spec, or of one path or several with the default columns, in the order given.

    Raises:
        InputError: a file is missing or unreadable, a needed column is absent (all of its names are listed), a prompt
            is neither text nor a list of messages, or there is no row at all.
    """
    if not isinstance(spec, DataSpec):
        spec = DataSpec(files=(spec,) if isinstance(spec, str) else tuple(spec))
    if not spec.files:
        raise InputError("no data file given; set data.train_files to a path or a list of paths")
    rows: list[Row] = []
    for name in spec.files:
        rows.extend(_rows_of(name, spec, first_index=len(rows)))
        if spec.max_rows is not None and len(rows) >= spec.max_rows:
            del rows[spec.max_rows :]
            break
    if not rows:
        raise InputError(f"no rows in {', '.join(spec.files)}; expected at least one")
    return rows


def _rows_of(name: str, spec: DataSpec, *, first_index: int) -> list[Row]:
    rows: list[Row] = []
    if tasks.is_task_spec(name):
        limit = None if spec.max_rows is None else spec.max_rows - first_index
        for record in tasks.generate(name, limit=limit):
            rows.append(_to_row(record, tasks.columns_of(spec), name, first_index + len(rows)))
        return rows
    for path, records in read_records(name):
        _check_columns(records, spec, str(path))
        for record in records:
            rows.append(_to_row(record, spec, str(path), first_index + len(rows)))
    return rows


def _check_columns(records: Sequence[Record], spec: DataSpec, where: str) -> None:
    if not records:
        return
    needed = [("data.answer_key", spec.answer_key)]
    if spec.prompt_template is None:
        needed.insert(0, ("data.prompt_key", spec.prompt_key))
    missing = [(option, key) for option, key in needed if not any(_has(record, key) for record in records)]
    if missing:
        columns = " and ".join(f"{key!r}" for _, key in needed)
        options = ", ".join(f"{option}=NAME (now {key})" for option, key in missing)
        raise InputError(
            f"{where}: missing column {', '.join(repr(key) for _, key in missing)}; needed are {columns}, the file has "
            f"{', '.join(sorted(records[0]))}. Rename it, or say which column to use: {options}"
        )


def _has(record: Mapping[str, Any], key: str) -> bool:
    """Whether the column exists; a nested value that is null counts as there, since other rows may fill it."""
    if key in record:
        return True
    head, _, rest = key.partition(".")
    if not rest or head not in record:
        return False
    nested = record[head]
    return nested is None or (isinstance(nested, Mapping) and _has(nested, rest))


def _get(record: Mapping[str, Any], key: str) -> Any:
    if key in record:
        return record[key]
    head, _, rest = key.partition(".")
    nested = record.get(head)
    return _get(nested, rest) if rest and isinstance(nested, Mapping) else None


def _to_row(record: Record, spec: DataSpec, where: str, index: int) -> Row:
    place = f"{where}, row {index}"
    extra_info = _get(record, spec.extra_info_key)
    if extra_info is not None and not isinstance(extra_info, dict):
        raise InputError(
            f"{place}: column {spec.extra_info_key!r} must hold an object or null, got {type(extra_info).__name__}; "
            "set data.extra_info_key to another column"
        )
    ability, tools = record.get("ability"), _get(record, spec.tools_key)
    return Row(
        prompt=_prompt_of(record, spec, place),
        data_source=str(_get(record, spec.data_source_key) or spec.data_source or _stem(where)),
        ground_truth=_get(record, spec.answer_key),
        extra_info=extra_info,
        index=index,
        ability=None if ability is None else str(ability),
        tools=_without_nulls(tools) if tools else None,
    )


def _stem(where: str) -> str:
    return where.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].partition(".")[0]


def _prompt_of(record: Record, spec: DataSpec, place: str) -> str | list[Message]:
    if spec.prompt_template is not None:
        prompt: str | list[Message] = _fill(spec.prompt_template, record, place)
    else:
        prompt = _checked_prompt(_get(record, spec.prompt_key), spec.prompt_key, place)
    if spec.prompt_suffix:
        prompt = _with_suffix(prompt, spec.prompt_suffix, place)
    if spec.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": spec.system_prompt}, *messages]


def _fill(template: str, record: Record, place: str) -> str:
    try:
        return template.format_map(record)
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(
            f"{place}: data.prompt_template {template!r} does not fit ({error}); the columns are "
            f"{', '.join(sorted(record))}, and a brace that is text is written twice"
        ) from error


def _checked_prompt(value: Any, key: str, place: str) -> str | list[Message]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{name: item for name, item in message.items() if item is not None} for message in value]
    shown = repr(value)
    raise InputError(
        f"{place}: column {key!r} must hold text or a list of messages with 'role' and 'content', "
        f"got {type(value).__name__} {shown[:80]}; correct or drop the row, or set data.prompt_key"
    )


def _without_nulls(value: Any) -> Any:
    """A value without its null keys: columns of structs come back with every key that any row has."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _with_suffix(prompt: str | list[Message], suffix: str, place: str) -> str | list[Message]:
    if isinstance(prompt, str):
        return prompt + suffix
    *before, last = prompt
    if not isinstance(last["content"], str):
        raise InputError(
            f"{place}: data.prompt_suffix needs a last message whose content is text, "
            f"got {type(last['content']).__name__}; leave the option out"
        )
    return [*before, {**last, "content": last["content"] + suffix}]
