"""What a run leaves behind: a row of numbers a step, sampled completions, TensorBoard events and a picture."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, float]
NUM_ENDS = 5


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of a run folder."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved keys, as ``config=FILE`` reads them."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON row a step."""
        return self.root / "metrics.jsonl"

    @property
    def completions(self) -> Path:
        """Sampled responses, one JSON row each."""
        return self.root / "completions.jsonl"

    @property
    def events(self) -> Path:
        """TensorBoard's folder."""
        return self.root / "tensorboard"

    @property
    def plot(self) -> Path:
        """The reward over the steps."""
        return self.root / "reward.png"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The folder of one step's checkpoint."""
        return self.checkpoints / f"step_{step:06d}"


class MetricsLog:
    """Writes the rows of a run; after a resume at ``last_step`` it forgets what came later and goes on."""

    def __init__(self, paths: RunPaths, *, last_step: int, tensorboard: bool) -> None:
        """Open the files under ``paths``; rows after ``last_step`` are dropped, from TensorBoard's view too."""
        self._paths = paths
        self.rows: list[Row] = [row for row in read_rows(paths.metrics) if row["step"] <= last_step]
        _rewrite(paths.metrics, self.rows)
        _rewrite(paths.completions, [row for row in read_rows(paths.completions) if row["step"] <= last_step])
        self._events = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(paths.events), purge_step=last_step + 1)

    def write(self, row: Row, completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add one step's row and its completions; both are on their way to disk when this returns."""
        self.rows.append(row)
        _append(self._paths.completions, completions)
        _append(self._paths.metrics, [row])
        if self._events is not None:
            for name, value in row.items():
                if name != "step" and math.isfinite(value):
                    self._events.add_scalar(name, value, int(row["step"]))
            self._events.flush()

    def close(self) -> None:
        """Close TensorBoard's events and draw the reward."""
        if self._events is not None:
            self._events.close()
        if self.rows and importlib.util.find_spec("matplotlib"):
            _draw(self.rows, self._paths.plot)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file, in order; null means that a number was not finite; a torn last line is skipped."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def ends(rows: Sequence[Row], name: str = "reward/mean") -> tuple[float, float]:
    """Mean of ``name`` over the first and over the last five rows."""
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    first, last = values[:NUM_ENDS], values[-NUM_ENDS:]
    return (sum(first) / len(first), sum(last) / len(last)) if values else (math.nan, math.nan)


def memory_row(device: torch.device) -> Row:
    """Peak memory so far, in bytes: of this process on the host and, on a GPU, of torch's allocator."""
    unit = 1 if sys.platform == "darwin" else 1024
    row = {"memory/host_peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if device.type == "cuda":
        row["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return row


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps({name: _jsonable(value) for name, value in row.items()}) + "\n" for row in rows)


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        with path.open("a") as file:
            file.write(_lines(rows))


def _rewrite(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(_lines(rows))
    staging.rename(path)


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps, rewards = [row["step"] for row in rows], [row["reward/mean"] for row in rows]
    smooth = [sum(rewards[max(0, end - NUM_ENDS) : end]) / min(end, NUM_ENDS) for end in range(1, len(rewards) + 1)]
    axes.plot(steps, rewards, marker="o", markersize=3, alpha=0.4, label="mean reward of a step")
    axes.plot(steps, smooth, linewidth=2, label=f"mean of the last {NUM_ENDS}")
    axes.set(xlabel="step", ylabel="reward", title="Reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
