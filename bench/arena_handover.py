"""Hand a KV cache's memory to a trainer and back, beside cudaMalloc/cudaFree of the same sizes: ``python -m
bench.arena_handover``.

The KV region is `--kv-gib` in `--kv-segments` equal segments, the trainer's `--trainer-gib` in `--trainer-segments`
segments of PyTorch-like sizes (multiples of 2 MiB, drawn with a fixed seed). The budget is the larger of the two, so
that the same chunks have to serve both. Each cycle hands KV to the trainer and back, writes a label of the cycle into
every segment on arrival and reads all of it back (outside the timing). Checked: labels, addresses, and that after the
first cycle no chunk is created or destroyed.

Times are wall-clock milliseconds of ``Arena.handover`` as called from Python, device idle before, with a device
synchronisation after. ``drop`` unmaps released regions, ``keep`` leaves them mapped (see
``reshard.arena.MappingMode``). On a machine with no GPU, ``--host`` runs the same on host memory, in MiB in place of
GiB."""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.record import environment, save, summary
from reshard.arena import Arena, ArenaRegion

TARGET_MS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of one run; ``unit_bytes`` is the granularity of segments."""

    device: int
    unit_bytes: int
    kv: tuple[int, ...]
    trainer: tuple[int, ...]
    cycles: int

    @property
    def budget_bytes(self) -> int:
        """The physical memory that both sides share."""
        return max(sum(self.kv), sum(self.trainer))

    def make_arena(self, mappings: Any, budget_bytes: int) -> Arena:
        """An arena of this setting's device; the host's chunk classes are the GPU's divided by 512."""
        if self.device >= 0:
            return Arena.cuda(self.device, mappings=mappings, budget_bytes=budget_bytes)
        classes = tuple(self.unit_bytes << power for power in range(9, -1, -1))
        return Arena.host(chunk_classes=classes, mappings=mappings, budget_bytes=budget_bytes)

    def synchronize(self) -> None:
        """Wait for the device, if there is one."""
        if self.device >= 0:
            torch.cuda.synchronize(self.device)


