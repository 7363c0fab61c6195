"""The arena on host memory: the conformance suite, and what only the host can show."""

import ctypes
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from arena_suite import ArenaConformance, assert_holds, open_descriptors, write

from reshard import _C
from reshard.arena import HOST_CHUNK_CLASSES, Arena
from reshard.errors import DeviceError, OutOfMemory

PAGE = resource.getpagesize()


class TestHostArena(ArenaConformance):
    unit_bytes = PAGE
    make_driver = staticmethod(_C.host_driver)

    def test_a_thousand_hand_overs_grow_nothing(self) -> None:
        with self.arena(budget=200) as arena:
            kv = self.group(arena, "kv", [37, 41, 53], backed=True)
            trainer = self.group(arena, "trainer", [5, 7, 30, 60], backed=False)

            def cycle(label: int) -> None:
                arena.handover(kv, trainer)
                write(trainer[3], label)
                assert_holds(trainer[3], label)
                arena.handover(trainer, kv)
                write(kv[0], -label)
                assert_holds(kv[0], -label)

            for label in range(20):
                cycle(label)
            before = (open_descriptors(), arena.stats.created_bytes, arena.stats.num_creates, num_mappings())
            resident = resident_bytes()
            for label in range(500):
                cycle(label)
            assert before == (open_descriptors(), arena.stats.created_bytes, arena.stats.num_creates, num_mappings())
            assert resident_bytes() - resident < 4 << 20

    def test_closing_gives_every_descriptor_and_mapping_back(self) -> None:
        before = open_descriptors(), num_mappings()
        with self.arena() as arena:
            self.group(arena, "kv", [17, 3], backed=True)
        del arena
        assert (open_descriptors(), num_mappings()) == before

    def test_numpy_sees_a_region_too(self) -> None:
        with self.arena() as arena:
            region = arena.allocate("kv", PAGE)
            write(region, 5)
            words = np.from_dlpack(region).view(np.int32)
            assert words[:3].tolist() == [5, 6, 7]
            words[0] = 1
            assert int(region.tensor(torch.int32)[0]) == 1
            del words


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def num_mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:reshard-arena" in line for line in file)


def test_the_default_classes_back_an_ordinary_region():
    with Arena.host() as arena:
        region = arena.allocate("weights", 70 << 20)
        assert region.num_bytes == 70 << 20 and set(arena.chunk_sizes) <= set(HOST_CHUNK_CLASSES)


def test_more_than_the_host_has_is_refused_before_the_kernel_kills():
    with Arena.host(chunk_classes=(1 << 44, PAGE)) as arena:
        region = arena.reserve("absurd", 1 << 44)
        with pytest.raises(OutOfMemory, match=r"the device said: a chunk of .* the host has .* bytes available"):
            arena.back(region)
        assert region.state.value == "RESERVED" and arena.stats.created_bytes == 0


def test_a_file_that_could_be_cut_short_is_not_mapped(tmp_path):
    path = tmp_path / "plain"
    path.write_bytes(bytes(PAGE))
    with path.open("r+b") as file, pytest.raises(ValueError, match="expected a sealed memory file"):
        _C.ImportedCore(_C.host_driver(), [file.fileno()], [PAGE])


def test_imported_sizes_are_checked():
    driver = _C.host_driver()
    with pytest.raises(ValueError, match="one descriptor for each chunk"):
        _C.ImportedCore(driver, [], [])
    with pytest.raises(ValueError, match="multiples of"):
        _C.ImportedCore(driver, [0], [PAGE - 1])
    with pytest.raises(DeviceError, match="fstat failed with EBADF"):
        _C.ImportedCore(driver, [10**6], [PAGE])


def test_a_stray_access_after_release_faults():
    code = (
        "import numpy; from reshard.arena import Arena\n"
        "arena = Arena.host(); region = arena.allocate('kv', 1 << 16); view = numpy.from_dlpack(region); view[:] = 1\n"
        "arena.release(region); print('released', flush=True); view[:] = 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "released\n" and done.returncode < 0


def test_the_symbols_for_pytorch_allocate_from_the_arena():
    library = ctypes.CDLL(_C.__file__)
    with_budget = Arena.host(budget_bytes=2 << 20)
    slot = _C.claim_torch_slot(with_budget.core, "pool")
    allocate = getattr(library, f"reshard_arena_alloc_{slot}")
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    release = getattr(library, f"reshard_arena_free_{slot}")
    release.restype, release.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    pointer = allocate(1 << 20, -1, None)
    (region,) = with_budget.regions("pool")
    assert region.address == pointer and region.state.value == "BACKED"
    write(region, 3)
    assert allocate(4 << 20, -1, None) is None
    assert "raise the budget" in _C.torch_slot_info(slot).last_error
    assert allocate(1 << 20, 0, None) is None
    assert "the pool's arena is on device -1, memory was asked for on 0" in _C.torch_slot_info(slot).last_error
    release(pointer, 1 << 20, -1, None)
    assert with_budget.regions("pool") == () and with_budget.stats.free_bytes == 1 << 20
    info = _C.torch_slot_info(slot)
    assert (info.num_allocs, info.num_frees) == (1, 1)
    with_budget.close()


def test_the_page_about_the_arena_runs():
    page = (Path(__file__).parents[2] / "docs" / "arena.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "docs/arena.md", "exec"), names)
    assert names["report"].num_creates == 0
