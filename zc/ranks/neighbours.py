"""Exchanges between the ranks of one host, on CPU: each rank reads the others' memory.

A rank that has data for the others sends them its address (*full*). A rank that has read the data answers (*free*);
then it may be written again. Signals are numbered: the k-th one of a rank ends the k-th wait of the others, so that no
late or repeated message is taken for another one's.
"""

from __future__ import annotations

import errno
import functools
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zc.errors import RankLostError
from zc.ranks.waits import note_wait

if TYPE_CHECKING:
    from zc.ranks.journal import Journal
    from zc.ranks.links import Links
    from zc.ranks.memory import Reader
    from zc.ranks.work import Step


_PLACE = struct.Struct("<QQ")  # address, bytes
FULL, FREE, ROW, VALUES = range(4)  # what a message is for
_INDEX_BITS, _NUM_NUMBERS = 20, 2**28  # of a signal's key: its index, and how many numbers there are
_CHUNK_NBYTES = 2**20  # of all ranks' rows that are summed at once, so that they stay in a core's own cache
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)  # by the kernel, whatever the address

Use = Callable[[Tensor, int, int], None]


def _key(message: int, kind: int, index: int) -> int:
    return message << 56 | kind << 48 | index


def _numbered(counts: Counter[int], key: int) -> int:
    """The key of the next signal under ``key``, or of the next wait for one."""
    counts[key] += 1
    return key | counts[key] % _NUM_NUMBERS << _INDEX_BITS


class Neighbours:
    """The other ranks of the group on this host. ``pids``: their processes, by rank. In every call ``kind`` and
    ``index``, equal on all ranks, say which exchange it belongs to."""

    def __init__(self, rank: int, links: Links, pids: Mapping[int, int], reader: Reader) -> None:
        self.rank, self.links, self.peers = rank, links, links.peers
        self.ranks = tuple(sorted((*self.peers, rank)))
        self._pids, self._reader = pids, reader
        self._num_rows = 0  # the calling thread's
        self._sent, self._awaited = Counter[int](), Counter[int]()  # signals by key; each key has one thread at a time
        self.journal: Journal | None = None
        self.numbers: Sequence[int] = range(self.ranks[-1] + 1)

    def name_ranks(self, numbers: Sequence[int], journal: Journal | None) -> None:
        """Called before the first exchange. ``numbers``: of the group's ranks, in the default group. ``journal``: what
        it says of lost ranks ends every wait."""
        self.numbers, self.journal = numbers, journal
        if journal is not None:
            self.links.failure = journal.verdict

    # --- signals ---

    def signal_full(self, kind: int, index: int, tensors: Mapping[int, Tensor] | Tensor) -> None:
        """Lets each other rank read its one of ``tensors``, contiguous, until it signals that it has done so."""
        key = _numbered(self._sent, _key(FULL, kind, index))
        for peer in self.peers:
            tensor = tensors if isinstance(tensors, Tensor) else tensors.get(peer)
            place = _PLACE.pack(0, 0) if tensor is None else _PLACE.pack(tensor.data_ptr(), tensor.nbytes)
            self.links.send(peer, key, place)

    def await_full(self, kind: int, index: int, places: dict[int, bytes]) -> Step:
        """``places`` <- by rank, the address of its data for this one. Done when all others may be read."""
        return self._from_all(_numbered(self._awaited, _key(FULL, kind, index)), _PLACE.size, places)

    def signal_free(self, kind: int, index: int) -> None:
        """Tells the others that this rank has read their data."""
        key = _numbered(self._sent, _key(FREE, kind, index))
        for peer in self.peers:
            self.links.send(peer, key, b"\0")

    def await_free(self, kind: int, index: int) -> Step:
        """Done when all others have read this rank's data."""
        return self._from_all(_numbered(self._awaited, _key(FREE, kind, index)), 1, {})

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
            raise RuntimeError(f"rank {peer} offers {nbytes} bytes, and rank {self.rank} expects {wanted}")
        try:
            self._reader.read(out, self._pids[peer], address + start)
        except OSError as error:
            text = f"the memory of rank {peer} can't be read by rank {self.rank}: {error}"
            if error.errno not in _REFUSED:  # it was killed after its signal
                failure = RuntimeError(text)
                raise (failure if self.journal is None else self.journal.explained(failure)) from error
            text += (
                ". The kernel, or the policy of a container, allowed it when the model was compiled and refuses it "
                "now. With ZC_HOST_MEMORY=0 in the environment ranks send messages instead"
            )
            lost = RankLostError(text) if self.journal is None else self.journal.fail(RankLostError, text)
            raise lost from error

    def rows(self, local: Tensor, start: int, stop: int, places: Mapping[int, bytes], use: Use) -> None:
        """Reads elements [start, stop) of every rank's data, as rows in rank order, n at a time; ``local`` is this
        rank's. Calls ``use(rows [ranks of the host, n], at, at + n)`` with ``at`` counted from ``start``."""
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
            use(rows, at - start, end - start)

    # --- whole exchanges ---

    def exchange(
        self, kind: int, index: int, received: Mapping[int, Tensor], sent: Mapping[int, Tensor] | Tensor
    ) -> tuple[Step, ...]:
        """received[r] <- the tensor that rank r sends to this one. Done when the others have received theirs, too. All
        ranks call it, also those that receive nothing."""
        self.signal_full(kind, index, sent)
        places: dict[int, bytes] = {}

        def read(seconds: float | None) -> bool:
            for peer, out in received.items():
                if peer != self.rank:
                    self.read(out, peer, places[peer])
            self.signal_free(kind, index)
            return True

        return self.await_full(kind, index, places), read, self.await_free(kind, index)

    def gather_rows(self, out: Tensor, row: Tensor) -> tuple[Step, ...]:
        """out [ranks of the host * n] <- every rank's row [n], uint8. The k-th call on one rank matches the k-th on the
        others."""
        self._num_rows += 1
        number, payloads = self._num_rows, dict[int, bytes]()
        self._send(_key(ROW, 0, number), row)

        def copy(seconds: float | None) -> bool:
            for rank, place in zip(self.ranks, out.view(len(self.ranks), -1), strict=True):
                place.copy_(row if rank == self.rank else _tensor(payloads[rank], row))
            self.links.drop(range(_key(ROW, 0, 0), _key(ROW, 0, number)))
            return True

        return self._from_all(_key(ROW, 0, number), row.nbytes, payloads), copy

    def reduce_(self, kind: int, value: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> tuple[Step, ...]:
        """``value``, small <- all ranks' values, combined in rank order: the same bits on all."""
        key, payloads = _key(VALUES, kind, value.numel()), dict[int, bytes]()
        self._send(key, value)

        def combine(seconds: float | None) -> bool:
            local = value.clone()
            values = (local if rank == self.rank else _tensor(payloads[rank], local) for rank in self.ranks)
            value.copy_(functools.reduce(add, values))
            return True

        return self._from_all(key, value.nbytes, payloads), combine

    def _send(self, key: int, tensor: Tensor) -> None:
        payload = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for peer in self.peers:
            self.links.send(peer, key, payload)

    def close(self) -> None:
        self.links.close()


def _tensor(payload: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=like.dtype).view(like.shape)
