"""The exchanges of gradients and weights between some ranks, over one process group; and `Work`: an exchange that has
started, to wait for.

For which rank a thread waits, and when, is noted only while somebody asks, as the clock does (`zc.engine.ledger`). The
host waits where ranks are on CPUs. Elsewhere a device's stream waits by itself, and nothing is noted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zc.errors import ZcError
from zc.ranks import process
from zc.ranks.journal import EXCHANGES, REDUCE, Entry, Journal

# What the owners of whole parameters exchange, and encoded rows: (rank, piece), ranks ascending. Pieces have any
# length, and are adjacent in memory.
Pieces = Sequence[tuple[int, Tensor]]


class Exchanges:
    """The exchanges of rank number ``rank`` of ``world_size``. ``between`` names these ranks in counts of bytes."""

    def __init__(self, rank: int, world_size: int, journal: Journal | None, between: str = "") -> None:
        self.rank, self.world_size, self.journal = rank, world_size, journal
        self.data: dist.ProcessGroup | None = None
        self._members: Sequence[int] | None = None  # the numbers of these ranks in `data`, if they differ
        self.numbers: Sequence[int] = range(world_size)  # in the default group
        self._nbytes_sent: Counter[str] = Counter()  # by kind of exchange, by this rank
        self._between, self._keeps_journal = between, True
        self._device = torch.device("cpu")  # of the tensors that `data` takes
        self._by_pairs = False  # by sends and receives, not by collectives
        self._waits_on_stream = False  # the device's stream waits for an exchange, not the host

    def take_nbytes_sent(self) -> Counter[str]:
        """Bytes that this rank has sent since the last call, by kind of exchange."""
        sent, self._nbytes_sent = self._nbytes_sent, Counter()
        return sent

    def begin(self, kind: str, index: int, nbytes: int) -> Entry:
        """Records the start of an exchange in which this rank sends ``nbytes``, or other ranks read them."""
        self._nbytes_sent[kind + self._between] += nbytes
        if self.journal is not None and self._keeps_journal:
            self.journal.enter(kind, index)
        return kind, index

    def _others(self, nbytes: int) -> int:
        """The bytes for other ranks, of ``nbytes`` with an equal part per rank."""
        return nbytes * (self.world_size - 1) // self.world_size

    def _post(self, start: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Starts an exchange of torch.distributed. A broken connection may raise here already, before the wait."""
        try:
            return start(*args, **options)
        except RuntimeError as error:
            raise (self.journal.explained(error) if self.journal is not None else error) from error

    def _data_work(self, work: dist.Work | None, entry: Entry) -> Work:
        """A collective of the data group. The watch sees it if the host waits for it."""
        return Work(entry, collective(work), journal=None if self._waits_on_stream else self.journal)

    def all_to_all(self, out: Tensor, rows: Tensor, bucket: int) -> Work:
        """out[s*S:(s+1)*S] on rank r <- rows[r*S:(r+1)*S] of rank s; both [P], or as long as a hop's sum,
        contiguous. Asynchronous."""
        entry = self.begin(REDUCE, bucket, self._others(rows.nbytes))
        if self._by_pairs:
            return self._between_pairs(out.view(self.world_size, -1), rows.view(self.world_size, -1), entry)
        return self._data_work(self._post(dist.all_to_all_single, out, rows, group=self.data, async_op=True), entry)

    def reduce_scatter(self, out: Tensor, flat: Tensor, bucket: int) -> Work:
        """out [S] <- sum over ranks of this rank's rows of flat [P]. Asynchronous."""
        entry = self.begin(REDUCE, bucket, self._others(flat.nbytes))
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = self._post(call, out, flat, op=dist.ReduceOp.SUM, group=self.data, async_op=True)
        if not self._waits_on_stream:  # gloo's work for it waits without end, whatever time limit it is given
            is_on_host = self._device.type == "cpu"
            stream = None if is_on_host else torch.accelerator.current_stream(self._device)
            return Work(entry, messages([work], stream=stream), journal=self.journal)
        return self._data_work(work, entry)

    def all_gather(self, out: Tensor, shard: Tensor, kind: str, bucket: int) -> Work:
        """out [P] <- every rank's shard [S]; shard may be this rank's slice of out. ``kind`` is one of EXCHANGES.
        Asynchronous."""
        entry = self.begin(kind, bucket, self._others(out.nbytes))
        if self._by_pairs:
            return self._between_pairs(out.view(self.world_size, -1), [shard] * self.world_size, entry)
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._data_work(self._post(call, out, shard, group=self.data, async_op=True), entry)

    def gather_rows(self, rows: list[Tensor], kind: str, bucket: int) -> Work:
        """rows[r] <- the row of rank r, of any length; this rank's row is there. Asynchronous."""
        row = rows[self.rank]
        entry = self.begin(kind, bucket, row.nbytes * (self.world_size - 1))
        if self._by_pairs:
            return self._between_pairs(rows, [row] * self.world_size, entry)
        if not self._waits_on_stream:  # gloo gathers only rows of equal length
            received = [(rank, each) for rank, each in enumerate(rows) if each.numel()]
            sent = list(enumerate(row.repeat(self.world_size, 1))) if row.numel() else []
            return self._exchange_at_once(received, sent, entry)
        return self._data_work(self._post(dist.all_gather, rows, row, group=self.data, async_op=True), entry)

    def exchange_pieces(self, received: Pieces, sent: Pieces, kind: str, bucket: int) -> Work:
        """``received`` <- the pieces that other ranks send to this one, each straight into its place, at most one per
        rank. This rank's own piece is copied, unless it is there already. ``kind`` is one of EXCHANGES. Asynchronous.
        All ranks call it, also those without a piece."""
        entry = self.begin(kind, bucket, sum(piece.nbytes for rank, piece in sent if rank != self.rank))
        return (self._exchange_by_pairs if self._by_pairs else self._exchange_at_once)(received, sent, entry)

    def _exchange_at_once(self, received: Pieces, sent: Pieces, entry: Entry) -> Work:
        """The same by one collective."""
        out, rows = _joined(received, sent, self._device), _joined(sent, received, self._device)
        splits = _lengths(received, self.world_size), _lengths(sent, self.world_size)
        work = self._post(dist.all_to_all_single, out, rows, splits[0], splits[1], group=self.data, async_op=True)
        return self._data_work(work, entry)

    def _exchange_by_pairs(self, received: Pieces, sent: Pieces, entry: Entry) -> Work:
        """The same by a message to each rank. (gloo's own all_gather fills a buffer of [P] and copies it.)"""
        works, ranks = [], list[int]()
        # each starts with the next rank, so no rank gets all at once
        in_turn = sorted(sent, key=lambda item: (item[0] - self.rank) % self.world_size)
        for start, pieces in ((dist.irecv, received), (dist.isend, in_turn)):
            for rank, piece in pieces:
                if rank != self.rank:
                    works.append(self._pair(start, piece, rank, entry))
                    ranks.append(self.numbers[rank])
        copy_own_piece(received, sent, self.rank)  # while the others' are on their way
        return Work(entry, messages(works, ranks=ranks), journal=self.journal)

    def _between_pairs(self, received: Iterable[Tensor], sent: Iterable[Tensor], entry: Entry) -> Work:
        """received[s] <- sent[this rank] of rank s."""
        return self._exchange_by_pairs(list(enumerate(received)), list(enumerate(sent)), entry)

    def _pair(self, start: Callable[..., Any], tensor: Tensor, rank: int, entry: Entry) -> Any:
        """A message to or from one rank. The tag names the exchange, so ranks that are out of step wait for different
        buckets, and never mix them up."""
        kind, index = entry
        peer = rank if self._members is None else self._members[rank]
        other = {"group_src" if start is dist.irecv else "group_dst": peer}
        return self._post(start, tensor, group=self.data, tag=len(EXCHANGES) * index + EXCHANGES.index(kind), **other)


