"""Packets, file descriptors and deadlines between two processes of one host and one user, over a Unix socket.

Every wait ends by its deadline with PeerTimeout; a peer that dies ends it at once with TransportError. Nothing received
is executed or unpickled: a packet is a fixed header and JSON.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from reshard.errors import PeerTimeout, TransportError

MAX_DESCRIPTORS: Final = 200
"""Descriptors per packet; the kernel's own limit is 253."""
MAX_PACKET_BYTES: Final = 128 << 10
_HEADER: Final = struct.Struct("<8sII")
_MAGIC: Final = b"reshard1"
_CREDENTIALS: Final = struct.Struct("3i")
_CONNECT_PAUSE_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who is at the other end of a socket, as the kernel says."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        """Name the process and user."""
        return f"process {self.pid} (user {self.uid})"


class Deadline:
    """A moment on the monotonic clock by which something has to have happened."""

    __slots__ = ("_end", "_timeout_s")

    def __init__(self, timeout_s: float) -> None:
        """Start now; ``timeout_s`` has to be above 0."""
        if not timeout_s > 0:
            raise ValueError(f"expected a timeout above 0 seconds, got {timeout_s}")
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self, what: str) -> float:
        """Return the seconds left; PeerTimeout, which says ``what`` was awaited, where none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.missed(what)
        return left

    def missed(self, what: str) -> PeerTimeout:
        """Return the error for a deadline that passed while ``what`` was awaited."""
        return PeerTimeout(f"waited {self._timeout_s:g} s for {what}; check that the peer is alive, or allow more time")