def split_evenly(total_bytes: int, num_segments: int, unit_bytes: int) -> tuple[int, ...]:
    """Equal segments, rounded down to the unit."""
    return (total_bytes // num_segments // unit_bytes * unit_bytes,) * num_segments


def split_unevenly(total_bytes: int, num_segments: int, unit_bytes: int) -> tuple[int, ...]:
    """Segments from a twelfth of the mean to four times the mean, the same in every run, that add up to the total."""
    draw = random.Random(0)
    weights = [2.0 ** draw.uniform(-3.6, 2.0) for _ in range(num_segments)]
    sizes = [max(1, int(total_bytes * w / sum(weights)) // unit_bytes) * unit_bytes for w in weights]
    sizes[-1] += max(0, total_bytes - sum(sizes)) // unit_bytes * unit_bytes
    return tuple(sizes)


def mark(regions: tuple[ArenaRegion, ...], label: int) -> None:
    """Write a label that depends on the segment into all of its bytes."""
    for idx, region in enumerate(regions):
        region.tensor(torch.int64).fill_(label * 1000 + idx)


def check(regions: tuple[ArenaRegion, ...], label: int) -> None:
    """Read every word back."""
    for idx, region in enumerate(regions):
        words = region.tensor(torch.int64)
        low, high = torch.aminmax(words)
        if int(low) != label * 1000 + idx or int(high) != label * 1000 + idx:
            raise AssertionError(f"{region} holds {int(low)} to {int(high)} in place of {label * 1000 + idx}")


def timed_ms(setting: Setting, work: Any) -> tuple[float, Any]:
    """Wall-clock milliseconds of ``work()`` on an idle device, and its result."""
    setting.synchronize()
    begin = time.perf_counter()
    result = work()
    setting.synchronize()
    return (time.perf_counter() - begin) * 1e3, result


def rotate(setting: Setting, mappings: str) -> dict[str, Any]:
    """Cycles of one mapping mode: medians, counts and checks."""
    with setting.make_arena(mappings, setting.budget_bytes) as arena:
        allocate_ms, kv = timed_ms(setting, lambda: reserve(arena, "kv", setting.kv))
        first_back_ms, _ = timed_ms(setting, lambda: arena.back(kv))
        trainer = reserve(arena, "trainer", setting.trainer)
        addresses = [region.tensor().data_ptr() for region in (*kv, *trainer)]
        samples: dict[str, list[float]] = {"to_training_ms": [], "to_generation_ms": []}
        counts: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in samples}
        profile: dict[str, dict[str, float]] = {}
        for cycle in range(setting.cycles + 1):
            for name, leave, come in (("to_training_ms", kv, trainer), ("to_generation_ms", trainer, kv)):
                elapsed_ms, report = timed_ms(setting, lambda leave=leave, come=come: arena.handover(leave, come))
                samples[name].append(elapsed_ms)
                counts[name].append((report.num_creates, report.num_destroys, report.num_maps, report.num_unmaps))
                profile[name] = {part: value for part, value in asdict(report).items() if part.endswith("_us")}
                mark(come, cycle)
                check(come, cycle)
        if addresses != [region.tensor().data_ptr() for region in (*kv, *trainer)]:
            raise AssertionError("an address changed")
        if any(creates or destroys for name in counts for creates, destroys, _, _ in counts[name][1:]):
            raise AssertionError(f"memory was created or destroyed after the first cycle: {counts}")
        stats = arena.stats
        return {
            "reserve_ms": allocate_ms,
            "first_back_ms": first_back_ms,
            "first_cycle_ms": {name: values[0] for name, values in samples.items()},
            **{name: summary(values[1:]) for name, values in samples.items()},
            "calls_of_last_cycle": {
                name: dict(zip(("creates", "destroys", "maps", "unmaps"), values[-1], strict=True))
                for name, values in counts.items()
            },
            "profile_of_last_cycle": profile,
            "created_bytes": stats.created_bytes,
            "num_chunks": stats.num_chunks,
            "chunk_sizes": {str(size): num for size, num in arena.chunk_sizes.items()},
        }


def rotate_torch(setting: Setting, mappings: str) -> dict[str, Any]:
    """The same hand-over with a trainer whose segments PyTorch allocated: TrainerPool.suspend and resume."""
    from reshard.arena.torch_pool import TrainerPool

    with setting.make_arena(mappings, setting.budget_bytes + (64 << 20)) as arena:
        kv = reserve(arena, "kv", setting.kv)
        pool = TrainerPool(arena, group="trainer")
        with pool.use():
            blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in setting.trainer]
        addresses = sorted(block.data_ptr() for block in blocks)
        if not {region.address for region in pool.regions()}.issuperset(addresses):
            raise AssertionError("a block of the trainer is not a segment of its own")
        del blocks
        samples: dict[str, list[float]] = {"to_training_ms": [], "to_generation_ms": []}
        for cycle in range(setting.cycles + 1):
            elapsed_ms, _ = timed_ms(setting, lambda: pool.suspend(kv))
            samples["to_generation_ms"].append(elapsed_ms)
            mark(kv, cycle)
            check(kv, cycle)
            before = arena.stats
            elapsed_ms, _ = timed_ms(setting, lambda: pool.resume(kv))
            samples["to_training_ms"].append(elapsed_ms)
            now = arena.stats
            if cycle and (now.num_creates, now.num_destroys) != (before.num_creates, before.num_destroys):
                raise AssertionError("memory was created or destroyed after the first cycle")
        if not {region.address for region in pool.regions()}.issuperset(addresses):
            raise AssertionError("an address changed")
        pool.close()
        return {name: summary(values[1:]) for name, values in samples.items()}


def reserve(arena: Arena, group: str, sizes: tuple[int, ...]) -> tuple[ArenaRegion, ...]:
    """Reserve one region per size."""
    return tuple(arena.reserve(f"{group}.{idx}", size, group=group) for idx, size in enumerate(sizes))


class CudaRuntime:
    """cudaMalloc and cudaFree, as the libraries of today call them at each change of phase."""

    def __init__(self) -> None:
        """Find the runtime that PyTorch has loaded."""
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libcudart" in line}
        self._library = ctypes.CDLL(min(paths))

    def malloc(self, sizes: tuple[int, ...]) -> list[ctypes.c_void_p]:
        """One cudaMalloc per size."""
        pointers = []
        for size in sizes:
            pointer = ctypes.c_void_p()
            if error := self._library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
                raise RuntimeError(f"cudaMalloc of {size} bytes failed with error {error}")
            pointers.append(pointer)
        return pointers

    def free(self, pointers: list[ctypes.c_void_p]) -> None:
        """One cudaFree per pointer."""
        for pointer in pointers:
            if error := self._library.cudaFree(pointer):
                raise RuntimeError(f"cudaFree failed with error {error}")


def malloc_and_free(setting: Setting) -> dict[str, Any]:
    """The baseline: free one side's segments and allocate the other's, each way, as many cycles."""
    torch.cuda.empty_cache()
    runtime = CudaRuntime()
    samples: dict[str, list[float]] = {"to_training_ms": [], "to_generation_ms": []}
    held = runtime.malloc(setting.kv)

    def swap(sizes: tuple[int, ...]) -> list[ctypes.c_void_p]:
        runtime.free(held)
        return runtime.malloc(sizes)

    for _ in range(setting.cycles):
        for name, sizes in (("to_training_ms", setting.trainer), ("to_generation_ms", setting.kv)):
            elapsed_ms, held = timed_ms(setting, lambda sizes=sizes: swap(sizes))
            samples[name].append(elapsed_ms)
    runtime.free(held)
    return {name: summary(values) for name, values in samples.items()}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="host memory, MiB in place of GiB")
    parser.add_argument("--kv-gib", type=float, default=95.0)
    parser.add_argument("--kv-segments", type=int, default=28)
    parser.add_argument("--trainer-gib", type=float, default=36.0)
    parser.add_argument("--trainer-segments", type=int, default=62)
    parser.add_argument("--cycles", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="folder of the result file")
    return parser.parse_args()


