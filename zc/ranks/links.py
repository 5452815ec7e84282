"""A socket between each two ranks of a host: small messages under keys, and a wait that sleeps in the kernel.

The sockets are Unix sockets without a name in any folder, and the kernel closes them with the process, so who waits for
a rank that was killed hears of it at once. A message and its answer take some 10 us; docs/decisions.md has
what gloo's smallest collective takes.
"""

from __future__ import annotations

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

_PIECE = 32 * 1024  # of a message; well below what a socket takes at once (net.core.wmem_default)
_HEAD = struct.Struct("<q")
_ROOM = 16  # numbered messages that nobody came for, per rank, before old ones are dropped
_SLICE_S = 0.5
_TURN_S = 0.01
CONNECT_S = 20.0


class Address(NamedTuple):
    """Where a rank listens, and the process that does."""

    name: str
    pid: int


class Listener:
    """Takes connections from the other ranks of the host, whose `Address`es the caller exchanges."""

    def __init__(self) -> None:
        self.address = Address(f"zc-{secrets.token_hex(16)}", os.getpid())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.address.name)
        self._socket.listen(1024)
        self._socket.settimeout(CONNECT_S)

    def connect(self, rank: int, addresses: Mapping[int, Address]) -> dict[int, socket.socket]:
        """A socket to each of ``addresses``, by rank: this rank calls those below it, those above call it. Raises
        OSError."""
        found: dict[int, socket.socket] = {}
        for peer, address in addresses.items():
            if peer < rank:
                found[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                found[peer].settimeout(CONNECT_S)
                found[peer].connect("\0" + address.name)
                found[peer].sendall(_HEAD.pack(rank))
        while len(found) < len(addresses):
            made, _ = self._socket.accept()
            made.settimeout(CONNECT_S)
            (peer,) = _HEAD.unpack(made.recv(_HEAD.size))
            pid = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if peer not in addresses or pid != addresses[peer].pid:
                made.close()
                raise OSError(f"process {pid} has connected as rank {peer}, which it is not")
            found[peer] = made
        return found

    def close(self) -> None:
        self._socket.close()


class Links:
    """Messages between this rank and its neighbours. Any thread sends and receives; messages of one key from one rank
    come in the order in which they were sent, and those of different keys don't wait for each other."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self.peers = tuple(sorted(sockets))
        self._sockets = {peer: sockets[peer] for peer in self.peers}
        self._ranks = {made.fileno(): peer for peer, made in self._sockets.items()}
        self._poll = select.poll()
        for made in self._sockets.values():
            made.setblocking(False)
            self._poll.register(made, select.POLLIN)
        self._inbox: dict[tuple[int, int], deque[bytes]] = {}
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self._is_read = False  # some thread is in `_take_in`
        self.failure: Callable[[], Exception | None] = lambda: None  # why no wait may go on
        self.close = weakref.finalize(self, _close, tuple(self._sockets.values()))

    def send(self, peer: int, key: int, payload: bytes) -> None:
        """A rank that has ended gets nothing: who waits for it next hears of that, with the reason."""
        for start in range(0, max(len(payload), 1), _PIECE):
            piece = _HEAD.pack(key) + payload[start : start + _PIECE]
            while True:
                try:
                    self._sockets[peer].send(piece)
                    break
                except BlockingIOError:  # the rank is many messages behind
                    self._refuse_failed()
                    with self._changed:  # it may wait for room here, too
                        self._listen(_SLICE_S, room_for=peer)
                except OSError:
                    return

    def receive(self, peer: int, key: int, nbytes: int, timeout: float | None = None) -> bytes:
        """The next message of ``nbytes`` under ``key``. RuntimeError: the rank has ended, or "timed out" after
        ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                found = self._found(peer, key, nbytes)
                if found is not None:
                    return found
                if peer in self._ended:
                    raise RuntimeError(f"rank {peer} has closed its connection")
                self._refuse_failed()
                left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
                if left <= 0:
                    raise RuntimeError(f"timed out after {timeout} s")
                self._listen(left)

    def _listen(self, seconds: float, room_for: int | None = None) -> None:
        """Takes in what comes, at least one message or none in ``seconds``; or there is room to send again. The caller
        holds the condition."""
        if self._is_read:  # by another thread, which tells
            self._changed.wait(seconds if room_for is None else min(seconds, _TURN_S))
            return
        self._is_read = True
        if room_for is not None:
            self._poll.modify(self._sockets[room_for], select.POLLIN | select.POLLOUT)
        self._changed.release()
        try:
            ready = self._poll.poll(seconds * 1e3)
        finally:
            self._changed.acquire()
            self._is_read = False
            if room_for is not None and room_for not in self._ended:
                self._poll.modify(self._sockets[room_for], select.POLLIN)
        for number, event in ready:
            if event & ~select.POLLOUT:
                self._take_in(self._ranks[number])
        self._changed.notify_all()

    def _found(self, peer: int, key: int, nbytes: int) -> bytes | None:
        pieces = self._inbox.get((peer, key))
        if pieces is None or sum(map(len, pieces)) < nbytes or not pieces:
            return None
        found = pieces.popleft()
        while len(found) < nbytes:
            found += pieces.popleft()
        if not pieces:
            del self._inbox[peer, key]
        return found

    def _take_in(self, peer: int) -> None:
        while True:
            try:
                message = self._sockets[peer].recv(_HEAD.size + _PIECE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._ended.add(peer)
                self._poll.unregister(self._sockets[peer])
                return
            (key,) = _HEAD.unpack_from(message)
            self._inbox.setdefault((peer, key), deque()).append(message[_HEAD.size :])

    def drop(self, keys: range) -> None:
        """Nobody comes for the messages of these keys any more."""
        with self._changed:
            if len(self._inbox) > _ROOM * len(self.peers):
                for place in [place for place in self._inbox if place[1] in keys]:
                    del self._inbox[place]

    def _refuse_failed(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise failure


def _close(sockets: Iterable[socket.socket]) -> None:
    for made in sockets:
        made.close()
