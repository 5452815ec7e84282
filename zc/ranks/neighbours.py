"""Exchanges between the ranks of one host, on CPU: each reads what it takes where it lies, in the others' memory.

Who has something to give says where (*full*); who has read it says so (*free*), and then it may be written again. In
schedules these are nodes of their own, which passes put there and the proof knows (zc/passes/signal_peers.py);
everywhere else an `Exchange` is all of it.
"""

from __future__ import annotations

import functools
import struct
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zc.ranks.links import Links
    from zc.ranks.memory import Reader


_PLACE = struct.Struct("<QQ")  # address, bytes
FULL, FREE, ROW, VALUES = range(4)  # what a message says
_CHUNK_NBYTES = 2**20  # of all ranks' rows that are summed at once: what stays in a core's own cache

Use = Callable[[Tensor, int, int], None]


def _key(says: int, what: int, index: int) -> int:
    return says << 56 | what << 48 | index


class Neighbours:
    """The other ranks of the group on this host. ``pids``: their processes, by rank. ``what`` and ``index``, the same
    on all ranks, say in every call which exchange it belongs to."""

    def __init__(self, rank: int, links: Links, pids: Mapping[int, int], reader: Reader) -> None:
        self.rank, self.links, self.peers = rank, links, links.peers
        self.ranks = tuple(sorted((*self.peers, rank)))
        self._pids, self._reader = pids, reader
        self._num_rows = 0
        self.explained: Callable[[RuntimeError], Exception] = lambda error: error  # what the watch says to it

    # --- signals ---

    def signal_full(self, what: int, index: int, tensors: Mapping[int, Tensor] | Tensor) -> None:
        """Each other rank may read its one of ``tensors``, contiguous, until it has said that it has."""
        for peer in self.peers:
            given = tensors if isinstance(tensors, Tensor) else tensors.get(peer)
            place = _PLACE.pack(0, 0) if given is None else _PLACE.pack(given.data_ptr(), given.nbytes)
            self.links.send(peer, _key(FULL, what, index), place)

    def await_full(self, what: int, index: int) -> Receipt:
        """Where the others have something for this rank."""
        return Receipt(self.links, _key(FULL, what, index), _PLACE.size)

    def signal_free(self, what: int, index: int) -> None:
        """This rank has read what was there for it."""
        for peer in self.peers:
            self.links.send(peer, _key(FREE, what, index), b"\0")

    def await_free(self, what: int, index: int) -> Receipt:
        """The others have read, too."""
        return Receipt(self.links, _key(FREE, what, index), 1)

    # --- reads ---

    def read(self, out: Tensor, peer: int, place: bytes, start: int = 0, *, of: int | None = None) -> None:
        """``out``, contiguous <- what ``peer`` gives, from byte ``start`` on; it gives ``of`` bytes, or as many as
        ``out`` has."""
        address, nbytes = _PLACE.unpack(place)
        wanted = out.nbytes if of is None else of
        if nbytes != wanted:
            raise RuntimeError(f"rank {peer} gives {nbytes} bytes, and rank {self.rank} takes {wanted}")
        try:
            self._reader.read(out, self._pids[peer], address + start)
        except OSError as error:  # it was killed since it has signalled
            raise self.explained(RuntimeError(f"the memory of rank {peer} can't be read: {error}")) from error

    def rows(self, own: Tensor, start: int, stop: int, places: Mapping[int, bytes], use: Use) -> None:
        """Elements [start, stop) of what every rank gives, of this one ``own``, as rows in rank order, some at a time:
        ``use(rows [ranks of the host, n], at, at + n)`` with ``at`` counted from ``start``."""
        size, count = own.element_size(), len(self.ranks)
        step = max(1024, _CHUNK_NBYTES // (size * count))
        scratch = torch.empty(min(step, stop - start) * count, dtype=own.dtype)
        for at in range(start, stop, step):
            end = min(stop, at + step)
            rows = scratch[: (end - at) * count].view(count, -1)
            for k, rank in enumerate(self.ranks):
                if rank == self.rank:
                    rows[k] = own[at:end]
                else:
                    self.read(rows[k], rank, places[rank], at * size, of=own.nbytes)
            use(rows, at - start, end - start)

    # --- whole exchanges ---

    def exchange(
        self, what: int, index: int, received: Mapping[int, Tensor], given: Mapping[int, Tensor] | Tensor
    ) -> Exchange:
        """received[r] <- what rank r gives this one. Called by all ranks, also those that receive nothing."""
        self.signal_full(what, index, given)
        return Exchange(self, what, index, received)

    def gather_rows(self, out: Tensor, row: Tensor) -> Rows:
        """out [ranks of the host * n] <- every one's row [n], uint8. Pairs by the order of the calls."""
        self._num_rows += 1
        self._send(_key(ROW, 0, self._num_rows), row)
        return Rows(self, self._num_rows, out, row)

    def reduce_(self, what: int, value: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Reduced:
        """``value``, small <- all ranks' values, put together in rank order: the same bits on all."""
        key = _key(VALUES, what, value.numel())
        self._send(key, value)
        return Reduced(Receipt(self.links, key, value.nbytes), self.ranks, value, add)

    def _send(self, key: int, tensor: Tensor) -> None:
        payload = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for peer in self.peers:
            self.links.send(peer, key, payload)

    def close(self) -> None:
        self.links.close()


class Receipt:
    """One message from every neighbour, by rank, once waited for; two threads may wait for the same."""

    def __init__(self, links: Links, key: int, nbytes: int) -> None:
        self._links, self._key, self._nbytes = links, key, nbytes
        self.found: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"timed out after {timeout}")
        try:
            for peer in self._links.peers:
                if peer not in self.found:
                    left = None if end is None else max(0.0, end - time.monotonic())
                    self.found[peer] = self._links.receive(peer, self._key, self._nbytes, left)
        finally:
            self._lock.release()

    def is_completed(self) -> bool:
        return len(self.found) == len(self._links.peers)


class Exchange:
    """Reads what all others give, and ends when all others have read, too."""

    def __init__(self, ranks: Neighbours, what: int, index: int, received: Mapping[int, Tensor]) -> None:
        self._ranks, self._what, self._index, self._received = ranks, what, index, received
        self._full, self._free = ranks.await_full(what, index), ranks.await_free(what, index)
        self._has_read = False

    def wait(self, timeout: timedelta | None = None) -> None:
        self._full.wait(timeout)
        if not self._has_read:
            for peer, out in self._received.items():
                if peer != self._ranks.rank:
                    self._ranks.read(out, peer, self._full.found[peer])
            self._has_read = True
            self._ranks.signal_free(self._what, self._index)
        self._free.wait(timeout)

    def is_completed(self) -> bool:
        return self._free.is_completed()


class Rows:
    """Every rank's row, gathered."""

    def __init__(self, ranks: Neighbours, number: int, out: Tensor, row: Tensor) -> None:
        self._ranks, self._number, self._out, self._row = ranks, number, out, row
        self._receipt = Receipt(ranks.links, _key(ROW, 0, number), row.nbytes)

    def wait(self, timeout: timedelta | None = None) -> None:
        self._receipt.wait(timeout)
        ranks, found = self._ranks.ranks, self._receipt.found
        for rank, row in zip(ranks, self._out.view(len(ranks), -1), strict=True):
            row.copy_(torch.frombuffer(bytearray(found[rank]), dtype=torch.uint8) if rank in found else self._row)
        self._ranks.links.drop(range(_key(ROW, 0, 0), _key(ROW, 0, self._number)))

    def is_completed(self) -> bool:
        return self._receipt.is_completed()


class Reduced:
    """A small tensor, put together from all ranks'."""

    def __init__(
        self, receipt: Receipt, ranks: tuple[int, ...], value: Tensor, add: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._receipt, self._ranks, self._value, self._add = receipt, ranks, value, add

    def wait(self, timeout: timedelta | None = None) -> None:
        self._receipt.wait(timeout)
        found, own = self._receipt.found, self._value.clone()
        all_values = (
            torch.frombuffer(bytearray(found[r]), dtype=own.dtype).view(own.shape) if r in found else own
            for r in self._ranks
        )
        self._value.copy_(functools.reduce(self._add, all_values))

    def is_completed(self) -> bool:
        return self._receipt.is_completed()
