"""Plans as text: a short table for ``print`` and the long account for ``explain``."""

import numpy as np

from reshard.copy_table import CopyTable
from reshard.pattern import IntArray
from reshard.plan import Plan

_MAX_RANKS = 16
_MAX_TENSORS = 400


def format_bytes(num_bytes: float) -> str:
    """With a binary unit: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def summarize(plan: Plan) -> str:
    """A table: a row a rank with what it needs, holds, receives, sends and copies."""
    table = plan.table
    head = (
        f"Plan {plan.digest[:12]}: {len(table.names)} tensors, {table.num} copies, ranks {len(plan.source.ranks)} -> "
        f"{len(plan.destination.ranks)}, {format_bytes(float(table.moved_bytes.sum()))} between ranks"
    )
    columns = ["rank", "needs", "holds", "receives", "sends", "local", "in place"]
    sums = _per_rank(plan)
    rows = []
    for rank in plan.scope[:_MAX_RANKS]:
        cert = plan.certificate
        values = [cert.needed_bytes.get(rank, 0), cert.held_bytes.get(rank, 0), *(int(part[rank]) for part in sums)]
        rows.append([str(rank), *map(format_bytes, values)])
    lines = [head, *_grid([columns, *rows])]
    if len(plan.scope) > _MAX_RANKS:
        lines.append(f"... and {len(plan.scope) - _MAX_RANKS} more ranks")
    lines.append("received equals the floor |needed \\ held| on every rank")
    return "\n".join(lines)


def _per_rank(plan: Plan) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Bytes received, sent, copied locally, and in place, indexed by rank."""
    table = plan.table
    num = max(*plan.scope, *table.src_rank.tolist(), *table.dst_rank.tolist(), 0) + 1 if plan.scope else 1
    moved, written = table.moved_bytes, table.written_bytes
    local = table.src_rank == table.dst_rank
    kept = table.numel * _dst_itemsize(table) * table.alias

    def by(rank: IntArray, value: IntArray) -> IntArray:
        found = np.zeros(num, np.int64)
        np.add.at(found, rank, value)
        return found

    dst, src = table.dst_rank.astype(np.int64), table.src_rank.astype(np.int64)
    return by(dst, moved), by(src, moved), by(dst, written * local), by(dst, kept)


def _dst_itemsize(table: CopyTable) -> IntArray:
    from reshard.copy_table import ITEMSIZES

    found: IntArray = ITEMSIZES[table.dst_dtype]
    return found


def explain(plan: Plan) -> str:
    """The table of ``summarize``, the certificate, and a line a tensor; opaque storages by rank at the end."""
    lines = [summarize(plan), "", "Certificate"]
    for rank in plan.scope:
        cert = plan.certificate
        lines.append(
            f"  rank {rank}: needs {cert.needed_bytes[rank]} bytes, holds {cert.held_bytes[rank]} of them, "
            f"floor {cert.floor_bytes(rank)}, receives {plan.received_bytes(rank)}"
        )
    for node, floor in plan.certificate.node_floor_bytes.items():
        lines.append(f"  node {node}: {floor} bytes enter it, which is its floor")
    lines += ["", "Tensors", *_tensor_lines(plan)]
    for side, layout in (("source", plan.source), ("destination", plan.destination)):
        lines += [f"  {name} is tied to {target} ({side})" for name, target in layout.ties.items()]
        for rank, names in layout.opaque_map().items():
            lines.append(f"  rank {rank}: opaque in the {side}, take their owner's reload path: {', '.join(names)}")
    return "\n".join(lines)


def _tensor_lines(plan: Plan) -> list[str]:
    table = plan.table
    kinds = {
        "in place": table.alias != 0,
        "local": (table.src_rank == table.dst_rank) & (table.alias == 0),
        "received": table.src_rank != table.dst_rank,
    }
    cast = table.src_dtype != table.dst_dtype
    size = table.numel * _dst_itemsize(table)
    totals = {
        kind: np.bincount(table.name_idx, weights=size * mask, minlength=len(table.names))
        for kind, mask in kinds.items()
    }
    is_cast = np.bincount(table.name_idx, weights=cast, minlength=len(table.names)) > 0
    copies = np.bincount(table.name_idx, minlength=len(table.names))
    lines = []
    for index, name in enumerate(table.names[:_MAX_TENSORS]):
        spec = plan.destination.specs[name]
        parts = [f"{kind} {format_bytes(float(total[index]))}" for kind, total in totals.items() if total[index]]
        source = plan.source.specs[plan.source.resolve(name) or name] if plan.source.resolve(name) else spec
        change = f" cast {source.dtype.value} to {spec.dtype.value}," if is_cast[index] else ""
        lines.append(f"  {name} {list(spec.shape)}:{change} {copies[index]} copies, {', '.join(parts) or 'nothing'}")
    if len(table.names) > _MAX_TENSORS:
        lines.append(f"  ... and {len(table.names) - _MAX_TENSORS} more tensors")
    return lines


def _grid(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
