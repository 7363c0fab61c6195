"""Converts GSM8K from its JSON lines (``question``, ``answer`` that ends with ``#### N``) to parquet rows.

``python -m algos.data.gsm8k train.jsonl train.parquet``
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from algos.data.files import read_records
from algos.errors import InputError
from algos.rewards.numbers import MARKER, after_marker

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Reason step by step and write the final number after "####".'


def convert(source: Path, target: Path, *, instruction: str = INSTRUCTION) -> int:
    """Writes every row of ``source`` to ``target`` (replaced as a whole, never left half written); returns how many.

    Raises:
        InputError: the source is missing or unreadable, or one of its rows is no GSM8K row (which is named).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    (_, records), *_ = read_records(str(source))
    rows = [_to_row(record, idx, source, instruction) for idx, record in enumerate(records)]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(rows)


def _to_row(record: dict[str, Any], idx: int, source: Path, instruction: str) -> dict[str, Any]:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or after_marker(answer) is None:
        raise InputError(
            f"{source}, row {idx}: expected 'question' and an 'answer' that ends with '#### NUMBER', "
            f"got {str(record)[:80]}"
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {instruction}".strip()}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition(MARKER)[2].strip().replace(",", "")},
        "extra_info": {"split": source.stem, "index": idx, "question": question, "answer": answer},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m algos.data.gsm8k", description="GSM8K from JSON lines to parquet")
    parser.add_argument("source", type=Path, help="train.jsonl or test.jsonl")
    parser.add_argument("target", type=Path, help="the parquet file to write")
    parser.add_argument("--instruction", default=INSTRUCTION, help="what follows each question (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        num_rows = convert(options.source, options.target, instruction=options.instruction)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {num_rows} rows to {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
