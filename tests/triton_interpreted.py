"""Checks of ``reshard.triton_copy`` on host memory; run with TRITON_INTERPRET=1, which Triton reads once at import."""

import torch
from copy_cases import (
    PAIRS,
    assert_same_as_oracle,
    assert_same_bytes,
    build,
    cases,
    every_half_pattern,
    fans,
    rounding_edges,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _C
from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.oracle import cast_reference
from reshard.table import CopyEntry, make_table
from reshard.triton_checksum import checksum_records
from reshard.triton_copy import TritonTable


def run(table) -> None:
    TritonTable(table, device="cpu").launch()


@settings(max_examples=40, deadline=None, database=None)
@given(st.lists(cases(max_numel=2000), min_size=1, max_size=3))
def random_copies(specs) -> None:
    assert_same_as_oracle(specs, run)


@settings(max_examples=40, deadline=None, database=None)
@given(fans(max_numel=1500))
def random_fans(specs) -> None:
    assert_same_as_oracle(specs, run, one_source=True)


@settings(max_examples=20, deadline=None, database=None)
@given(st.lists(cases(max_numel=2000), min_size=1, max_size=2))
def random_checksums(specs) -> None:
    built = build(specs)
    assert_same_checksums(built.table)


def assert_same_checksums(table) -> None:
    for of_destination in (False, True):
        found = checksum_records(table, "cpu", of_destination=of_destination)
        expected = _C.checksum_host(table, of_destination=of_destination)
        assert [word % 2**64 for word in found.tolist()] == expected, (table, of_destination)


def rounding(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    values = rounding_edges() if src_dtype == torch.float32 else every_half_pattern(src_dtype)
    dst = torch.zeros(len(values), dtype=dst_dtype)
    run(make_table([CopyEntry.from_tensors(dst, values)]))
    assert_same_bytes(dst, cast_reference(values, dst_dtype), what=f"{src_dtype} -> {dst_dtype}")


def a_run_past_the_end() -> None:
    """What compiles the kernels on a device moves nothing."""
    src, dst = torch.arange(600.0).view(2, 300), torch.full((3, 300), -1.0)
    box = torch.full((300, 2), -1.0, dtype=torch.bfloat16)
    table = TritonTable(make_table(map(CopyEntry.from_tensors, (dst[:2], box.t()), (src, src))), device="cpu")
    assert table.num_launches == 2, "one kernel for rows, one for boxes"
    table._load_kernels()
    assert bool((dst == -1).all()) and bool((box == -1).all())
    table.launch()
    assert torch.equal(dst[:2], src) and torch.equal(box, src.t().bfloat16()) and bool((dst[2] == -1).all())


def odd_items_and_refusals() -> None:
    src = torch.arange(480, dtype=torch.int64).to(torch.uint8)
    dst = torch.zeros(960, dtype=torch.uint8)
    table = make_table([CopyEntry.from_tensors(dst[:4], src[:4])])
    table["src_itemsize"] = table["dst_itemsize"] = 12
    table["extents"], table["src_strides"], table["dst_strides"] = [1, 1, 1, 20], 12, 24
    run(table)
    assert_same_checksums(table)
    for itemsize in (3, 10, 16):
        odd = table.copy()
        odd["src_itemsize"] = odd["dst_itemsize"] = odd["src_strides"] = itemsize
        odd["dst_strides"] = itemsize + 1
        assert_same_checksums(odd)
    expected = torch.zeros(40, 2, 12, dtype=torch.uint8)
    expected[:20, 0] = src[:240].view(20, 12)
    assert torch.equal(dst, expected.view(-1))
    table = make_table([CopyEntry.from_tensors(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))])
    table["src"] += 2
    try:
        run(table)
    except PlanError as error:
        assert "not aligned to their own size" in str(error)
    else:
        raise AssertionError("a misaligned cast was not refused")


if __name__ == "__main__":
    names = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
    for source, destination in PAIRS:
        rounding(names[source], names[destination])
    print("every rounding edge: equal")
    random_copies()
    print("random copies: equal")
    random_fans()
    print("random fans: equal")
    random_checksums()
    print("random checksums: equal")
    a_run_past_the_end()
    print("a run past the end: nothing moved")
    odd_items_and_refusals()
    print("odd items and refusals: as documented")
