"""Regions shared between real processes: the same pages, and every way in which the other side can fail."""

import array
import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from arena_suite import open_descriptors

from reshard.arena import Arena, Channel, Listener, receive_region, send_region
from reshard.errors import DeviceError, PeerTimeout, StateError, TransportError

PAGE = resource.getpagesize()
CLASSES = (4 * PAGE, PAGE)
PATIENCE_S = 60.0
SHORT_S = 0.2
context = multiprocessing.get_context("fork")


@contextmanager
def peer(target: Callable[[str], None], path: Path) -> Iterator[multiprocessing.Process]:
    process = context.Process(target=target, args=(str(path),), daemon=True)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def expect_success(process: multiprocessing.Process) -> None:
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def words(source: object) -> np.ndarray:
    return np.from_dlpack(source).view(np.int64)


def small_arena() -> Arena:
    return Arena.host(chunk_classes=CLASSES)


# ---- the same pages ----


def answer_in_place(path: str) -> None:
    """Map the owner's region, check its labels, write others into the same pages."""
    with Channel.connect(path, timeout_s=PATIENCE_S) as channel, small_arena() as arena:
        with receive_region(channel, arena=arena, timeout_s=PATIENCE_S) as region:
            view = words(region)
            assert view.tolist() == list(range(view.size)) and region.name == "weights"
            view *= -3
            del view
        channel.send("written", {}, timeout_s=PATIENCE_S)


def test_both_processes_see_one_set_of_pages(tmp_path):
    path = tmp_path / "owner.sock"
    with Listener(str(path)) as listener, peer(answer_in_place, path) as process, small_arena() as arena:
        before = open_descriptors()
        region = arena.allocate("weights", 903 * PAGE)
        assert region.num_chunks > 200, "the chunks must need several packets"
        view = words(region)
        view[:] = np.arange(view.size)
        with listener.accept(timeout_s=PATIENCE_S) as channel:
            assert (channel.peer.pid, channel.peer.uid) == (process.pid, os.getuid())
            share = send_region(channel, region, arena=arena, timeout_s=PATIENCE_S)
            channel.receive("written", timeout_s=PATIENCE_S)
        assert np.array_equal(view, np.arange(view.size) * -3)
        with pytest.raises(StateError, match="region 'weights' can't be released: 1 shares of it are out"):
            arena.release(region)
        share.end()
        with pytest.raises(StateError, match=f"with process {process.pid} .* has ended already"):
            share.end()
        del view
        arena.release(region)
        arena.free(region)
        arena.trim()
        assert open_descriptors() == before
        expect_success(process)
    assert not path.exists()


def read_after_the_owner_died(path: str) -> None:
    with Channel.connect(path, timeout_s=PATIENCE_S) as channel, small_arena() as arena:
        region = receive_region(channel, arena=arena, timeout_s=PATIENCE_S)
        with pytest.raises(TransportError, match="closed the connection or died while we waited for a 'more' packet"):
            channel.receive("more", timeout_s=PATIENCE_S)
        assert channel.peer_has_closed and int(words(region).sum()) == 7 * PAGE // 8
        region.close()


def own_and_die(path: str) -> None:
    with Listener(path) as listener:
        arena = small_arena()
        region = arena.allocate("weights", PAGE)
        words(region)[:] = 7
        channel = listener.accept(timeout_s=PATIENCE_S)
        send_region(channel, region, arena=arena, timeout_s=PATIENCE_S)
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_owner_that_is_killed_leaves_the_pages_to_the_importer(tmp_path):
    path = tmp_path / "owner.sock"
    with peer(own_and_die, path) as owner:
        read_after_the_owner_died(str(path))
        owner.join(PATIENCE_S)
        assert owner.exitcode == -signal.SIGKILL


# ---- peers that fail ----


