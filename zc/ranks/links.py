"""A socket between each two ranks of a host: small messages under keys, and waits that sleep in the kernel.

They are Unix sockets without a name in any folder. The kernel closes them with the process, so a rank that waits for a
killed one learns it at once. A message and its answer take some 10 us; docs/decisions.md has the time of gloo's
smallest collective.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

_PIECE = 32 * 1024  # bytes of a message per packet; well below what a socket takes at once (net.core.wmem_default)
_HELLO = struct.Struct("<q")  # rank
_HEAD = struct.Struct("<qQ")  # key; bytes of the message from this piece on
_MAX_UNRECEIVED = 16  # numbered messages per rank that nobody has received, before old ones are dropped
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)  # the kernel has none at this moment: the message was not sent
_ENDED = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.EBADF)
_SLICE_S = 0.5  # how often a waiting thread looks for a failure
_RETRY_S = 0.01  # between two attempts to send
CONNECT_S = 20.0


class Address(NamedTuple):
    """Where a rank listens, and the PID of its process."""

    name: str
    pid: int


class Listener:
    """Accepts connections from the other ranks of the host. The caller exchanges the `Address`es."""

    def __init__(self) -> None:
        self.address = Address(f"zc-{secrets.token_hex(16)}", os.getpid())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.address.name)
        self._socket.listen(1024)
        self._socket.settimeout(CONNECT_S)

    def connect(self, rank: int, addresses: Mapping[int, Address]) -> dict[int, socket.socket]:
        """A socket to each of ``addresses``, by rank: this rank connects to those below it and accepts those above.
        Raises OSError."""
        sockets: dict[int, socket.socket] = {}
        for peer, address in addresses.items():
            if peer < rank:
                sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[peer].settimeout(CONNECT_S)
                sockets[peer].connect("\0" + address.name)
                sockets[peer].sendall(_HELLO.pack(rank))
        while len(sockets) < len(addresses):
            accepted, _ = self._socket.accept()
            accepted.settimeout(CONNECT_S)
            (peer,) = _HELLO.unpack(accepted.recv(_HELLO.size))
            pid = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if peer not in addresses or pid != addresses[peer].pid:
                accepted.close()
                raise OSError(f"process {pid} has connected as rank {peer}, which it is not")
            sockets[peer] = accepted
        return sockets

    def close(self) -> None:
        self._socket.close()


class Links:
    """Messages between this rank and its neighbours. Any thread sends and receives. Messages of one key from one rank
    arrive in the order in which they were sent, and those of different keys don't wait for each other."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self.peers = tuple(sorted(sockets))
        self._sockets = {peer: sockets[peer] for peer in self.peers}
        self._ranks = {sock.fileno(): peer for peer, sock in self._sockets.items()}
        self._poll = select.poll()
        for sock in self._sockets.values():
            sock.setblocking(False)
            self._poll.register(sock, select.POLLIN)
        # any thread reads and writes these, under the condition
        self._inbox: dict[tuple[int, int], deque[bytes]] = {}  # whole messages, by rank and key
        self._incomplete: dict[tuple[int, int], bytearray] = {}  # the first pieces of a message
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._is_polling = False  # one thread polls the sockets, without the condition; the others wait for it
        self._changed = threading.Condition()
        self.failure: Callable[[], Exception | None] = lambda: None  # the verdict that ends every wait
        self.close = weakref.finalize(self, _close, tuple(self._sockets.values()))

    def send(self, peer: int, key: int, payload: bytes) -> None:
        """Sends nothing to a rank that has ended: the next wait for it raises. RuntimeError: the kernel refuses."""
        for start in range(0, max(len(payload), 1), _PIECE):
            piece = _HEAD.pack(key, len(payload) - start) + payload[start : start + _PIECE]
            while True:
                try:
                    self._sockets[peer].send(piece)
                    break
                except BlockingIOError:  # the rank is many messages late
                    self._raise_failure()
                    with self._changed:  # it may wait for room to send here, too
                        self._listen(_SLICE_S, room_for=peer)
                except OSError as error:
                    if error.errno in _ENDED:
                        return
                    if error.errno not in _NO_MEMORY:
                        raise RuntimeError(f"a message to rank {peer} can't be sent: {error}") from error
                    self._raise_failure()
                    time.sleep(_RETRY_S)

    def receive(self, peer: int, key: int, nbytes: int, seconds: float | None = None) -> bytes | None:
        """The next message under ``key``, which has ``nbytes``; None after so many ``seconds`` without one.
        RuntimeError: the rank has ended, or its message has another size."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                message = self._next(peer, key)
                if message is not None:
                    if len(message) != nbytes:
                        raise RuntimeError(f"rank {peer} sent {len(message)} bytes where {nbytes} were expected")
                    return message
                if peer in self._ended:
                    raise RuntimeError(f"rank {peer} has closed its connection")
                self._raise_failure()
                left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
                if left <= 0:
                    return None
                self._listen(left)

    def _listen(self, seconds: float, room_for: int | None = None) -> None:
        """Returns after at least one message or ``seconds``, or when there is room to send to ``room_for``. The caller
        holds the condition."""
        if self._is_polling:  # by another thread, which notifies
            self._changed.wait(seconds if room_for is None else min(seconds, _RETRY_S))
            return
        self._is_polling = True
        if room_for is not None:
            self._poll.modify(self._sockets[room_for], select.POLLIN | select.POLLOUT)
        self._changed.release()
        try:
            ready = self._poll.poll(seconds * 1e3)
        finally:
            self._changed.acquire()
            self._is_polling = False
            if room_for is not None and room_for not in self._ended:
                self._poll.modify(self._sockets[room_for], select.POLLIN)
        for number, event in ready:
            if event & ~select.POLLOUT:
                self._read(self._ranks[number])
        self._changed.notify_all()

    def _next(self, peer: int, key: int) -> bytes | None:
        inbox = self._inbox.get((peer, key))
        if inbox is None:
            return None
        message = inbox.popleft()
        if not inbox:
            del self._inbox[peer, key]
        return message

    def _read(self, peer: int) -> None:
        while True:
            try:
                piece = self._sockets[peer].recv(_HEAD.size + _PIECE)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    return  # the message is still there
                if error.errno == errno.ECONNRESET:
                    continue  # once, if the rank has closed with unread messages: its own come after the error
                piece = b""
            if not piece:
                self._ended.add(peer)
                self._poll.unregister(self._sockets[peer])
                return
            key, left = _HEAD.unpack_from(piece)
            source, payload = (peer, key), piece[_HEAD.size :]
            if len(payload) < left:
                self._incomplete.setdefault(source, bytearray()).extend(payload)
            else:
                self._inbox.setdefault(source, deque()).append(bytes(self._incomplete.pop(source, b"")) + payload)

    def drop(self, keys: range) -> None:
        """Nobody will receive the messages under these keys, so they may go."""
        with self._changed:
            if len(self._inbox) > _MAX_UNRECEIVED * len(self.peers):
                for source in [source for source in self._inbox if source[1] in keys]:
                    del self._inbox[source]

    def _raise_failure(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise failure


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
