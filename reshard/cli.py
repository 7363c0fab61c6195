"""The command line: ``python -m reshard plan|explain|simulate|sweep|diff``. Needs no device and no weights."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import ReshardError
from reshard.plan_text import format_bytes
from reshard.report import Report, report_html, report_json, report_png, report_text
from reshard.scenario import Scenario, parse_sizes
from reshard.simulator import HARDWARE, gather_seconds, scaled, simulate
from reshard.spec import ModelSpec

EPILOG = """examples:
  what would tp=2 instead of tp=4 cost me on 16 GPUs?
    python -m reshard diff --model qwen2.5-7b --train fsdp=16 --gen tp=4 --gen tp=2
  all sizes at once, on H200s
    python -m reshard sweep --model llama3-70b --train tp=8,dp=2 --hardware h200
  a page to look at
    python -m reshard plan --model llama3-8b --train tp=8 --gen tp=2 --format html --out plan.html
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 2 with one line on stderr when the input was wrong."""
    options = _parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], str | bytes]] = {
        "plan": _plan,
        "explain": _explain,
        "simulate": _simulate,
        "sweep": _sweep,
        "diff": _diff,
    }
    try:
        output = commands[options.command](options)
        if options.out is not None:
            options.out.write_bytes(output if isinstance(output, bytes) else output.encode())
        elif isinstance(output, bytes):
            raise ReshardError("a picture needs a file: add --out plan.png")
        else:
            print(output)
    except (ReshardError, OSError) as error:
        print(f"reshard {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reshard",
        description="Plan the crossing of a model's weights from training shards to generation shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("plan", "who sends what: a table, a page or a picture"),
        ("explain", "per tensor and per rank, with the certificate"),
        ("simulate", "predicted seconds and memory"),
        ("sweep", "all generation sizes side by side"),
        ("diff", "two generation sizes side by side"),
    ):
        _add_options(commands.add_parser(name, help=text, epilog=EPILOG if name == "sweep" else None))
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="a bundled name such as llama3-8b, or a config.json")
    parser.add_argument("--train", required=True, help="sizes among pp, dp, fsdp, tp, ep: tp=8,dp=2")
    parser.add_argument("--gen", action="append", default=[], help="sizes among pp, tp, ep: tp=2 (diff: give it twice)")
    parser.add_argument("--grouping", choices=("zero_redundancy", "vanilla"), default="zero_redundancy")
    parser.add_argument(
        "--style", choices=("plain", "megatron"), default="plain", help="how the trainer stores weights"
    )
    parser.add_argument("--topology", type=int, default=8, metavar="N", help="ranks per node (default 8)")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h100")
    parser.add_argument("--efficiency", type=float, default=0.8, help="share of the specified bandwidth (default 0.8)")
    parser.add_argument("--format", choices=("text", "json", "html", "png"), default="text")
    parser.add_argument("--out", type=Path, help="write here instead of printing")


def _scenario(options: argparse.Namespace, generate: str) -> Scenario:
    return Scenario(
        model=ModelSpec.load(options.model),
        train=parse_sizes(options.train),
        generate=parse_sizes(generate),
        grouping=options.grouping,
        train_style=options.style,
        ranks_per_node=options.topology,
    )


def _gens(options: argparse.Namespace, count: int) -> list[str]:
    if len(options.gen) != count:
        raise ReshardError(
            f"expected --gen {'once' if count == 1 else f'{count} times'}, got it {len(options.gen)} times"
        )
    return list(options.gen)


def _report(options: argparse.Namespace) -> Report:
    (generate,) = _gens(options, 1)
    scenario = _scenario(options, generate)
    plan = scenario.plan()
    title = f"{options.model}: {options.train} to {generate} ({options.grouping})"
    hardware = scaled(HARDWARE[options.hardware], efficiency=options.efficiency)
    return Report(title, plan, simulate(plan, hardware))


def _plan(options: argparse.Namespace) -> str | bytes:
    report = _report(options)
    if options.format == "png":
        return report_png(report)
    writers = {"text": report_text, "json": report_json, "html": report_html}
    return writers[options.format](report)


def _explain(options: argparse.Namespace) -> str | bytes:
    report = _report(options)
    return report.plan.explain() if options.format == "text" else _plan(options)


def _simulate(options: argparse.Namespace) -> str | bytes:
    if options.format in ("html", "png"):
        return _plan(options)
    report = _report(options)
    result = report.simulation
    fields: dict[str, Any] = {
        "seconds": result.seconds,
        "hops": [{"seconds": s, "bound_by": b} for s, b in zip(result.hop_seconds, result.bound_by, strict=True)],
        "hardware": f"{result.hardware.name} ({result.hardware.origin}), {result.hardware.efficiency:.0%} of it",
        "train_bytes": result.train_bytes,
        "transition_bytes": result.transition_bytes,
        "generate_bytes": result.generate_bytes,
    }
    if options.format == "json":
        return json.dumps(fields, indent=1)
    hops = ", ".join(
        f"{s * 1e3:.2f} ms (bound by {b})" for s, b in zip(result.hop_seconds, result.bound_by, strict=True)
    )
    sizes = (result.train_bytes, result.transition_bytes, result.generate_bytes)
    memory = ", ".join(
        f"{n} {format_bytes(v)}" for n, v in zip(("training", "transition", "generation"), sizes, strict=True)
    )
    head = f"{report.title}\npredicted {result.seconds * 1e3:.2f} ms on {fields['hardware']}"
    return f"{head}\nhops: {hops}\nweights per rank: {memory}"


def _row(options: argparse.Namespace, generate: str) -> dict[str, Any]:
    scenario = _scenario(options, generate)
    plan = scenario.plan()
    hardware = scaled(HARDWARE[options.hardware], efficiency=options.efficiency)
    result = simulate(plan, hardware)
    return {
        "gen": generate,
        "received_per_rank": max(plan.received_bytes(rank) for rank in plan.scope),
        "moved": int(plan.table.moved_bytes.sum()),
        "network": sum(plan.certificate.node_floor_bytes.values()),
        "weights_per_rank": result.generate_bytes,
        "peak_per_rank": result.transition_bytes,
        "seconds": result.seconds,
        "full_gather_seconds": gather_seconds(
            scenario.model.num_bytes,
            num_ranks=scenario.num_ranks,
            ranks_per_node=options.topology,
            hardware=hardware,
        ),
    }


def _sweep(options: argparse.Namespace) -> str:
    scenario = _scenario(options, "tp=1")
    wanted = options.gen or [f"tp={2**power}" for power in range(12) if 2**power <= scenario.num_ranks]
    rows, refused = [], []
    for generate in wanted:
        try:
            rows.append(_row(options, generate))
        except ReshardError as error:
            if options.gen:
                raise
            refused.append(f"{generate}: {error}")
    if not rows:
        raise ReshardError(f"no generation size fits: {refused[0]}")
    return _table(options, rows, refused)


def _diff(options: argparse.Namespace) -> str:
    rows = [_row(options, generate) for generate in _gens(options, 2)]
    before, after = rows
    change = {key: after[key] - before[key] if key != "gen" else f"{before['gen']} -> {after['gen']}" for key in before}
    return _table(options, [*rows, change], [])


_HEADS = {
    "gen": "generation",
    "received_per_rank": "received/rank",
    "moved": "moved in all",
    "network": "into nodes",
    "weights_per_rank": "weights/rank",
    "peak_per_rank": "peak/rank",
    "seconds": "predicted",
    "full_gather_seconds": "full gather",
}


def _table(options: argparse.Namespace, rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    if options.format == "json":
        return json.dumps({"rows": list(rows), "refused": list(notes)}, indent=1)
    if options.format != "text":
        raise ReshardError(f"{options.command} prints text or json: html and png belong to plan")
    cells = [list(_HEADS.values()), *([_cell(key, row[key]) for key in _HEADS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    head = (
        f"{options.model}, training {options.train}, {options.grouping}, {options.hardware} at {options.efficiency:.0%}"
    )
    return "\n".join([head, *lines, *(f"left out: {note}" for note in notes)])


def _cell(key: str, value: Any) -> str:
    if key == "gen":
        return str(value)
    return f"{value * 1e3:.2f} ms" if key.endswith("seconds") else format_bytes(value)
