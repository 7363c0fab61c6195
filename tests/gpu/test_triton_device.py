"""The Triton executor on a GPU: bit for bit what the oracle writes."""

import pytest
import torch
from copy_cases import PAIRS, assert_same_as_oracle, assert_same_bytes, cases, every_half_pattern, fans, rounding_edges
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.dtype import DType
from reshard.oracle import cast_reference
from reshard.table import CopyEntry, make_table

pytest.importorskip("triton", reason="needs triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def run(table) -> None:
    from reshard.triton_copy import TritonTable

    TritonTable(table, device="cuda").launch()
    torch.cuda.synchronize()


@settings(max_examples=60, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=3))
def test_random_copies_equal_the_oracle(specs):
    assert_same_as_oracle(specs, run, device="cuda")


@settings(max_examples=60, deadline=None)
@given(fans())
def test_random_fans_equal_the_oracle(specs):
    assert_same_as_oracle(specs, run, device="cuda", one_source=True)


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
def test_every_rounding_edge(src_dtype: DType, dst_dtype: DType):
    host = rounding_edges() if src_dtype is DType.FLOAT32 else every_half_pattern(TORCH[src_dtype])
    values = host.cuda()
    for stride in (1, 3):
        dst = torch.zeros((len(values), stride), dtype=TORCH[dst_dtype], device="cuda")[:, 0]
        run(make_table([CopyEntry.from_tensors(dst, values)]))
        assert_same_bytes(dst.cpu(), cast_reference(host, TORCH[dst_dtype]), what=f"{src_dtype} -> {dst_dtype}")


def test_a_table_is_bound_once_and_follows_its_sources():
    from reshard.triton_copy import TritonTable

    sources = [torch.zeros(300 + i, 512, device="cuda") for i in range(20)]
    targets = [torch.zeros(src.shape, dtype=torch.bfloat16, device="cuda") for src in sources]
    table = TritonTable(make_table(map(CopyEntry.from_tensors, targets, sources)), device="cuda")
    assert table.num_launches == 1
    for step in range(1, 3):
        for src in sources:
            src.copy_(torch.arange(src.numel(), device="cuda").view(src.shape) * step)
        table.launch()
        torch.cuda.synchronize()
        assert all(torch.equal(dst, src.bfloat16()) for dst, src in zip(targets, sources, strict=True))
