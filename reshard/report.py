"""A plan and its prediction as text, JSON, one self-contained HTML page, or a PNG."""

import html
import io
import json
from dataclasses import dataclass

import numpy as np

from reshard.errors import ReshardError
from reshard.pattern import IntArray
from reshard.plan import Plan
from reshard.plan_text import format_bytes
from reshard.simulator import Simulation, Traffic, traffic

WAYS = ("in place", "local", "NVLink", "network")
COLORS = ("#9aa5b1", "#5b8db8", "#58a55c", "#d9822b")
MAX_CELLS = 64
STYLE = " ".join(
    (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}",
        "h1{font-size:1.4em} h2{font-size:1.1em;margin-top:2em}",
        "pre{background:#f4f5f7;padding:1em;overflow:auto;font-size:12px}",
        "svg{max-width:100%;height:auto} svg text{font:11px system-ui,sans-serif;fill:#444} .key{margin-right:1.2em}",
    )
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a picture shows."""

    title: str
    plan: Plan
    simulation: Simulation


def report_text(report: Report) -> str:
    """The plan's table and a line about the prediction."""
    return f"{report.title}\n{report.plan}\n{_prediction(report.simulation)}"


def report_json(report: Report) -> str:
    """Numbers per rank, the matrix of bytes between ranks, and the prediction."""
    plan, result = report.plan, report.simulation
    names = ("in_place", "local", "nvlink", "network")
    ways = dict(zip(names, _ways(traffic(plan)), strict=True))
    ranks = [
        {
            "rank": rank,
            "needed_bytes": plan.certificate.needed_bytes[rank],
            "held_bytes": plan.certificate.held_bytes[rank],
            "received_bytes": plan.received_bytes(rank),
            **{f"{name}_bytes": int(values[rank]) for name, values in ways.items()},
        }
        for rank in plan.scope
    ]
    fields = {
        "title": report.title,
        "digest": plan.digest,
        "copies": plan.table.num,
        "seconds": result.seconds,
        "ranks": ranks,
        "node_floor_bytes": dict(plan.certificate.node_floor_bytes),
        "sent_bytes": matrix(plan)[0].tolist(),
        "memory_bytes": dict(zip(("train", "transition", "generate"), _phases(result), strict=True)),
    }
    return json.dumps(fields, indent=1)


def report_html(report: Report) -> str:
    """One page without scripts or references: who sends to whom, bytes per rank by way, memory by phase."""
    title = html.escape(report.title)
    body = [
        f"<h1>{title}</h1>",
        f"<p>{html.escape(_prediction(report.simulation))}</p>",
        f"<h2>Who sends to whom</h2>{_matrix_svg(report.plan)}",
        f"<h2>Bytes that each rank needs, by where they come from</h2>{_legend()}{_bars_svg(report.plan)}",
        f"<h2>Weights per rank, by phase</h2>{_memory_svg(report.simulation)}",
        f"<h2>Plan</h2><pre>{html.escape(str(report.plan))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(body)}</body></html>'
    )


