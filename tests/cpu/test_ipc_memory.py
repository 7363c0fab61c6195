"""CUDA IPC memory where there is no GPU: what is refused, and what a peer that sends nonsense gets to hear."""

import socket
import threading

import pytest

from reshard import _C
from reshard.arena import Channel
from reshard.arena.ipc import DeviceMemory, MemoryShare, receive_memory, send_memory
from reshard.errors import DeviceError, StateError, TransportError

pytestmark = pytest.mark.skipif(_C.driver_available(), reason="for machines without an NVIDIA driver")
HANDLE = bytes(range(64))


def channels() -> tuple[Channel, Channel]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(pair[0]), Channel(pair[1])


def test_without_a_driver_there_is_nothing_to_export():
    with pytest.raises(DeviceError, match="the NVIDIA driver library can't be loaded"):
        DeviceMemory.at(4096)
    assert _C.ipc_num_open() == 0


@pytest.mark.parametrize(
    ("handle", "num_bytes", "device", "words"),
    [
        (b"short", 1, 0, "expected a CUDA IPC handle of 64 bytes, got 5"),
        (HANDLE, 0, 0, "expected a size above 0 bytes and a CUDA ordinal, got 0 and 0"),
        (HANDLE, 1, -1, "expected a size above 0 bytes and a CUDA ordinal, got 1 and -1"),
    ],
)
def test_malformed_mappings_are_refused(handle: bytes, num_bytes: int, device: int, words: str):
    with pytest.raises(ValueError, match=words):
        _C.IpcMapping(handle, num_bytes=num_bytes, device=device)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"handle": HANDLE.hex()}, "announced device memory in a way that can't be read"),
        ({"handle": "not hex", "num_bytes": 4}, "sent memory that can't be mapped: non-hexadecimal"),
        ({"handle": "00", "num_bytes": 4}, "sent memory that can't be mapped: expected a CUDA IPC handle of 64 bytes"),
        ({"handle": HANDLE.hex(), "num_bytes": 0}, "sent memory that can't be mapped: expected a size above 0"),
    ],
)
def test_a_peer_that_sends_nonsense_is_told(body: dict[str, object], words: str):
    near, far = channels()
    with near, far:
        far.send("memory", body, timeout_s=5)
        with pytest.raises(TransportError, match=words):
            receive_memory(near, device=0, timeout_s=5)
        with pytest.raises(TransportError, match=r"failed: \w+Error"):
            far.receive("mapped", timeout_s=5)


def test_a_peer_that_cannot_map_says_why():
    """The receiver has no driver: both ends get an error, and nothing is shared."""
    near, far = channels()
    found: list[Exception] = []

    def receive() -> None:
        with pytest.raises(DeviceError) as caught:
            receive_memory(far, device=0, timeout_s=5)
        found.append(caught.value)

    with near, far:
        thread = threading.Thread(target=receive)
        thread.start()
        with pytest.raises(TransportError, match="failed: DeviceError: the NVIDIA driver library can't be loaded"):
            send_memory(near, DeviceMemory(HANDLE, 4096, 4096), owner=None, timeout_s=5)
        thread.join()
    assert len(found) == 1


def test_a_share_keeps_its_owner_until_it_ends():
    near, far = channels()
    with near, far:
        share = MemoryShare(DeviceMemory(HANDLE, 4096, 4096), [1, 2], near.peer)
        share.end()
        with pytest.raises(StateError, match=r"the share of memory at 4096 with process \d+ \(user \d+\) has ended"):
            share.end()
