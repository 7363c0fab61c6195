"""How storages are laid out in host buffers; the copies themselves need a GPU (tests/gpu/test_arena_torch.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.arena.offload import HostOffload, cut


@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 4).map(lambda n: 512 * n))
def test_pieces_cover_every_byte_once_in_order(sizes, buffer_bytes):
    buffers = cut(sizes, buffer_bytes)
    covered = [
        (piece.storage_idx, piece.storage_offset + i)
        for pieces in buffers
        for piece in pieces
        for i in range(piece.num_bytes)
    ]
    assert covered == [(idx, offset) for idx, size in enumerate(sizes) for offset in range(size)]
    for pieces in buffers:
        ends = [piece.buffer_offset + piece.num_bytes for piece in pieces]
        assert [piece.buffer_offset for piece in pieces] == [0, *ends[:-1]] and ends[-1] <= buffer_bytes
    assert len(buffers) == -(-sum(sizes) // buffer_bytes)


def test_only_tensors_of_one_device_can_go():
    with pytest.raises(ValueError, match=r"expected tensors of one CUDA device with bytes in them, got \['cpu'\]"):
        HostOffload([torch.zeros(3)])
    with pytest.raises(ValueError, match=r"got \[\]"):
        HostOffload([])