def _credentials(sock: socket.socket) -> Credentials:
    return Credentials(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def _check_user(peer: Credentials, allowed_uids: Collection[int]) -> None:
    if peer.uid not in allowed_uids:
        raise TransportError(
            f"refused {peer}: only the users {sorted(allowed_uids)} may exchange memory here; "
            "run both processes as one user, or pass allowed_uids"
        )


class Channel:
    """A connection to one other process; ``Channel.connect`` makes one, ``Listener.accept`` the other end."""

    def __init__(self, sock: socket.socket, *, allowed_uids: Collection[int] | None = None) -> None:
        """Take a connected SEQPACKET socket over; for another user's process TransportError, and it is closed."""
        self._sock = sock
        self.peer = _credentials(sock)
        try:
            _check_user(self.peer, {os.getuid()} if allowed_uids is None else allowed_uids)
        except TransportError:
            sock.close()
            raise

    @classmethod
    def connect(cls, path: str, *, timeout_s: float, allowed_uids: Collection[int] | None = None) -> Self:
        """Connect to a Listener at ``path``, which may come up later.

        Raises:
            PeerTimeout: no listener came up in time.
            TransportError: the socket file is another user's, or so is the listener.

        """
        deadline = Deadline(timeout_s)
        while True:
            what = f"a listener at {path}"
            sock = _new_socket()
            try:
                sock.settimeout(deadline.remaining_s(what))
                sock.connect(path)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                sock.close()
                time.sleep(min(_CONNECT_PAUSE_S, deadline.remaining_s(what)))
                continue
            except TimeoutError:
                sock.close()
                raise deadline.missed(what) from None
            except OSError as error:
                sock.close()
                raise TransportError(f"can't connect to {path}: {error}; both processes must be one user's") from error
            return cls(sock, allowed_uids=allowed_uids)

    def send(self, kind: str, body: dict[str, object], *, descriptors: Collection[int] = (), timeout_s: float) -> None:
        """Send one packet. ``descriptors`` stay the caller's.

        Raises:
            ValueError: the packet is too large.
            PeerTimeout: the peer did not take it in time.
            TransportError: the peer is gone, or a limit on descriptors was met.

        """
        text = json.dumps({"kind": kind, "body": body}).encode()
        if len(text) > MAX_PACKET_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(
                f"a packet holds at most {MAX_PACKET_BYTES} bytes and {MAX_DESCRIPTORS} descriptors, "
                f"got {len(text)} and {len(descriptors)}"
            )
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        with self._wait(f"{self.peer} to take a {kind!r} packet", timeout_s):
            self._sock.sendmsg([_HEADER.pack(_MAGIC, len(text), len(rights)), text], ancillary)

    def receive(self, kind: str, *, timeout_s: float) -> tuple[dict[str, object], list[int]]:
        """Receive one packet of that kind: its body, and descriptors that are the caller's to close.

        Raises:
            PeerTimeout: nothing came in time.
            TransportError: the peer is gone, sent something else, or this process can hold no more descriptors.

        """
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        what = f"a {kind!r} packet from {self.peer}"
        with self._wait(what, timeout_s):
            size = _HEADER.size + MAX_PACKET_BYTES
            packet, ancillary, flags, _ = self._sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = _descriptors(ancillary)
        try:
            if not packet:
                raise TransportError(f"{self.peer} closed the connection or died while we waited for {what}")
            return self._parse(kind, packet, num_descriptors=len(descriptors), flags=flags), descriptors
        except TransportError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _parse(self, kind: str, packet: bytes, *, num_descriptors: int, flags: int) -> dict[str, object]:
        if len(packet) < _HEADER.size or packet[: len(_MAGIC)] != _MAGIC:
            raise TransportError(f"{self.peer} sent a packet that is not reshard's; check the socket's path")
        _, num_bytes, num_sent = _HEADER.unpack_from(packet)
        if flags & socket.MSG_CTRUNC or num_descriptors != num_sent:
            raise TransportError(
                f"only {num_descriptors} of {num_sent} file descriptors from {self.peer} could be taken: "
                "this process is at its limit of open files; raise it (ulimit -n) or use larger chunk classes"
            )
        try:
            message = json.loads(packet[_HEADER.size :])
            got, body = message["kind"], message["body"]
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"{self.peer} sent {num_bytes} bytes that can't be read: {error}") from error
        if got == "error":
            raise TransportError(f"{self.peer} failed: {body.get('message')}")
        if got != kind or not isinstance(body, dict):
            raise TransportError(f"expected a {kind!r} packet from {self.peer}, got {got!r}; both ends must take turns")
        return body

    def send_error(self, message: str, *, timeout_s: float) -> None:
        """Let the peer's next ``receive`` raise TransportError with ``message``; silent where the peer is gone."""
        with contextlib.suppress(TransportError):
            self.send("error", {"message": message[:4096]}, timeout_s=timeout_s)

    @property
    def peer_has_closed(self) -> bool:
        """Whether the other end is closed, as it is once its process has died. Never waits."""
        self._sock.settimeout(0.0)
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def discard(self) -> None:
        """Drop the packets that have come, so that ``peer_has_closed`` sees what is behind them. Never waits."""
        self._sock.settimeout(0.0)
        with contextlib.suppress(OSError):
            while True:
                packet, ancillary, _, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4))
                for descriptor in _descriptors(ancillary):
                    os.close(descriptor)
                if not packet:
                    return

    @contextlib.contextmanager
    def _wait(self, what: str, timeout_s: float) -> Iterator[None]:
        deadline = Deadline(timeout_s)
        try:
            self._sock.settimeout(timeout_s)
            yield
        except TimeoutError:
            raise deadline.missed(what) from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise TransportError(f"{self.peer} closed the connection or died while we waited for {what}") from error
        except OSError as error:
            hint = "; raise the limit of open files (ulimit -n)" if error.errno in _DESCRIPTOR_ERRORS else ""
            name = errno.errorcode.get(error.errno or 0, "an unknown error")
            raise TransportError(f"waiting for {what} failed with {name} ({error.strerror}){hint}") from error

    def close(self) -> None:
        """End the connection. Memory that was imported through it stays mapped until it is closed itself."""
        self._sock.close()

    def __enter__(self) -> Self:
        """Return the channel."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class Listener:
    """A socket file at which processes of the same user can meet this one."""

    def __init__(self, path: str, *, allowed_uids: Collection[int] | None = None, backlog: int = 128) -> None:
        """Listen at ``path``: a new file that only this user may open, unless ``allowed_uids`` names others."""
        self.path = path
        self._allowed_uids = frozenset({os.getuid()} if allowed_uids is None else allowed_uids)
        self._sock = _new_socket()
        try:
            self._sock.bind(path)
            os.chmod(path, 0o600 if self._allowed_uids <= {os.getuid()} else 0o666)
            self._sock.listen(backlog)
        except OSError as error:
            self._sock.close()
            raise TransportError(f"can't listen at {path}: {error}; use a new path in a folder of your own") from error

    def accept(self, *, timeout_s: float) -> Channel:
        """Wait for one process.

        Raises:
            PeerTimeout: none came.
            TransportError: another user's process came; it was refused, and the next ``accept`` goes on.

        """
        deadline = Deadline(timeout_s)
        what = f"a process to connect to {self.path}"
        self._sock.settimeout(deadline.remaining_s(what))
        try:
            connection, _ = self._sock.accept()
        except TimeoutError:
            raise deadline.missed(what) from None
        except OSError as error:
            hint = "; raise the limit of open files (ulimit -n)" if error.errno in _DESCRIPTOR_ERRORS else ""
            raise TransportError(f"accepting at {self.path} failed: {error}{hint}") from error
        return Channel(connection, allowed_uids=self._allowed_uids)

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def __enter__(self) -> Self:
        """Return the listener."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


_DESCRIPTOR_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise TransportError(f"no socket could be made: {error}; raise the limit of open files (ulimit -n)") from error


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights = array.array("i")
            rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
            found.extend(rights)
    return found