def connect_and_die(path: str) -> None:
    channel = Channel.connect(path, timeout_s=PATIENCE_S)
    channel.receive("region", timeout_s=PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_peer_that_is_killed_half_way_is_named_and_leaves_no_share(tmp_path):
    path = tmp_path / "owner.sock"
    with Listener(str(path)) as listener, peer(connect_and_die, path) as process, small_arena() as arena:
        region = arena.allocate("weights", 64 * PAGE)
        with listener.accept(timeout_s=PATIENCE_S) as channel:
            before = open_descriptors()
            with pytest.raises(TransportError, match=f"process {process.pid} .user .* closed the connection or died"):
                send_region(channel, region, arena=arena, timeout_s=PATIENCE_S)
            assert channel.peer_has_closed and open_descriptors() == before
        assert region.num_shares == 0
        arena.release(region)


def connect_and_stop(path: str) -> None:
    channel = Channel.connect(path, timeout_s=PATIENCE_S)
    channel.send("ready", {}, timeout_s=PATIENCE_S)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_peer_that_is_stopped_ends_the_wait_at_its_deadline(tmp_path):
    path = tmp_path / "owner.sock"
    with Listener(str(path)) as listener, peer(connect_and_stop, path) as process, small_arena() as arena:
        region = arena.allocate("weights", PAGE)
        with listener.accept(timeout_s=PATIENCE_S) as channel:
            channel.receive("ready", timeout_s=PATIENCE_S)
            with pytest.raises(PeerTimeout, match=rf"waited .* s for .* from process {process.pid} \(user"):
                send_region(channel, region, arena=arena, timeout_s=SHORT_S)
        assert region.num_shares == 0


def test_a_peer_that_never_comes_ends_the_wait_at_its_deadline(tmp_path):
    path = str(tmp_path / "owner.sock")
    with pytest.raises(
        PeerTimeout, match=r"waited 0\.2 s for a listener at .*owner\.sock; check that the peer is alive"
    ):
        Channel.connect(path, timeout_s=SHORT_S)
    with Listener(path) as listener, pytest.raises(PeerTimeout, match=r"waited 0\.2 s for a process to connect to"):
        listener.accept(timeout_s=SHORT_S)
    with pytest.raises(ValueError, match="expected a timeout above 0 seconds, got 0"):
        Channel.connect(path, timeout_s=0)


def connect_as_another_user(path: str) -> None:
    os.setgid(65534)
    os.setuid(65534)
    channel = Channel.connect(path, timeout_s=PATIENCE_S, allowed_uids={0, 65534})
    with channel, pytest.raises(TransportError, match=f"process {os.getppid()} .* closed the connection or died"):
        channel.receive("region", timeout_s=PATIENCE_S)


def fail_to_connect_as_another_user(path: str) -> None:
    os.setgid(65534)
    os.setuid(65534)
    with pytest.raises(TransportError, match=r"can't connect to .*Permission denied; both processes must be"):
        Channel.connect(path, timeout_s=PATIENCE_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_name(tmp_path):
    path = tmp_path / "owner.sock"
    with Listener(str(path)) as listener:
        for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
            folder.chmod(0o755)
        with peer(fail_to_connect_as_another_user, path) as process:
            expect_success(process)
        path.chmod(0o666)
        with peer(connect_as_another_user, path) as process:
            with pytest.raises(
                TransportError, match=rf"refused process {process.pid} \(user 65534\): only the users \[0\]"
            ):
                listener.accept(timeout_s=PATIENCE_S)
            expect_success(process)


def test_the_socket_file_is_for_one_user(tmp_path):
    with Listener(str(tmp_path / "owner.sock")) as listener:
        assert Path(listener.path).stat().st_mode & 0o777 == 0o600
        with pytest.raises(TransportError, match=r"can't listen at .*Address already in use"):
            Listener(listener.path)


# ---- limits of descriptors ----


@contextmanager
def descriptor_limit(num_spare: int) -> Iterator[None]:
    """Let this process open only `num_spare` more descriptors."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    spare = [descriptor for descriptor in range(len(used) + num_spare + 1) if descriptor not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[num_spare], old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def receive_with_few_descriptors(path: str) -> None:
    with Channel.connect(path, timeout_s=PATIENCE_S) as channel, small_arena() as arena:
        before = open_descriptors()
        with descriptor_limit(9), pytest.raises(TransportError, match=r"only \d+ of 40 file descriptors .*ulimit -n"):
            receive_region(channel, arena=arena, timeout_s=PATIENCE_S)
        assert open_descriptors() == before


def test_a_receiver_at_its_limit_says_so_at_both_ends(tmp_path):
    path = tmp_path / "owner.sock"
    with Listener(str(path)) as listener, peer(receive_with_few_descriptors, path) as process, small_arena() as arena:
        region = arena.allocate("weights", 160 * PAGE)
        with (
            listener.accept(timeout_s=PATIENCE_S) as channel,
            pytest.raises(TransportError, match=rf"process {process.pid} .* failed: TransportError: only "),
        ):
            send_region(channel, region, arena=arena, timeout_s=PATIENCE_S)
        assert region.num_shares == 0
        expect_success(process)


def test_an_owner_at_its_limit_keeps_what_it_has():
    with small_arena() as arena:
        region = arena.allocate("weights", 160 * PAGE)
        before = open_descriptors()
        with descriptor_limit(6):
            with pytest.raises(DeviceError, match=r"EMFILE .*ulimit -n"):
                arena.core.export_region(region.id)
            with pytest.raises(DeviceError, match=r"memfd_create failed with EMFILE .*ulimit -n"):
                arena.allocate("more", 160 * PAGE)
        assert open_descriptors() == before and region.num_shares == 0
        assert arena.core.check() == "" and arena.stats.created_bytes == region.num_bytes
        arena.allocate("more", 160 * PAGE)


# ---- packets that are not what was agreed ----


HEADER = {"name": "w", "arena": "a", "region": 1, "memory": "host", "num_chunks": 1}


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Channel(ours) as channel, theirs:
        yield channel, theirs


def test_strangers_and_wrong_turns_are_named(ends):
    channel, theirs = ends
    theirs.send(b"GET / HTTP/1.1")
    with pytest.raises(TransportError, match="sent a packet that is not reshard's; check the socket's path"):
        channel.receive("region", timeout_s=PATIENCE_S)
    with Channel(theirs.dup()) as other:
        other.send("chunks", {}, timeout_s=PATIENCE_S)
        with pytest.raises(TransportError, match=r"expected a 'region' packet from .*, got 'chunks'; both ends"):
            channel.receive("region", timeout_s=PATIENCE_S)
        with pytest.raises(ValueError, match="a packet holds at most"):
            other.send("note", {"text": "x" * 200_000}, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("header", "chunk_bytes", "message"),
    [
        (HEADER | {"memory": "cuda"}, [PAGE], "is cuda memory, the arena to receive it is host"),
        (HEADER | {"num_chunks": 0}, [PAGE], "announced a region in a way that can't be read"),
        (HEADER, [PAGE, PAGE], "sent 1 descriptors for the chunks"),
        (HEADER, [2 * PAGE], "expected a sealed memory file of"),
    ],
)
def test_a_false_announcement_maps_nothing_and_leaks_nothing(ends, header, chunk_bytes, message):
    channel, theirs = ends
    with small_arena() as owner, small_arena() as arena, Channel(theirs.dup()) as other:
        region = owner.allocate("w", PAGE)
        ((descriptor, _),) = owner.core.export_region(region.id)
        before = open_descriptors()
        other.send("region", header, timeout_s=PATIENCE_S)
        other.send("chunks", {"chunk_bytes": chunk_bytes}, descriptors=[descriptor], timeout_s=PATIENCE_S)
        with pytest.raises(TransportError, match=message):
            receive_region(channel, arena=arena, timeout_s=PATIENCE_S)
        with pytest.raises(TransportError, match=message):
            other.receive("mapped", timeout_s=PATIENCE_S)
        assert open_descriptors() == before
        os.close(descriptor)
        owner.core.unpin(region.id)


def test_descriptors_of_a_refused_packet_are_closed(ends):
    channel, theirs = ends
    read, write = os.pipe()
    before = open_descriptors()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write]))]
    theirs.sendmsg([b"junk"], rights)
    with pytest.raises(TransportError, match="not reshard's"):
        channel.receive("region", timeout_s=PATIENCE_S)
    assert open_descriptors() == before
    os.close(read)
    os.close(write)


def test_a_deadline_covers_all_packets_of_a_region(ends):
    channel, theirs = ends
    with small_arena() as arena, Channel(theirs.dup()) as other:
        other.send("region", HEADER | {"num_chunks": 3}, timeout_s=PATIENCE_S)
        with pytest.raises(PeerTimeout, match="'chunks' packet"):
            receive_region(channel, arena=arena, timeout_s=SHORT_S)
