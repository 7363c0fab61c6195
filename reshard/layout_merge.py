"""Join the parts of a Layout that different ranks describe, and carry a Layout across processes as plain bytes."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reshard.dtype import DType
from reshard.errors import LayoutError
from reshard.layout import Entry, Layout, TensorSpec
from reshard.pattern import Pattern, Row, make_pattern, pattern_from_rows, pattern_rows

_MAGIC = b"RSLAYOUT1\n"


def merge_layouts(parts: Iterable[Layout]) -> Layout:
    """One Layout from parts that describe different ranks.

    Raises LayoutError when a rank appears in two parts, when parts disagree about a tensor's shape, about ties or about
    the memory label; every disagreement is listed by name.
    """
    layouts = list(parts)
    if not layouts:
        raise LayoutError("merge needs at least one layout")
    _check_ranks(layouts)
    ties = _merge_ties(layouts)
    named: dict[str, list[tuple[Layout, Entry]]] = {}
    for layout in layouts:
        for name, entry in layout.entries.items():
            named.setdefault(ties.get(name, name), []).append((layout, entry))
    _check_specs(named)
    cache: dict[tuple[bytes, ...], Pattern] = {}
    entries = [_merge_entries(name, [entry for _, entry in found], cache) for name, found in named.items()]
    labels = {layout.memory for layout in layouts}
    if len(labels) > 1:
        raise LayoutError(f"parts carry different memory labels {sorted(map(str, labels))}: use one for all ranks")
    opaque = {rank: names for layout in layouts for rank, names in layout.opaque_map().items()}
    ranks = [rank for layout in layouts for rank in layout.ranks]
    return Layout(entries, ranks=ranks, memory=labels.pop(), ties=ties, opaque=opaque)


def _check_ranks(layouts: Sequence[Layout]) -> None:
    seen: set[int] = set()
    for layout in layouts:
        twice = seen & set(layout.ranks)
        if twice:
            raise LayoutError(f"ranks {sorted(twice)} are described by two parts: pass one layout per rank")
        seen |= set(layout.ranks)


def _merge_ties(layouts: Sequence[Layout]) -> dict[str, str]:
    ties: dict[str, str] = {}
    for layout in layouts:
        for name, target in layout.ties.items():
            known = ties.setdefault(name, target)
            if known != target:
                raise LayoutError(f"{name!r} is tied to {known!r} on one rank and to {target!r} on another")
    chained = sorted(name for name, target in ties.items() if target in ties)
    if chained:
        raise LayoutError(f"ties differ between ranks for {chained}: name the tied tensors in one order everywhere")
    return ties


def _check_specs(named: Mapping[str, Sequence[tuple[Layout, Entry]]]) -> None:
    conflicts = []
    for name, found in named.items():
        kinds: dict[tuple[tuple[int, ...], DType], list[int]] = {}
        for layout, entry in found:
            kinds.setdefault((entry.spec.shape, entry.spec.dtype), []).extend(layout.ranks)
        if len(kinds) > 1:
            told = "; ".join(
                f"{dtype.value}{list(shape)} on ranks {sorted(set(ranks))[:8]}"
                for (shape, dtype), ranks in kinds.items()
            )
            conflicts.append(f"{name}: {told}")
    if conflicts:
        raise LayoutError(
            "ranks disagree about global shape or dtype of "
            + " | ".join(conflicts[:8])
            + ("" if len(conflicts) <= 8 else f" and {len(conflicts) - 8} more")
            + "; a DTensor made with from_local on an uneven shard needs its global shape= and stride="
        )


def _merge_entries(name: str, found: Sequence[Entry], cache: dict[tuple[bytes, ...], Pattern]) -> Entry:
    slots: dict[str, int] = {}
    for entry in found:
        for storage in entry.storages:
            slots.setdefault(storage, len(slots))
    spec = TensorSpec(name, found[0].spec.shape, found[0].spec.dtype)
    renumbered = [tuple(slots[storage] for storage in entry.storages) for entry in found]
    key = tuple(entry.pattern.key + repr(new).encode() for entry, new in zip(found, renumbered, strict=True))
    if key not in cache:
        rows: list[Row] = []
        for entry, new in zip(found, renumbered, strict=True):
            rows += [(*row[:3], new[row[3]], *row[4:]) for row in pattern_rows(entry.pattern)]
        cache[key] = pattern_from_rows(spec.shape, rows)
    return Entry(spec, cache[key], tuple(slots))


def layout_to_bytes(layout: Layout) -> bytes:
    """A compact, self-contained form (zlib over JSON and little-endian int64 columns); no pickle."""
    head = {
        "ranks": layout.ranks,
        "memory": layout.memory,
        "ties": dict(layout.ties),
        "opaque": {str(rank): names for rank, names in layout.opaque_map().items()},
        "patterns": [{"shape": p.shape, "num": p.num} for p in layout.patterns],
        "entries": [
            [name, entry.spec.dtype.value, int(index), entry.storages]
            for (name, entry), index in zip(layout.entries.items(), layout.pattern_of, strict=True)
        ],
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    columns = b"".join(_pattern_table(pattern).astype("<i8").tobytes() for pattern in layout.patterns)
    return _MAGIC + zlib.compress(len(text).to_bytes(8, "little") + text + columns, 3)


def layout_from_bytes(data: bytes) -> Layout:
    """Inverse of ``layout_to_bytes``; LayoutError on other or damaged bytes."""
    if not data.startswith(_MAGIC):
        raise LayoutError(f"not a stored layout: expected it to begin with {_MAGIC!r}, got {data[:10]!r}")
    try:
        body = zlib.decompress(data[len(_MAGIC) :])
        size = int.from_bytes(body[:8], "little")
        head = json.loads(body[8 : 8 + size])
        columns = np.frombuffer(body, "<i8", offset=8 + size).astype(np.int64)
    except (zlib.error, ValueError) as error:
        raise LayoutError(f"stored layout is damaged: {error}") from error
    patterns = []
    for fields in head["patterns"]:
        ndim = len(fields["shape"])
        used = fields["num"] * (4 + 3 * ndim)
        patterns.append(
            _pattern_from_table(tuple(fields["shape"]), columns[:used].reshape(fields["num"], 4 + 3 * ndim))
        )
        columns = columns[used:]
    entries = [
        Entry(TensorSpec(name, patterns[index].shape, DType(dtype)), patterns[index], tuple(storages))
        for name, dtype, index, storages in head["entries"]
    ]
    opaque = {int(rank): names for rank, names in head["opaque"].items()}
    return Layout(entries, ranks=head["ranks"], memory=head["memory"], ties=head["ties"], opaque=opaque)


def _pattern_table(pattern: Pattern) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    columns = [pattern.ranks[:, None], pattern.starts(), pattern.stops(), pattern.slots[:, None]]
    columns += [pattern.offsets[:, None], pattern.strides, pattern.dtypes[:, None]]
    return np.concatenate(columns, axis=1)


def _pattern_from_table(shape: tuple[int, ...], table: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Pattern:
    ndim = len(shape)
    return make_pattern(
        shape,
        ranks=table[:, 0],
        starts=table[:, 1 : 1 + ndim],
        stops=table[:, 1 + ndim : 1 + 2 * ndim],
        slots=table[:, 1 + 2 * ndim],
        offsets=table[:, 2 + 2 * ndim],
        strides=table[:, 3 + 2 * ndim : 3 + 3 * ndim],
        dtypes=table[:, -1],
    )