def _joined(pieces: Pieces, others: Pieces, device: torch.device) -> Tensor:
    """All ``pieces`` as one 1-D tensor. Without pieces it is empty, on ``device``, because a backend refuses even empty
    tensors of other devices, and has the dtype of ``others``, if there are any."""
    if not pieces:
        return torch.empty(0, dtype=others[0][1].dtype if others else None, device=device)
    first, numel = pieces[0][1], sum(piece.numel() for _, piece in pieces)
    assert pieces[-1][1].data_ptr() + pieces[-1][1].nbytes == first.data_ptr() + numel * first.element_size()
    return first.as_strided((numel,), (1,), first.storage_offset())


def _lengths(pieces: Pieces, world_size: int) -> list[int]:
    """The number of elements of each rank's piece, 0 without one."""
    numel = {rank: piece.numel() for rank, piece in pieces}
    return [numel.get(rank, 0) for rank in range(world_size)]


def copy_own_piece(received: Pieces, sent: Pieces, rank: int) -> None:
    """Copies the piece that ``rank`` sends to itself, unless source and destination are the same memory."""
    piece_for = dict(sent)
    for source, piece in received:
        if source == rank and piece.data_ptr() != piece_for[rank].data_ptr():
            piece.copy_(piece_for[rank])


# Waits for at most so many seconds (None: without end). Returns whether it is done, and raises only its own errors: a
# time limit that passes is no error, so a step that completes at that very moment is not mistaken for a failed one.
Step = Callable[[float | None], bool]


