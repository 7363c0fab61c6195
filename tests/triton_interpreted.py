"""Checks of ``reshard.triton_copy`` on host memory; run with TRITON_INTERPRET=1, which Triton reads once at import."""

import torch
from copy_cases import PAIRS, assert_same_as_oracle, assert_same_bytes, cases, every_half_pattern, fans, rounding_edges
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.dtype import DType
from reshard.errors import PlanError
from reshard.oracle import cast_reference
from reshard.table import CopyEntry, make_table
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


def rounding(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    values = rounding_edges() if src_dtype == torch.float32 else every_half_pattern(src_dtype)
    dst = torch.zeros(len(values), dtype=dst_dtype)
    run(make_table([CopyEntry.from_tensors(dst, values)]))
    assert_same_bytes(dst, cast_reference(values, dst_dtype), what=f"{src_dtype} -> {dst_dtype}")


def odd_items_and_refusals() -> None:
    src = torch.arange(480, dtype=torch.int64).to(torch.uint8)
    dst = torch.zeros(960, dtype=torch.uint8)
    table = make_table([CopyEntry.from_tensors(dst[:4], src[:4])])
    table["src_itemsize"] = table["dst_itemsize"] = 12
    table["extents"], table["src_strides"], table["dst_strides"] = [1, 1, 1, 20], 12, 24
    run(table)
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
    odd_items_and_refusals()
    print("odd items and refusals: as documented")
