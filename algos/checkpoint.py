"""Checkpoints of a run: written whole or not at all, and exact to resume from.

A checkpoint is a folder ``checkpoints/step_000012``:

- ``state.json``: format, step, data position, controllers, Python's and NumPy's random state, the run's keys;
- ``model/``: what Transformers loads (config, fp32 safetensors, tokenizer);
- ``trainer.pt``: optimizer, schedule and torch's random state, loadable with ``weights_only=True``.

It is written under a name that starts with a dot, flushed to disk and renamed; ``latest.json`` beside it then names the
one that ``trainer.resume=auto`` continues. Nothing is unpickled but tensors and plain containers.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from algos.errors import CheckpointError

FORMAT = 1
STATE, MODEL, TENSORS, LATEST = "state.json", "model", "trainer.pt", "latest.json"
_NAME = re.compile(r"step_(\d+)$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read: ``state`` is plain JSON, ``tensors`` what ``trainer.pt`` holds (on the host)."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def model_folder(self) -> Path:
        """The folder that Transformers loads."""
        return self.folder / MODEL


def save_checkpoint(
    final: Path,
    step: int,
    *,
    state: Mapping[str, Any],
    tensors: Mapping[str, Any],
    write_model: Callable[[Path], None],
    max_to_keep: int | None = None,
) -> Path:
    """Write ``final`` (a folder ``.../step_NNNNNN``) and return it; older ones beyond ``max_to_keep`` are removed then.

    ``state`` must be JSON, ``tensors`` made of tensors, numbers, text and containers; ``write_model`` fills a folder.
    Blocks until the bytes are on disk. A checkpoint of the same step is replaced.
    """
    root = final.parent
    staging = root / f".{final.name}.{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    (staging / MODEL).mkdir(parents=True)
    write_model(staging / MODEL)
    torch.save(dict(tensors), staging / TENSORS)
    (staging / STATE).write_text(json.dumps({"format": FORMAT, "step": step, **state}))
    _flush_tree(staging)
    if final.exists():
        final.rename(root / f".replaced.{final.name}.{os.getpid()}")
    staging.rename(final)
    _write_latest(root, final.name)
    _remove_leftovers(root)
    if max_to_keep is not None:
        _prune(root, step, max_to_keep)
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under ``root``, or None.

    That is the one that ``latest.json`` names, or else the one with the highest step.
    """
    pointer = root / LATEST
    if pointer.is_file():
        named = root / str(json.loads(pointer.read_text())["name"])
        if (named / STATE).is_file():
            return named
    found = _steps(root)
    return found[max(found)] if found else None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint; raise CheckpointError when a part is missing, damaged or of another format."""
    for name in (STATE, TENSORS, f"{MODEL}/config.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: not a whole checkpoint, {name} is missing; resume from another one")
    try:
        state = json.loads((folder / STATE).read_text())
        tensors = torch.load(folder / TENSORS, map_location="cpu", weights_only=True)
    except (json.JSONDecodeError, UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{folder}: damaged ({' '.join(str(error).split())[:200]}); resume from another"
        ) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: expected format {FORMAT}, got {state.get('format')}; use the version that wrote it"
        )
    return Checkpoint(folder, int(state["step"]), state, tensors)


def host_random_state() -> dict[str, Any]:
    """Random state of Python and NumPy as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]
    return {"python": [version, list(words), gauss], "numpy": numpy_state}


def restore_host_random_state(saved: Mapping[str, Any]) -> None:
    """Put back what ``host_random_state`` returned."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))


def torch_random_state() -> dict[str, Any]:
    """Random state of torch: the host's and each GPU's."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": on_gpu}


def restore_torch_random_state(saved: Mapping[str, Any]) -> None:
    """Put back what ``torch_random_state`` returned; with another number of GPUs theirs stay as they are."""
    torch.set_rng_state(saved["cpu"])
    if saved["cuda"] and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])


def _steps(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    matches = [(_NAME.match(path.name), path) for path in root.iterdir()]
    return {int(match[1]): path for match, path in matches if match and (path / STATE).is_file()}


def _prune(root: Path, step: int, max_to_keep: int) -> None:
    older = sorted(number for number in _steps(root) if number <= step)
    for number in older[:-max_to_keep]:
        shutil.rmtree(_steps(root)[number])


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(".*step_*"):
        shutil.rmtree(path)


def _write_latest(root: Path, name: str) -> None:
    staging = root / f".{LATEST}"
    staging.write_text(json.dumps({"name": name}))
    _flush(staging)
    staging.rename(root / LATEST)
    _flush(root)


def _flush_tree(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in files:
            _flush(Path(place) / name)
        _flush(Path(place))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
