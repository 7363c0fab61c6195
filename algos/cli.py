"""The command line of a loop: ``python -m algos.grpo key=value ...``.

Exit codes: 0 done; 2 something in the input is wrong, said in one line on standard error; 130 or 143 ended by Ctrl-C
or SIGTERM, with a checkpoint of the last step.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from algos.config_load import Loaded, help_text, load_config
from algos.errors import CheckpointError, InputError
from algos.metrics import ends
from algos.stop import Aborted
from algos.trainer import Result

USAGE = """Train a language model with GRPO.

  python -m algos.grpo model.path=FOLDER data.train_files=FILE reward.function=NAME [key=value ...] [config=FILE.yaml]

A later key wins; keys on the command line win over config=FILE. The prefix actor_rollout_ref. is accepted.
A prompt is one row of the data, a sample one response to it, a micro-batch the samples of one forward pass.
Keys with their defaults (an empty default means not set):
"""


def main(args: Sequence[str]) -> int:
    """Run GRPO by ``key=value`` arguments and return the exit code."""
    if any(arg in ("-h", "--help") for arg in args):
        print(USAGE)
        print(help_text())
        return 0
    try:
        return run_and_report(load_config(None, args))
    except InputError as error:
        return refuse(error)


def run_and_report(loaded: Loaded) -> int:
    """Train, print what came of it, and return the exit code."""
    from algos.grpo import run

    _quieten()
    try:
        result = run(loaded)
    except (InputError, CheckpointError) as error:
        return refuse(error)
    except Aborted as aborted:
        print(f"{aborted}; what was saved before is whole", file=sys.stderr)
        return 128 + aborted.signum
    if "console" in loaded.config.trainer.logger:
        print(report(result))
    return 128 + result.stopped_by if result.stopped_by else 0


def refuse(error: Exception) -> int:
    """Say on one line what is wrong with the input; return exit code 2."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def report(result: Result) -> str:
    """The last lines of a run: how far it came, the reward at both ends, where everything is."""
    lines = []
    if result.stopped_by:
        name = signal.Signals(result.stopped_by).name
        lines.append(f"Ended by {name} after step {result.num_steps}; the same command goes on from there.")
    if result.metrics:
        first, last = ends(result.metrics)
        lines.append(f"Mean reward: {first:.3f} over the first five steps, {last:.3f} over the last five.")
    paths = result.paths
    lines.append(f"Run folder:  {paths.root} ({paths.metrics.name}, {paths.completions.name}, {paths.config.name})")
    if paths.plot.is_file():
        lines.append(f"Reward:      {paths.plot}")
    if paths.events.is_dir():
        lines.append(f"TensorBoard: tensorboard --logdir {paths.events}")
    if result.model_folder:
        lines.append(f"Model:       {result.model_folder}")
    return "\n".join(lines)


def _quieten() -> None:
    """Keep libraries' notes and bars out of the run's own output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