class Work:
    """One exchange, as steps that the waiting threads do in order. It holds the steps, and with them their buffers,
    until they are done. With a ``journal`` a wait raises an error that names ranks which are lost or out of step."""

    def __init__(self, entry: Entry | str, *steps: Step, journal: Journal | None = None) -> None:
        self.entry, self.journal = entry, journal
        self._steps = deque(steps)  # for any thread that waits, under the lock
        self._lock = threading.Lock()

    def wait(self) -> None:
        """A stream's thread and the calling one may both wait."""
        if self.journal is None:
            self.advance(None)
        else:
            self.journal.wait(self.advance, self.entry)

    def advance(self, seconds: float | None) -> bool:
        """Does steps for at most ``seconds``. Returns whether all of them are done."""
        end = None if seconds is None else time.monotonic() + seconds
        if not self._lock.acquire(blocking=False):  # another thread does the steps
            started = time.perf_counter_ns()
            if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
                return False
            note_wait(None, started)
        try:
            while self._steps:
                if not self._steps[0](None if end is None else max(0.0, end - time.monotonic())):
                    return False
                self._steps.popleft()
            return True
        finally:
            self._lock.release()


class Call:
    """``run()`` in a thread of its own, which may be abandoned: a step for a call that blocks until others answer.
    ``device``: the current one of that thread. ``group``: the group in which it waits, if that is the caller's."""

    def __init__(
        self,
        run: Callable[[], Any],
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.is_done = threading.Event()
        self._result: Any = None  # the thread writes it and the error before it sets the event; others read them after
        self._error: BaseException | None = None
        self._thread = process.start_thread(self._work, (run, device), "zc call", group)

    def _work(self, run: Callable[[], Any], device: torch.device | None) -> None:
        try:
            if device is not None and device.type != "cpu":
                torch.accelerator.set_device_index(device)  # a thread begins on device 0
            self._result = run()
        except BaseException as error:  # noqa: BLE001  (DCP's is no Exception; the waiting thread raises it)
            self._error = error
        self.is_done.set()

    def __call__(self, seconds: float | None = None) -> bool:
        """Raises errors of the network. `result` raises all others, which concern this rank alone."""
        if not self.is_done.wait(seconds):
            return False
        # the thread frees tensors as it ends: in C++, while the process ends, that would abort (zc/ranks/process.py)
        self._thread.join()
        if isinstance(self._error, RuntimeError) and not isinstance(self._error, ZcError):
            raise self._error
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def collective(work: dist.Work | None) -> Step:
    """A collective of torch.distributed."""
    assert work is not None, "this rank is a member of the group"

    def step(seconds: float | None) -> bool:
        started = time.perf_counter_ns()
        try:
            return wait(seconds)
        finally:
            note_wait(None, started)

    def wait(seconds: float | None) -> bool:
        if seconds is None:
            work.wait()
            return True
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            if not work.is_completed():
                return False
            work.wait()  # it completed after the time limit: returns at once, or raises the work's own error
        return True

    return step


def messages(
    works: Sequence[dist.Work | None],
    group: dist.ProcessGroup | None = None,
    stream: torch.Stream | None = None,
    ranks: Sequence[int | None] = (),
) -> Step:
    """Sends and receives; ``group``: theirs, if it is the caller's. gloo can't tell whether one is done, nor stop
    waiting for it, so a wait with a time limit hands them to a thread, once. ``stream``: the one on which they were
    issued, if they are of a device's tensors: gloo's wait queues copies on the waiting thread's current stream.
    ``ranks``: to or from whom each of ``works`` is, for `note_wait`."""
    call: Call | None = None

    def wait_for_all() -> None:
        with stream or contextlib.nullcontext():
            for work, rank in zip(works, ranks or [None] * len(works), strict=True):
                assert work is not None, "this rank is a member of the group"
                started = time.perf_counter_ns()
                work.wait()
                note_wait(rank, started)

    def step(seconds: float | None) -> bool:
        nonlocal call
        if seconds is None and call is None:
            wait_for_all()
            return True
        if call is None:
            call = Call(wait_for_all, group=group)
        started = time.perf_counter_ns()
        is_done = call(seconds)
        note_wait(None, started)
        return is_done

    return step


_OF_THREAD = threading.local()


class WaitForRank(NamedTuple):
    """``rank``: its number in the default group; None: a collective, which does not tell whose part came last, or what
    another thread waits for. The times are of time.perf_counter_ns(), in a clocked step microseconds."""

    rank: int | None
    start: float
    stop: float


@contextlib.contextmanager
def noting_waits() -> Iterator[list[WaitForRank]]:
    """Inside, the waits of this thread come into the list, in their order."""
    before, waits = getattr(_OF_THREAD, "waits", None), list[WaitForRank]()
    _OF_THREAD.waits = waits
    try:
        yield waits
    finally:
        _OF_THREAD.waits = before


def note_wait(rank: int | None, start: int) -> None:
    """A wait for ``rank`` that began at ``start`` and ends now."""
    waits: list[WaitForRank] | None = getattr(_OF_THREAD, "waits", None)
    if waits is not None:
        waits.append(WaitForRank(rank, start, time.perf_counter_ns()))
