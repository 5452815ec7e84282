"""Ranks of one host on a CPU read each other's memory: the signals before and after each read, the sockets that carry
these, and the reads. (`zc.ranks.routes` has their routes, `zc.ranks.hosts` finds the ranks of a host and connects
them.) docs/proof.md says why nobody writes what another rank reads.

A rank that has data for the others sends them its address (*full*). A rank that has read the data answers (*free*);
then it may be written again. All messages are numbered: the k-th one of a rank ends the k-th wait of the others, so
that no late or repeated one is taken for another, such as one that a wait cut off by Ctrl-C has left.

The sockets have small messages under keys, and waits that sleep in the kernel. They are Unix sockets without a name in
any folder. The kernel closes them with the process, so a rank that waits for a killed one learns it at once. A message
and its answer take some 10 us; docs/decisions.md has the time of gloo's smallest collective.

A read is process_vm_readv(2): one copy, no file, no mapping. No memory has to be shared: gradients and parameters stay
private to a rank, and a killed rank leaves no file behind. Reading freed memory returns an error, not a signal. MPI
libraries use the same call inside a host (Cross Memory Attach, Linux 3.2). docs/decisions.md compares it with mapped
memory.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zc.errors import RankLostError
from zc.ranks.exchanges import Step, note_wait
from zc.ranks.journal import Journal

ReadAll = Callable[[Mapping[int, bytes]], None]  # reads the data of the other ranks, which lies there, by rank

_PLACE = struct.Struct("<QQ")  # address, bytes
FULL, FREE, ROW, VALUES = range(4)  # what a message is for
_INDEX_BITS, _NUM_NUMBERS = 20, 2**28  # of a message's key: its index, and how many numbers there are
_CHUNK_NBYTES = 2**20  # of all ranks' rows that are summed at once, so that they stay in a core's own cache
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)  # by the kernel, whatever the address


def _numbered(counts: Counter[int], message: int, kind: int = 0, index: int = 0) -> int:
    """Counts a message, or a wait for one. Returns its key, with that number, which it alone has."""
    key = message << 56 | kind << 48 | index
    counts[key] += 1
    return key | counts[key] % _NUM_NUMBERS << _INDEX_BITS


class Neighbours:
    """The other ranks of the group on this host. ``pids``: their processes, by rank. In every call ``kind`` and
    ``index``, equal on all ranks, say which exchange it belongs to."""

    def __init__(self, rank: int, links: Links, pids: Mapping[int, int], reader: Reader) -> None:
        self.rank, self.links, self.peers = rank, links, links.peers
        self.ranks = tuple(sorted((*self.peers, rank)))
        self._pids, self._reader = pids, reader
        self._sent, self._awaited = Counter[int](), Counter[int]()  # messages by key; each key has one thread at a time
        self.journal: Journal | None = None
        self.numbers: Sequence[int] = range(self.ranks[-1] + 1)  # by which errors and waits name them

    def name_ranks(self, numbers: Sequence[int], journal: Journal | None) -> None:
        """Called before the first exchange. ``numbers``: of the group's ranks, in the default group. ``journal``: what
        it says of lost ranks ends every wait."""
        self.numbers = self.links.numbers = numbers
        self.journal = journal
        if journal is not None:
            self.links.raise_failure = journal.raise_verdict

    # --- signals ---

    def signal_full(self, kind: int, index: int, tensors: Mapping[int, Tensor] | Tensor) -> None:
        """Lets each other rank read its one of ``tensors``, contiguous, until it signals that it has done so."""
        key = _numbered(self._sent, FULL, kind, index)
        for peer in self.peers:
            tensor = tensors if isinstance(tensors, Tensor) else tensors.get(peer)
            place = _PLACE.pack(0, 0) if tensor is None else _PLACE.pack(tensor.data_ptr(), tensor.nbytes)
            self.links.send(peer, key, place)

    def await_full(self, kind: int, index: int, places: dict[int, bytes]) -> Step:
        """``places`` <- by rank, the address of its data for this one. Done when all others may be read."""
        return self._from_all(_numbered(self._awaited, FULL, kind, index), _PLACE.size, places)

    def signal_free(self, kind: int, index: int) -> None:
        """Tells the others that this rank has read their data."""
        key = _numbered(self._sent, FREE, kind, index)
        for peer in self.peers:
            self.links.send(peer, key, b"\0")

    def await_free(self, kind: int, index: int) -> Step:
        """Done when all others have read this rank's data."""
        return self._from_all(_numbered(self._awaited, FREE, kind, index), 1, {})

    def _from_all(self, key: int, nbytes: int, messages: dict[int, bytes]) -> Step:
        """``messages`` <- one message from each neighbour, by rank."""

        def step(seconds: float | None) -> bool:
            end = None if seconds is None else time.monotonic() + seconds
            for peer in self.peers:
                if peer not in messages:
                    left = None if end is None else max(0.0, end - time.monotonic())
                    started = time.perf_counter_ns()
                    message = self.links.receive(peer, key, nbytes, left)
                    note_wait(self.numbers[peer], started)
                    if message is None:
                        return False
                    messages[peer] = message
            return True

        return step

    # --- reads ---

    def read(self, out: Tensor, peer: int, place: bytes, start: int = 0, *, of: int | None = None) -> None:
        """``out``, contiguous <- the data of ``peer`` from byte ``start`` on. The data has ``of`` bytes; None: as many
        as ``out``."""
        address, nbytes = _PLACE.unpack(place)
        wanted = out.nbytes if of is None else of
        if nbytes != wanted:
            theirs, own = self.numbers[peer], self.numbers[self.rank]
            raise RuntimeError(f"rank {theirs} offers {nbytes} bytes, and rank {own} expects {wanted}")
        try:
            self._reader.read_into(out.data_ptr(), self._pids[peer], address + start, out.nbytes)
        except OSError as error:
            text = f"the memory of rank {self.numbers[peer]} can't be read by rank {self.numbers[self.rank]}: {error}"
            if error.errno not in _REFUSED:  # it was killed after its signal
                failure = RuntimeError(text)
                raise (failure if self.journal is None else self.journal.explained(failure)) from error
            text += (
                ". The kernel, or the policy of a container, allowed it when the model was compiled and refuses it "
                "now. With ZC_HOST_MEMORY=0 in the environment ranks send messages instead"
            )
            lost = RankLostError(text) if self.journal is None else self.journal.fail(RankLostError, text)
            raise lost from error

    def rows(
        self, local: Tensor, start: int, stop: int, places: Mapping[int, bytes]
    ) -> Iterator[tuple[Tensor, int, int]]:
        """Reads elements [start, stop) of every rank's data, as rows in rank order, n at a time; ``local`` is this
        rank's. Yields rows [ranks of the host, n], and which elements these are, counted from ``start``. The next ones
        take their memory."""
        size, count = local.element_size(), len(self.ranks)
        step = max(1024, _CHUNK_NBYTES // (size * count))
        scratch = torch.empty(min(step, stop - start) * count, dtype=local.dtype, device="cpu")
        for at in range(start, stop, step):
            end = min(stop, at + step)
            rows = scratch[: (end - at) * count].view(count, -1)
            for k, rank in enumerate(self.ranks):
                if rank == self.rank:
                    rows[k] = local[at:end]
                else:
                    self.read(rows[k], rank, places[rank], at * size, of=local.nbytes)
            yield rows, at - start, end - start

    # --- whole exchanges ---

    def read_tensors(
        self, kind: int, index: int, received: Mapping[int, Tensor], sent: Mapping[int, Tensor] | Tensor
    ) -> tuple[Step, ...]:
        """received[r] <- the tensor that rank r sends to this one. Done when the others have received theirs, too. All
        ranks call it, also those that receive nothing."""

        def read_all(places: Mapping[int, bytes]) -> None:
            for peer, out in received.items():
                if peer != self.rank:
                    self.read(out, peer, places[peer])

        return self.offer(kind, index, sent, read_all)

    def offer(
        self, kind: int, index: int, sent: Mapping[int, Tensor] | Tensor, read_all: ReadAll
    ) -> tuple[Step, ...]:
        """Lets each other rank read its one of ``sent``, while ``read_all`` reads theirs. Done when the others have
        read, too. A step that was cut off may be done again."""
        self.signal_full(kind, index, sent)
        places: dict[int, bytes] = {}
        free = _numbered(self._sent, FREE, kind, index)

        def read(seconds: float | None) -> bool:
            read_all(places)
            return True

        def answer(seconds: float | None) -> bool:
            for peer in self.peers:
                self.links.send(peer, free, b"\0")
            return True

        return self.await_full(kind, index, places), read, answer, self.await_free(kind, index)

    def gather_bytes(self, rows: bytearray, row: bytes) -> tuple[Step, ...]:
        """``rows``, [ranks of the host * n] bytes <- every rank's ``row`` of n. The k-th call on one rank matches the
        k-th on the others."""
        key, payloads = _numbered(self._sent, ROW), {self.rank: row}
        for peer in self.peers:
            self.links.send(peer, key, row)

        def join(seconds: float | None) -> bool:
            rows[:] = b"".join(payloads[rank] for rank in self.ranks)
            self.links.drop(range(ROW << 56, key))
            return True

        return self._from_all(key, len(row), payloads), join

    def reduce_(self, kind: int, value: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> tuple[Step, ...]:
        """``value``, small <- all ranks' values, combined in rank order: the same bits on all."""
        own = bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
        key, payloads = _numbered(self._sent, VALUES, kind, value.numel()), {self.rank: own}
        for peer in self.peers:
            self.links.send(peer, key, own)

        def combine(seconds: float | None) -> bool:
            values = (torch.frombuffer(bytearray(payloads[rank]), dtype=value.dtype) for rank in self.ranks)
            value.copy_(functools.reduce(add, values).view(value.shape))
            return True

        return self._from_all(key, value.nbytes, payloads), combine

    def close(self) -> None:
        self.links.close()


_PIECE = 32 * 1024  # bytes of a message per packet; well below what a socket takes at once (net.core.wmem_default)
_HEAD = struct.Struct("<qQ")  # key; bytes of the message from this piece on
_MAX_UNRECEIVED = 16  # numbered messages per rank that nobody has received, before old ones are dropped
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)  # the kernel has none at this moment: the message was not sent
_ENDED = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.EBADF)
_SLICE_S = 0.5  # how often a waiting thread looks for a failure
_RETRY_S = 0.01  # between two attempts to send


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
        self.raise_failure: Callable[[], None] = lambda: None  # raises the verdict that ends every wait
        self.numbers: Sequence[int] = range(max(self.peers, default=0) + 1)  # by which errors name ranks
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
                    self.raise_failure()
                    with self._changed:  # it may wait for room to send here, too
                        self._listen(_SLICE_S, room_for=peer)
                except OSError as error:
                    if error.errno in _ENDED:
                        return
                    if error.errno not in _NO_MEMORY:
                        raise RuntimeError(f"a message to rank {self.numbers[peer]} can't be sent: {error}") from error
                    self.raise_failure()
                    time.sleep(_RETRY_S)

    def receive(self, peer: int, key: int, nbytes: int, seconds: float | None = None) -> bytes | None:
        """The next message under ``key``, which has ``nbytes``; None after so many ``seconds`` without one.
        RuntimeError: the rank has ended, or its message has another size."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                inbox = self._inbox.get((peer, key))
                if inbox is not None:
                    message = inbox.popleft()
                    if not inbox:
                        del self._inbox[peer, key]
                    if len(message) != nbytes:
                        number = self.numbers[peer]
                        raise RuntimeError(f"rank {number} sent {len(message)} bytes where {nbytes} were expected")
                    return message
                if peer in self._ended:
                    raise RuntimeError(f"rank {self.numbers[peer]} has closed its connection")
                self.raise_failure()
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
                return  # most often there is no other one, and the next poll would see it at once

    def drop(self, keys: range) -> None:
        """Nobody will receive the messages under these keys, so they may go."""
        with self._changed:
            if len(self._inbox) > _MAX_UNRECEIVED * len(self.peers):
                for source in [source for source in self._inbox if source[1] in keys]:
                    del self._inbox[source]


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv  # AttributeError: not Linux
    call.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    return call


class Reader:
    """Reads memory of other processes, by pid."""

    def __init__(self) -> None:
        self._call = _readv()

    def read_into(self, out: int, pid: int, address: int, nbytes: int) -> None:
        """Copies ``nbytes`` from ``address`` of process ``pid`` to address ``out`` here. Raises OSError if that process
        has ended or may not be read."""
        done = 0
        while done < nbytes:
            here = _Vector(out + done, nbytes - done)
            there = _Vector(address + done, nbytes - done)
            count: int = self._call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process {pid} can't be read: {os.strerror(number)}")
            done += count
