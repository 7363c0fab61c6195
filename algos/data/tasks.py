"""Rows made by reasoning-gym's task generators instead of read from a file.

The spec is one word without characters that a shell or YAML would take for its own:
``reasoning_gym:NAME:key=value:key=value``, for example
``reasoning_gym:chain_sum:min_terms=2:max_terms=2:size=1000:seed=1``. The keys are the fields of the task's own
configuration; ``size`` is the number of rows, ``seed`` is 0 unless given. See `algos.spec_text` for lists.

Row i of a task is drawn from seed + i. So training and validation rows overlap unless their seeds lie at least
``size`` apart.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from algos.errors import InputError
from algos.spec_text import nearest, parse_list, parse_options, parse_scalar

if TYPE_CHECKING:
    from algos.data.rows import DataSpec

PREFIX = "reasoning_gym:"
_EXAMPLE = "reasoning_gym:chain_sum:min_terms=2:max_terms=2:size=1000:seed=1"


@dataclasses.dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task's name and the fields of its configuration that were set."""

    name: str
    options: dict[str, Any]


def is_task_spec(text: str) -> bool:
    """Whether a data spec names a task generator and not a path."""
    return text.startswith(PREFIX)


def parse_spec(text: str) -> TaskSpec:
    """Reads a spec and checks it against the task's own configuration.

    Raises:
        InputError: reasoning-gym is not installed, has no such task, or its task has no such key or value.
    """
    name, *pairs = text.removeprefix(PREFIX).split(":")
    config_class = _config_class(name)
    defaults = {field.name: _default(field) for field in dataclasses.fields(config_class)}
    written = parse_options(pairs, where=f"data spec {text!r}", known=defaults)
    options = {"seed": 0} | {key: _parse_value(value, defaults[key]) for key, value in written.items()}
    return TaskSpec(name, options)


def make_task(spec: TaskSpec) -> Any:
    """The task generator itself: ``task[i]`` is an entry, ``task.score_answer(answer, entry)`` its own scorer."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(spec.name, **spec.options)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"task {spec.name!r} does not accept {spec.options}: {error}") from error


def generate(text: str, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields one record a row: ``question``, ``answer``, the entry's metadata by name, and what the scorer needs."""
    spec = parse_spec(text)
    task = make_task(spec)
    for entry_idx in range(len(task) if limit is None else min(limit, len(task))):
        entry = task[entry_idx]
        source = {"task": spec.name, "options": spec.options, "entry_idx": entry_idx}
        yield {
            **entry["metadata"],
            "question": entry["question"],
            "answer": entry["answer"],
            "data_source": f"{PREFIX}{spec.name}",
            "extra_info": {"reasoning_gym": source, "index": entry_idx, "question": entry["question"]},
        }


def columns_of(spec: "DataSpec") -> "DataSpec":
    """The spec with the column names of generated records in the place of the defaults for files."""
    return dataclasses.replace(
        spec,
        prompt_key="question" if spec.prompt_key == "prompt" else spec.prompt_key,
        answer_key="answer",
        data_source_key="data_source",
        extra_info_key="extra_info",
    )


def _config_class(name: str) -> type:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"data spec {PREFIX}{name} needs the package reasoning-gym, which can't be imported ({error}); "
            "install it, for example with: pip install reasoning-gym"
        ) from error
    if name not in DATASETS:
        raise InputError(f"reasoning-gym has no task {name!r}{nearest(name, DATASETS)}; a spec looks like {_EXAMPLE}")
    config_class: type = DATASETS[name][1]
    return config_class


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _parse_value(text: str, default: Any) -> Any:
    if isinstance(default, list | tuple):
        return parse_list(text)
    return unquote(text) if isinstance(default, str) else parse_scalar(text)