def main() -> None:
    """Run the cycles, print the JSON and save it."""
    options = parse()
    unit_bytes = 4 << 10 if options.host else 2 << 20
    gib_bytes = 1 << 21 if options.host else 1 << 30
    kv_bytes, trainer_bytes = int(options.kv_gib * gib_bytes), int(options.trainer_gib * gib_bytes)
    base = {"device": -1 if options.host else torch.cuda.current_device(), "unit_bytes": unit_bytes}
    kv = split_evenly(kv_bytes, options.kv_segments, unit_bytes)
    shapes = {
        "uneven": split_unevenly(trainer_bytes, options.trainer_segments, unit_bytes),
        "even": split_evenly(trainer_bytes, options.trainer_segments, unit_bytes),
    }
    result: dict[str, Any] = {
        "kv_bytes": sum(kv),
        "kv_segments": len(kv),
        "trainer_segments": options.trainer_segments,
        "cycles": options.cycles,
        "target_ms": TARGET_MS,
    }
    for shape, trainer in shapes.items():
        setting = Setting(**base, kv=kv, trainer=trainer, cycles=options.cycles)
        ways = {f"arena_{mode}": rotate(setting, mode) for mode in ("drop", "keep")}
        if not options.host:
            ways |= {f"torch_pool_{mode}": rotate_torch(setting, mode) for mode in ("drop", "keep")}
            ways["cuda_malloc_free"] = malloc_and_free(setting)
        result[shape] = {"trainer_bytes": sum(trainer), **ways}
    result["meets_target"] = {
        f"{shape} {way} {name}": result[shape][way][name]["median"] <= TARGET_MS
        for shape in shapes
        for way in result[shape]
        if way != "trainer_bytes"
        for name in ("to_training_ms", "to_generation_ms")
    }
    print(json.dumps({"environment": environment(), **result}, indent=1))
    print(save("arena-handover-host" if options.host else "arena-handover", result, folder=options.out))


if __name__ == "__main__":
    main()
