"""What the person at the terminal sees: a bar where there is a terminal, else a line a step, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

PHASES = ("rollout", "transition", "reward", "log_probs", "update")


class Reporter(Protocol):
    """Where a run tells what it is doing."""

    def begin(self, *, num_steps: int, step: int) -> None:
        """Training starts after ``step`` of ``num_steps``."""

    def say(self, text: str) -> None:
        """Tell one thing, on a line of its own."""

    def show(self, row: Mapping[str, float]) -> None:
        """Show a finished step's row."""

    def end(self) -> None:
        """Training is over; leave the terminal as it was."""


def make_reporter(*, enabled: bool) -> Reporter:
    """A bar on a terminal, plain lines elsewhere, silence where the console is not among the loggers."""
    if not enabled:
        return SilentReporter()
    console = Console()
    return BarReporter(console) if console.is_terminal else LineReporter()


def summary(row: Mapping[str, float]) -> str:
    """Reward, response length and KL of a row."""
    return f"reward {row['reward/mean']:.3f}  length {row['response_length/mean']:.1f}  kl {row['kl/mean']:.4f}"


def time_split(row: Mapping[str, float]) -> str:
    """Where a step's time went, in seconds."""
    parts = [f"{phase.replace('_', '-')} {row[f'time/{phase}']:.2f}" for phase in PHASES if f"time/{phase}" in row]
    return f"{row['time/step']:.1f} s: {', '.join(parts)}"


class SilentReporter:
    """Says nothing."""

    def begin(self, *, num_steps: int, step: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def show(self, row: Mapping[str, float]) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class LineReporter:
    """A line a step on standard output, flushed."""

    def __init__(self) -> None:
        """Start with no steps known."""
        self._num_steps = 0

    def begin(self, *, num_steps: int, step: int) -> None:
        """Remember how many steps there are."""
        self._num_steps = num_steps

    def say(self, text: str) -> None:
        """Print the text."""
        print(text, flush=True)

    def show(self, row: Mapping[str, float]) -> None:
        """Print the row's summary."""
        print(f"step {int(row['step'])}/{self._num_steps}  {summary(row)}  {time_split(row)}", flush=True)

    def end(self) -> None:
        """Nothing is left to undo."""


class BarReporter:
    """A live bar with the last step's numbers and the split of its time under it."""

    def __init__(self, console: Console) -> None:
        """Draw on ``console``."""
        self._console = console
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._numbers = Text("the first step is on its way", overflow="ellipsis", no_wrap=True)
        self._times = Text("", overflow="ellipsis", no_wrap=True)
        self._live = Live(Group(self._bar, self._numbers, self._times), console=console, refresh_per_second=4)
        self._task: TaskID | None = None

    def begin(self, *, num_steps: int, step: int) -> None:
        """Draw the bar."""
        self._task = self._bar.add_task("step", total=num_steps, completed=step)
        self._live.start()

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def show(self, row: Mapping[str, float]) -> None:
        """Move the bar."""
        assert self._task is not None
        self._bar.update(self._task, completed=row["step"])
        self._numbers.plain, self._times.plain = summary(row), time_split(row)

    def end(self) -> None:
        """Stop redrawing and show the cursor again."""
        self._live.stop()
