"""Records (one dict a row) out of parquet, JSON lines and Hugging Face dataset folders."""

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from algos.errors import InputError

Record = dict[str, Any]

FORMATS = "a .parquet file, a .jsonl file, a folder made by datasets.save_to_disk or a folder of such files"
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_GLOB_CHARACTERS = frozenset("*?[")


def read_records(path_text: str) -> Iterator[tuple[Path, Sequence[Record]]]:
    """Yields each file behind one path (a file, a folder or a pattern) with its records, in the order of the names.

    Raises:
        InputError: nothing is there, the format is unknown, or a file can't be read; the text names the file.
    """
    for path in _expand(path_text):
        if path.is_dir():
            yield path, _read_saved_dataset(path)
        elif path.suffix == ".parquet":
            yield path, _read_parquet(path)
        elif path.suffix in _JSON_SUFFIXES:
            yield path, _read_json_lines(path)
        else:
            raise InputError(f"data file {str(path)!r} has the ending {path.suffix!r}; expected {FORMATS}")


def _expand(path_text: str) -> list[Path]:
    path = Path(path_text).expanduser()
    if path.is_dir():
        return _expand_folder(path)
    if path.exists():
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(str(path)))] if _GLOB_CHARACTERS & set(path_text) else []
    if not matches:
        raise InputError(f"data file {path_text!r} does not exist (seen from {Path.cwd()}); expected {FORMATS}")
    return matches


def _expand_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text()).get("splits", [])
        raise InputError(
            f"data folder {str(folder)!r} holds several splits ({', '.join(splits)}); name one of them, "
            f"for example {str(folder / (splits[0] if splits else 'train'))!r}"
        )
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        return [folder]
    files = sorted(p for p in folder.iterdir() if p.suffix == ".parquet" or p.suffix in _JSON_SUFFIXES)
    if not files:
        raise InputError(f"data folder {str(folder)!r} has no data in it; expected {FORMATS}")
    return files


def _read_saved_dataset(folder: Path) -> Sequence[Record]:
    from datasets import load_from_disk  # slow to import, and only this format needs it

    try:
        return list(load_from_disk(str(folder)))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"data folder {str(folder)!r} is no dataset that datasets can load: {error}") from error


def _read_parquet(path: Path) -> Sequence[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"data file {str(path)!r} is not a readable parquet file: {error}") from error
    with file:
        try:
            return [record for batch in file.iter_batches() for record in batch.to_pylist()]
        except (OSError, pa.ArrowException) as error:
            names = ", ".join(_unreadable_columns(file)) or "unknown"
            raise InputError(f"data file {str(path)!r} can't be read; column at fault: {names}: {error}") from error


def _unreadable_columns(file: Any) -> list[str]:
    import pyarrow as pa

    unreadable = []
    for name in file.schema_arrow.names:
        try:
            for _ in file.iter_batches(columns=[name]):
                pass
        except (OSError, pa.ArrowException):
            unreadable.append(name)
    return unreadable


def _read_json_lines(path: Path) -> Sequence[Record]:
    records: list[Record] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line_number, line in enumerate(lines, start=1):
                if line.strip():
                    records.append(_parse_json_line(path, line_number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data file {str(path)!r} can't be read as UTF-8 text: {error}") from error
    return records


def _parse_json_line(path: Path, line_number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"data file {str(path)!r}, line {line_number}: expected one JSON object a line, got {line.strip()[:60]!r} "
            f"({error.msg})"
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"data file {str(path)!r}, line {line_number}: expected one JSON object a line, "
            f"got a {type(record).__name__}"
        )
    return record
