"""Host tensors from an arena, and bytes that are kept while their regions are away."""

import gc

import pytest
import torch

from reshard.arena import Arena
from reshard.arena.host_pool import HostPool
from reshard.arena.keep import KeptBytes
from reshard.errors import StateError

KIB = 1 << 10


@pytest.fixture
def arena() -> Arena:
    return Arena.host(poison=True)


def test_large_factories_are_answered_from_the_arena(arena):
    pool = HostPool(arena, group="kv")
    with pool.use():
        zeros = torch.zeros(3, 64, KIB, dtype=torch.float16)
        empty = torch.empty((128 * KIB,), dtype=torch.int8, device="cpu")
        small, meta, other = torch.zeros(5), torch.empty(1 << 20, device="meta"), torch.ones(1 << 20)
    outside = torch.zeros(1 << 20)
    regions = {region.address: region for region in pool.regions()}
    assert set(regions) == {zeros.data_ptr(), empty.data_ptr()}
    assert zeros.shape == (3, 64, KIB) and zeros.dtype == torch.float16 and not zeros.any()
    assert bool((empty.view(torch.uint8) == 0xA5).all())
    assert pool.live_blocks() == tuple(sorted([(zeros.data_ptr(), zeros.nbytes), (empty.data_ptr(), empty.nbytes)]))
    assert small.numel() + meta.numel() + other.numel() + outside.numel() > 0
    del zeros
    gc.collect()
    assert [r.address for r in pool.idle_regions()] == [a for a in regions if a != empty.data_ptr()]
    pool.close()
    assert [r.address for r in pool.regions()] == [empty.data_ptr()]


def test_adopted_tensors_keep_values_views_sharing_and_offsets(arena):
    pool = HostPool(arena, group="weights")
    base = torch.nn.Parameter(torch.arange(24.0).reshape(4, 6))
    tied, row, turned = base.data, base.data[2], base.data.t()
    buffer, none = torch.arange(7, dtype=torch.int64), torch.empty(0)
    before = [(t.clone(), t.stride()) for t in (base.data, tied, row, turned, buffer)]
    pool.adopt([base, tied, row, turned, buffer, none])
    (region,) = pool.regions()
    for tensor, (value, stride) in zip((base, tied, row, turned, buffer), before, strict=True):
        assert torch.equal(tensor, value) and tensor.stride() == stride
        assert region.address <= tensor.data_ptr() < region.address + region.num_bytes
    assert row.storage_offset() == 12 and base.storage_offset() == 0 == buffer.storage_offset()
    with torch.no_grad():
        base[2, 0] = -1
    assert tied[2, 0] == row[0] == turned[0, 2] == -1
    assert [size for _, size in pool.live_blocks()] == [96, 56]
    del base, tied, row, turned
    gc.collect()
    assert region.num_views == 1, "the last tensor holds the region"


def test_kept_bytes_come_back_and_others_do_not(arena):
    regions = [arena.allocate(name, 128 * KIB, group="weights") for name in ("a", "b")]
    views = [region.tensor() for region in regions]
    for idx, view in enumerate(views):
        view.copy_(torch.arange(view.numel()).add(idx).remainder(251))
    a, b = regions[0].address, regions[1].address
    ranges = [(a + 64, 100), (a + 164, 50), (b, 10), (b + 1000, 128 * KIB - 1000)]
    expected = [view.clone() for view in views]
    kept = KeptBytes(arena)
    for _ in range(2):
        kept.save(ranges)
        assert kept.num_bytes == sum(size for _, size in ranges)
        with pytest.raises(StateError, match="restore them first"):
            kept.save(ranges)
        arena.release("weights")
        arena.back("weights")
        kept.restore()
        assert kept.num_bytes == 0
        for view, value, region in zip(views, expected, regions, strict=True):
            inside = torch.zeros(view.numel(), dtype=torch.bool)
            for address, size in ranges:
                if region.address <= address < region.address + region.num_bytes:
                    inside[address - region.address : address - region.address + size] = True
            assert torch.equal(view[inside], value[inside])
            assert bool((view[~inside] == 0xA5).all())
            view.copy_(value)
    kept.restore()
    with pytest.raises(StateError, match="lie in no region of the arena"):
        kept.save([(a - (1 << 30), 5)])


def test_a_host_pool_needs_host_memory_and_a_gpu_pool_a_gpu(arena):
    from reshard.arena.torch_pool import ArenaPool

    with pytest.raises(ValueError, match="expected an arena of a CUDA device, got one of host memory"):
        ArenaPool(arena, group="weights")