def report_png(report: Report) -> bytes:
    """The bars and the matrix as a picture; ReshardError without matplotlib."""
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ReshardError("--format png needs matplotlib: pip install matplotlib, or use --format html") from None
    pyplot.switch_backend("Agg")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    sent, labels = matrix(report.plan)
    image = left.imshow(sent / 2**20, cmap="Blues")
    left.set(title="MiB sent, row to column", xlabel=labels, ylabel=labels)
    figure.colorbar(image, ax=left)
    ranks = list(report.plan.scope)
    bottom = np.zeros(len(ranks))
    for way, color, values in zip(WAYS, COLORS, _ways(traffic(report.plan)), strict=True):
        part = values[ranks] / 2**20
        right.bar(ranks, part, bottom=bottom, label=way, color=color)
        bottom += part
    right.set(title="MiB needed, by where they come from", xlabel="rank")
    right.legend(loc="lower right")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(f"{report.title}\n{_prediction(report.simulation)}", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return buffer.getvalue()


def matrix(plan: Plan) -> tuple[IntArray, str]:
    """Bytes sent, [from, to]: between ranks, or between nodes where there are more than 64 ranks."""
    src, dst = plan.table.src_rank.astype(np.int64), plan.table.dst_rank.astype(np.int64)
    size, labels = max(plan.scope) + 1, "rank"
    topology = plan.inputs.topology
    if size > MAX_CELLS and topology is not None:
        src, dst, labels = topology.nodes_of(src), topology.nodes_of(dst), "node"
        size = topology.num_nodes
    sent = np.zeros((size, size), np.int64)
    np.add.at(sent, (src, dst), plan.table.moved_bytes)
    return sent, labels


def _ways(found: Traffic) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    return found.in_place, found.local, found.nvlink, found.network


def _phases(result: Simulation) -> tuple[int, int, int]:
    return result.train_bytes, result.transition_bytes, result.generate_bytes


def _prediction(result: Simulation) -> str:
    return (
        f"predicted {result.seconds * 1e3:.2f} ms on {result.hardware.name} at {result.hardware.efficiency:.0%} of its "
        f"specified bandwidth, bound by {', then '.join(result.bound_by)}"
    )


def _legend() -> str:
    keys = (
        f'<span class="key"><span style="color:{color}">&#9632;</span> {way}</span>'
        for way, color in zip(WAYS, COLORS, strict=True)
    )
    return f"<p>{''.join(keys)}</p>"


def _svg(width: int, height: int, label: str, content: str) -> str:
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" width="{width}">{content}</svg>'


def _matrix_svg(plan: Plan) -> str:
    sent, labels = matrix(plan)
    size, most = len(sent), max(int(sent.max(initial=0)), 1)
    side = max(min(40, 640 // size), 8)
    every = -(-size * 14 // (size * side)) if side < 14 else 1
    parts = [f'<text x="{40 + size * side / 2}" y="12" text-anchor="middle">to {labels}</text>']
    for row in range(size):
        if row % every == 0:
            parts.append(f'<text x="36" y="{34 + row * side + side / 2}" text-anchor="end">{row}</text>')
            parts.append(f'<text x="{40 + row * side + side / 2}" y="26" text-anchor="middle">{row}</text>')
        for column in range(size):
            value = int(sent[row, column])
            shade = f"rgba(38,92,160,{value / most:.3f})" if value else "#f4f5f7"
            tip = f"{labels} {row} to {labels} {column}: {format_bytes(value)}"
            place = f'x="{40 + column * side}" y="{30 + row * side}" width="{side - 1}" height="{side - 1}"'
            parts.append(f'<rect {place} fill="{shade}"><title>{tip}</title></rect>')
    return _svg(48 + size * side, 38 + size * side, f"bytes sent between {labels}s", "".join(parts))


def _bars_svg(plan: Plan) -> str:
    ways = _ways(traffic(plan))
    ranks = list(plan.scope)
    total: IntArray = np.sum([values[ranks] for values in ways], axis=0)
    most = max(int(total.max(initial=0)), 1)
    height = 18 if len(ranks) <= MAX_CELLS else 6
    parts = []
    for index, rank in enumerate(ranks):
        y, x = index * (height + 3), 60.0
        if height > 10 or rank % 8 == 0:
            parts.append(f'<text x="54" y="{y + height - 4}" text-anchor="end">rank {rank}</text>')
        for way, color, values in zip(WAYS, COLORS, ways, strict=True):
            width = 640 * int(values[rank]) / most
            tip = f"rank {rank}, {way}: {format_bytes(int(values[rank]))}"
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
            parts.append(f'<rect {place} fill="{color}"><title>{tip}</title></rect>')
            x += width
        if height > 10:
            parts.append(f'<text x="{x + 6:.1f}" y="{y + height - 4}">{format_bytes(int(total[index]))}</text>')
    return _svg(800, len(ranks) * (height + 3) + 4, "bytes per rank", "".join(parts))


def _memory_svg(result: Simulation) -> str:
    sizes = _phases(result)
    most = max(*sizes, 1)
    parts = []
    for index, (phase, size) in enumerate(zip(("training", "transition", "generation"), sizes, strict=True)):
        y, width = index * 28, 560 * size / most
        parts.append(f'<text x="84" y="{y + 15}" text-anchor="end">{phase}</text>')
        parts.append(f'<rect x="90" y="{y}" width="{width:.1f}" height="22" fill="#7a6fb0"/>')
        parts.append(f'<text x="{96 + width:.1f}" y="{y + 15}">{format_bytes(size)}</text>')
    return _svg(800, 90, "weights per rank by phase", "".join(parts))
