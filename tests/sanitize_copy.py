"""Every kernel of csrc/ on small labelled cases, checked, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python tests/sanitize_copy.py

and the same with ``--tool racecheck``, ``initcheck`` or ``synccheck``. Without torch's cache every buffer is an
allocation of its own, so that an access past its end is seen.
"""

import random
from dataclasses import replace

import torch
from copy_cases import PAIRS, SAME, Case, Side, assert_same_as_oracle, assert_same_bytes

from reshard import _C
from reshard.dtype import DType
from reshard.oracle import quantize_reference
from reshard.quant import MODES, QuantEntry, make_quant_table, scale_shape

SHAPES: list[tuple[int, ...]] = [(1,), (7,), (64,), (1000,), (5, 33), (16, 64), (3, 4, 5), (2, 3, 4, 24)]


def random_side(rng: random.Random, shape: tuple[int, ...], itemsize: int) -> Side:
    """Dimensions in order, gaps at random, ending exactly at the end of the buffer."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1] + rng.choice([0, 0, 1, 8])
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    offset = rng.choice([0, 1, 4, 8]) * itemsize
    return Side(offset_bytes=offset, strides=tuple(strides), num_bytes=offset + span * itemsize)


def copy_cases() -> list[Case]:
    """All dtype pairs in all shapes."""
    rng = random.Random(1)
    pairs: list[tuple[DType, DType]] = PAIRS + [(dtype, dtype) for dtype in SAME]
    return [
        Case(
            shape=shape,
            src=random_side(rng, shape, src.itemsize),
            dst=random_side(rng, shape, dst.itemsize),
            src_dtype=src,
            dst_dtype=dst,
        )
        for shape in SHAPES
        for src, dst in pairs
    ]


def fan_cases() -> list[list[Case]]:
    """One source to five destinations, three of them alike, for some dtype pairs and shapes."""
    rng = random.Random(2)
    found = []
    for case in copy_cases()[::4]:
        sides = [random_side(rng, case.shape, case.dst_dtype.itemsize) for _ in range(2)]
        found.append([replace(case, dst=side) for side in (case.dst, case.dst, *sides, case.dst)])
    return found


def run(table, **options) -> None:
    """Launch the copy and both checksums, which must agree."""
    device_table = _C.DeviceTable(table, **options)
    stream = torch.cuda.current_stream().cuda_stream
    sums = torch.zeros(2, device_table.num_records, dtype=torch.int64, device="cuda")
    device_table.launch_checksum(stream, sums[0].data_ptr(), of_destination=False)
    device_table.launch(stream)
    device_table.launch_checksum(stream, sums[1].data_ptr(), of_destination=True)
    torch.cuda.synchronize()
    assert torch.equal(sums[0].cpu(), sums[1].cpu())


def quantise(rows: int, columns: int, dtype: torch.dtype, mode: str) -> None:
    """One matrix by the quantising kernel, compared with the reference."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)
    src = values.cuda()
    dst = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.zeros(scale_shape(rows, columns, mode), device="cuda")
    table = _C.QuantDeviceTable(make_quant_table([QuantEntry(src=src, dst=dst, scale=scale, mode=mode)]))
    table.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    expected, expected_scale = quantize_reference(values, mode=mode)
    assert_same_bytes(scale.cpu(), expected_scale, what="scales")
    assert_same_bytes(dst.cpu(), expected, what="values")


def main() -> None:
    """Run everything once."""
    cases = copy_cases()
    for options in (
        {},
        {"tile_vectors": 16, "vectors_in_flight": 4, "wide_casts": False},
        {"vectors_in_flight": 1, "blocks_per_sm": 1},
        {"copy_engine_min_bytes": 64},
    ):
        assert_same_as_oracle(cases, lambda table, chosen=options: run(table, **chosen), device="cuda")
    for fan in fan_cases():
        assert_same_as_oracle(fan, run, device="cuda", one_source=True)
    sizes = ((1, 1), (5, 12), (128, 128), (130, 260), (257, 131), (3, 18944), (2, 30000))
    for rows, columns in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for mode in MODES:
                quantise(rows, columns, dtype, mode)
    print(f"{len(cases)} copies, {len(fan_cases())} fans and {3 * len(MODES) * len(sizes)} quantised matrices: equal")


if __name__ == "__main__":
    main()
