"""The exchanges of gradients and weights between some ranks, over one process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zc.ranks.journal import EXCHANGES, REDUCE, Entry, Journal
from zc.ranks.work import Step, Work, collective, messages

# What the owners of whole parameters exchange: (rank, piece), ranks ascending. Pieces have any length, and are adjacent
# in memory.
Pieces = Sequence[tuple[int, Tensor]]


class Sum(NamedTuple):
    """Where a sum over ranks goes: ``out`` [n] <- scale * the sum, or with ``add`` out += that (`zc.ranks.routes`)."""

    out: Tensor
    scale: float = 1.0
    add: bool = False


def _all_gather() -> Any:
    # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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

    def _work(self, entry: Entry | str, *steps: Step) -> Work:
        return Work(entry, *steps, journal=self.journal)

    def _data_work(self, work: dist.Work | None, entry: Entry) -> Work:
        """A collective of the data group. The watch sees it if the host waits for it."""
        return Work(entry, collective(work), journal=None if self._waits_on_stream else self.journal)

    def all_to_all(self, out: Tensor, rows: Tensor, bucket: int) -> Work:
        """out[s*S:(s+1)*S] on rank r <- rows[r*S:(r+1)*S] of rank s; both [P], contiguous. Asynchronous."""
        entry = self.begin(REDUCE, bucket, self._others(rows.nbytes))
        if not self._by_pairs:
            return self._data_work(self._post(dist.all_to_all_single, out, rows, group=self.data, async_op=True), entry)
        theirs, mine = out.view(self.world_size, -1), rows.view(self.world_size, -1)
        work = self._between_pairs(list(theirs), list(mine), entry)
        theirs[self.rank].copy_(mine[self.rank])  # while the others' rows are on their way
        return work

    def reduce_scatter(self, out: Tensor, flat: Tensor, bucket: int) -> Work:
        """out [S] <- sum over ranks of this rank's rows of flat [P]. Asynchronous."""
        entry = self.begin(REDUCE, bucket, self._others(flat.nbytes))
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = self._post(call, out, flat, op=dist.ReduceOp.SUM, group=self.data, async_op=True)
        if not self._waits_on_stream:  # gloo's work for it waits without end, whatever time limit it is given
            is_on_host = self._device.type == "cpu"
            stream = None if is_on_host else torch.accelerator.current_stream(self._device)
            return self._work(entry, messages([work], stream=stream))
        return self._data_work(work, entry)

    def all_gather(self, out: Tensor, shard: Tensor, kind: str, bucket: int) -> Work:
        """out [P] <- every rank's shard [S]; shard may be this rank's slice of out. ``kind`` is one of EXCHANGES.
        Asynchronous."""
        entry = self.begin(kind, bucket, self._others(out.nbytes))
        if not self._by_pairs:
            return self._data_work(self._post(_all_gather(), out, shard, group=self.data, async_op=True), entry)
        theirs = out.view(self.world_size, -1)
        work = self._between_pairs(list(theirs), [shard] * self.world_size, entry)
        if theirs[self.rank].data_ptr() != shard.data_ptr():
            theirs[self.rank].copy_(shard)
        return work

    def gather_rows(self, rows: list[Tensor], kind: str, bucket: int) -> Work:
        """rows[r] <- the row of rank r, of any length; this rank's row is there. Asynchronous."""
        row = rows[self.rank]
        entry = self.begin(kind, bucket, row.nbytes * (self.world_size - 1))
        if self._by_pairs:
            return self._between_pairs(rows, [row] * self.world_size, entry)
        if not self._waits_on_stream:  # gloo gathers only rows of equal length
            received = [(rank, each) for rank, each in enumerate(rows) if each.numel()]
            sent = list(enumerate(row.repeat(self.world_size, 1))) if row.numel() else []
            return self._exchange_all(received, sent, entry)
        return self._data_work(self._post(dist.all_gather, rows, row, group=self.data, async_op=True), entry)

    def exchange(self, received: Pieces, sent: Pieces, kind: str, bucket: int) -> Work:
        """``received`` <- the pieces that other ranks send to this one, each straight into its place, at most one per
        rank. This rank's own piece is copied, unless it is there already. ``kind`` is one of EXCHANGES. Asynchronous.
        All ranks call it, also those without a piece."""
        entry = self.begin(kind, bucket, sum(piece.nbytes for rank, piece in sent if rank != self.rank))
        if not self._by_pairs:
            return self._exchange_all(received, sent, entry)
        others = [(rank, piece) for rank, piece in received if rank != self.rank]
        works = [self._pair(dist.irecv, piece, rank, entry) for rank, piece in others]
        for rank, piece in sorted(sent, key=lambda item: (item[0] - self.rank) % self.world_size):
            if rank != self.rank:
                works.append(self._pair(dist.isend, piece, rank, entry))
        copy_own_piece(received, sent, self.rank)
        return self._work(entry, messages(works))

    def _exchange_all(self, received: Pieces, sent: Pieces, entry: Entry) -> Work:
        """The same by one collective."""
        out, rows = _joined(received, sent, self._device), _joined(sent, received, self._device)
        splits = _lengths(received, self.world_size), _lengths(sent, self.world_size)
        work = self._post(dist.all_to_all_single, out, rows, splits[0], splits[1], group=self.data, async_op=True)
        return self._data_work(work, entry)

    def _between_pairs(self, received: list[Tensor], sent: list[Tensor], entry: Entry) -> Work:
        """received[s] <- sent[this rank] of rank s, for all others, straight into place. (gloo's own all_gather fills
        a buffer of [P] and copies it.)"""
        works, ranks = [], list[int]()
        for distance in range(1, self.world_size):  # each starts with the next rank, so no rank gets all at once
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            works.append(self._pair(dist.irecv, received[source], source, entry))
            works.append(self._pair(dist.isend, sent[target], target, entry))
            ranks += [self.numbers[source], self.numbers[target]]
        return self._work(entry, messages(works, ranks=ranks))

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
