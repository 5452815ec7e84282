"""The collectives that zc uses, over one process group, and the checks that all ranks agree.

Two groups: *data* carries gradients and weights, *control* carries a few bytes of host memory a step (which parameters
got a gradient, a hash of the order of reductions). On CPU both are groups of zc's own: gloo matches collectives by
their order, and the comm stream's thread must not race with the program's own collectives on the caller's group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zc.errors import PlanError, RankMismatchError
from zc.planning.plan import Plan
from zc.planning.topology import Topology, flat
from zc.ranks.groups import Groups
from zc.ranks.journal import Entry
from zc.ranks.neighbours import Neighbours
from zc.ranks.pieces import joined, keep_own, lengths
from zc.ranks.topology import find
from zc.ranks.watch import RankCheck, Work
from zc.ranks.works import Several, Watched, issued

# What is exchanged under a bucket's number. On CPU the position in this list is part of the message's tag.
EXCHANGES = ("reduce", "gather weights", "gather gradient", "to owners", "from owners")


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """The name of the backend for tensors of this kind of device; None where the group has none."""
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    found = config.get_device_backend_map().get(device_type)
    return None if found is None else str(found)


def host_backend(group: dist.ProcessGroup | None) -> str:
    """The backend for host memory between the ranks of ``group``: its own one where it has one (gloo, or one that the
    program has registered), else gloo."""
    return backend_of(group, "cpu") or "gloo"


def _all_gather() -> Any:
    # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """The ranks that share one model. W = ``world_size``; with one rank no process group is needed or used."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size = 0, 1
        self.data: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.check: RankCheck | None = None
        self._nbytes_sent: Counter[str] = Counter()  # by kind of exchange, by this rank
        self._given = group
        self._groups: Groups | None = None
        self._by_pairs = False
        self._waits_on_stream = False
        self.topology: Topology = flat(1)
        self.note: str | None = None  # of the topology
        self._neighbours: Neighbours | None = None
        self._by_memory = False  # ranks read the gradients and weights where they lie
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError(f"rank {dist.get_rank()} is not a member of the given group of {self.world_size} ranks")
        if self.world_size > 1:
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            self._groups = Groups(ranks, host_backend(group))
            self.control = self.new_group()
            self._groups.sweep(self._gather_by_pairs)
            found = find(self.rank, self.world_size, self._gather_objects)
            self.topology, self._neighbours, self.note = found.topology, found.neighbours, found.note

    def _gather_objects(self, given: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, given, group=self.control)
        return found

    def open_data(self, device: torch.device) -> None:
        """Makes the group that carries gradients and weights of ``device``."""
        if self.world_size > 1:
            given = self._given if self._given is not None else dist.group.WORLD
            self.data = self.new_group() if device.type == "cpu" else given
            self._by_memory = device.type == "cpu" and self._neighbours is not None
            self._by_pairs = device.type == "cpu" and host_backend(given) == "gloo"
            # gloo blocks the host for a GPU's tensors too. Others make the current stream wait; with a timeout, which a
            # watched wait has, NCCL's work blocks the host until it is done (ProcessGroupNCCL.hpp, torch 2.11)
            self._waits_on_stream = device.type != "cpu" and backend_of(given, device.type) != "gloo"

    def new_group(self) -> dist.ProcessGroup:
        """Of the same ranks, for host memory. It goes when this object does, or with `close`."""
        assert self._groups is not None, "one rank needs no group"
        return self._groups.new()

    def close(self) -> None:
        """Closes zc's own groups; every rank calls it, when nothing is under way any more. Where ranks are out of
        step or gone nobody is waited for, and the groups stay."""
        if self.control is not None and self._groups is not None and self._groups.is_open:
            self._groups.sweep(self._gather_by_pairs, own=True)
        if self.check is not None:
            self.check.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours, self._by_memory = None, False
        self.data = self.control = self.check = None

    def agree_on(self, failure: Exception | None) -> None:
        """Raises on every rank where some rank has failed: its own error there, RankMismatchError on the others."""
        if self.world_size > 1 and self.max_on_host([int(failure is not None)])[0]:
            found = self._gather_objects(failure and f"{type(failure).__name__}: {failure}")
            if failure is None:
                rank = next(r for r, text in enumerate(found) if text is not None)
                raise RankMismatchError(
                    f"rank {rank} refused its model or options, rank {self.rank} did not: {found[rank]}"
                )
        if failure is not None:
            raise failure

    def watch(self, plan: Plan, store: Any) -> None:
        """From here on exchanges are kept in the rank's journal, and watched through ``store``."""
        if self.control is not None:
            own = dist.PrefixStore(f"zc/{self.control.group_name}", store)  # type: ignore[attr-defined]
            self.check = RankCheck(self.rank, self.world_size, own, plan.describe_exchange)
            assert self._groups is not None
            self.check.on_failure = self._groups.abandon
            if self._neighbours is not None:
                self._neighbours.links.failure = self.check.found

    def take_nbytes_sent(self) -> Counter[str]:
        """Since it was last asked: bytes that this rank has sent, by kind of exchange."""
        sent, self._nbytes_sent = self._nbytes_sent, Counter()
        return sent

    def _begin(self, kind: str, index: int, nbytes: int) -> Entry:
        self._nbytes_sent[kind] += nbytes * (self.world_size - 1) // self.world_size
        if self.check is not None:
            self.check.enter(kind, index)
        return kind, index

    def _watched(self, work: Any, entry: Entry | str) -> Any:
        return work if self.check is None or work is None else Watched(work, self.check, entry)

    def _watched_data(self, work: Any, entry: Entry) -> Any:
        """Of the data group: watched where it is the host that waits."""
        return work if self._waits_on_stream else self._watched(work, entry)

    def all_to_all(self, out: Tensor, rows: Tensor, bucket: int) -> Work | None:
        """out[s*S:(s+1)*S] on rank r <- rows[r*S:(r+1)*S] of rank s; both [P], contiguous. Asynchronous."""
        entry = self._begin("reduce", bucket, rows.nbytes)
        if not self._by_pairs:
            return self._watched_data(dist.all_to_all_single(out, rows, group=self.data, async_op=True), entry)  # type: ignore[no-any-return]
        theirs, mine = out.view(self.world_size, -1), rows.view(self.world_size, -1)
        work = self._pairs(list(theirs), list(mine), entry)
        theirs[self.rank].copy_(mine[self.rank])  # while the others' rows are on their way
        return work

    # --- ranks that read each other's memory: nodes of a schedule ---

    def signal_full(self, what: str, bucket: int, tensor: Tensor) -> None:
        """The others may read ``tensor``: of what is reduced [P] a part each, of what is gathered all, [S]."""
        self._begin(what, bucket, tensor.nbytes * (1 if what == EXCHANGES[0] else self.world_size))
        self.near().signal_full(EXCHANGES.index(what), bucket, tensor)

    def await_full(self, what: str, bucket: int) -> dict[int, bytes]:
        """Returns once all others have signalled: where each one's lies, for `read` and `rows`."""
        receipt = self.near().await_full(EXCHANGES.index(what), bucket)
        self._watched(receipt, (what, bucket)).wait()
        return receipt.found

    def signal_free(self, what: str, bucket: int) -> None:
        """This rank has read the others'."""
        self.near().signal_free(EXCHANGES.index(what), bucket)

    def await_free(self, what: str, bucket: int) -> None:
        """Returns once all others have read this rank's."""
        self._watched(self.near().await_free(EXCHANGES.index(what), bucket), (what, bucket)).wait()

    def near(self) -> Neighbours:
        assert self._neighbours is not None, "the plan says that ranks read each other's memory"
        return self._neighbours

    def reduce_scatter(self, out: Tensor, flat: Tensor, bucket: int) -> Work | None:
        """out [S] <- sum over ranks of this rank's rows of flat [P]. Asynchronous."""
        entry = self._begin("reduce", bucket, flat.nbytes)
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._watched_data(call(out, flat, op=dist.ReduceOp.SUM, group=self.data, async_op=True), entry)  # type: ignore[no-any-return]

    def all_gather(self, out: Tensor, shard: Tensor, what: str, bucket: int) -> Work | None:
        """out [P] <- every rank's shard [S]; shard may be this rank's slice of out. ``what`` is one of EXCHANGES.
        Asynchronous."""
        entry = self._begin(what, bucket, out.nbytes)
        if self._by_memory and self._neighbours is not None:
            rows = out.view(self.world_size, -1)
            if rows[self.rank].data_ptr() != shard.data_ptr():
                rows[self.rank].copy_(shard)
            received = dict(enumerate(rows))
            reads = self._neighbours.exchange(EXCHANGES.index(what), bucket, received, shard)
            return self._watched(reads, entry)  # type: ignore[no-any-return]
        if not self._by_pairs:
            return self._watched_data(_all_gather()(out, shard, group=self.data, async_op=True), entry)  # type: ignore[no-any-return]
        theirs = out.view(self.world_size, -1)
        work = self._pairs(list(theirs), [shard] * self.world_size, entry)
        if theirs[self.rank].data_ptr() != shard.data_ptr():
            theirs[self.rank].copy_(shard)
        return work

    def exchange(
        self, received: Sequence[tuple[int, Tensor]], sent: Sequence[tuple[int, Tensor]], what: str, bucket: int
    ) -> Work:
        """Pieces of unequal length, each straight into its place: (rank, piece) ascending in rank, at most one a rank,
        the pieces of either list behind one another in memory. This rank's own is copied, unless it is there already.
        ``what`` is one of EXCHANGES. Asynchronous; called by all ranks, also those without a piece."""
        entry = self._begin(what, bucket, 0)
        self._nbytes_sent[what] += sum(piece.nbytes for rank, piece in sent if rank != self.rank)
        if self._by_memory and self._neighbours is not None:
            keep_own(received, sent, self.rank)
            reads = self._neighbours.exchange(EXCHANGES.index(what), bucket, dict(received), dict(sent))
            return self._watched(reads, entry)  # type: ignore[no-any-return]
        if not self._by_pairs:
            out, given = joined(received, sent), joined(sent, received)
            splits = lengths(received, self.world_size), lengths(sent, self.world_size)
            work = dist.all_to_all_single(out, given, splits[0], splits[1], group=self.data, async_op=True)
            return self._watched_data(work, entry)  # type: ignore[no-any-return]
        tag = len(EXCHANGES) * bucket + EXCHANGES.index(what)
        others = [(rank, piece) for rank, piece in received if rank != self.rank]
        started = [issued(dist.irecv(piece, group_src=rank, group=self.data, tag=tag)) for rank, piece in others]
        for rank, piece in sorted(sent, key=lambda item: (item[0] - self.rank) % self.world_size):
            if rank != self.rank:
                started.append(issued(dist.isend(piece, group_dst=rank, group=self.data, tag=tag)))
        keep_own(received, sent, self.rank)
        return self._watched(Several(started), entry)  # type: ignore[no-any-return]

    def _pairs(self, received: list[Tensor], sent: list[Tensor], entry: Entry) -> Work:
        """received[s] <- sent[this rank] of rank s, for all others, straight into place (gloo's own all_gather fills a
        buffer of [P] first and copies it out: 2 ranks, 25 MB, 11 to 13 ms against 7). The tag names the exchange: on
        ranks that are out of step two different buckets wait, and never mix."""
        kind, index = entry
        tag = len(EXCHANGES) * index + EXCHANGES.index(kind)
        started = []
        for distance in range(1, self.world_size):  # all start with their neighbour: nobody is asked by all at once
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            started.append(issued(dist.irecv(received[source], group_src=source, group=self.data, tag=tag)))
            started.append(issued(dist.isend(sent[target], group_dst=target, group=self.data, tag=tag)))
        return self._watched(Several(started), entry)  # type: ignore[no-any-return]

    def sum_(self, value: Tensor) -> None:
        """Adds a small tensor over the ranks, in place."""
        self._all_reduce("sum", value, dist.ReduceOp.SUM, torch.add)

    def max_(self, value: Tensor) -> None:
        """The largest over the ranks, elementwise, in place."""
        self._all_reduce("largest", value, dist.ReduceOp.MAX, torch.maximum)

    def _all_reduce(self, kind: str, value: Tensor, op: Any, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        if self.world_size > 1:
            entry = self._begin(kind, value.numel(), 2 * value.nbytes)
            if self._by_memory and self._neighbours is not None:
                self._watched(self._neighbours.reduce_(int(kind == "sum"), value, add), entry).wait()
                return
            self._watched_data(dist.all_reduce(value, op=op, group=self.data, async_op=True), entry).wait()

    def broadcast_(self, tensor: Tensor) -> None:
        """Rank 0's values, in place, any dtype. ``tensor`` is contiguous."""
        if self.world_size > 1 and tensor.numel():
            # a buffer may lie in host memory beside a model on a GPU, and NCCL takes none
            group = self.control if tensor.device.type == "cpu" else self.data
            # as bytes: gloo knows no bool, and a broadcast does no arithmetic
            dist.broadcast(tensor.view(-1).view(torch.uint8), group_src=0, group=group)

    def _gather_by_pairs(self, row: Tensor) -> Tensor:
        """[W, n]: every rank's row [n], in host memory. Not a collective: a rank that has left the others in the
        middle of one does no harm here."""
        rows = row.repeat(self.world_size, 1)
        started = []
        for peer in range(self.world_size):
            if peer != self.rank:
                started.append(issued(dist.irecv(rows[peer], group_src=peer, group=self.control, tag=1)))
                started.append(issued(dist.isend(row, group_dst=peer, group=self.control, tag=1)))
        self._watched(Several(started), "zc.compile or zc.close").wait()
        return rows

    def send_to_all(self, tensors: Sequence[Tensor], what: str) -> Work:
        """From rank 0, in host memory, to all others, who `receive` them in this order; nobody waits. The caller
        holds the tensors until it has waited for the work."""
        others = range(1, self.world_size)
        sent = [issued(dist.isend(t, group_dst=r, group=self.control)) for r in others for t in tensors]
        return self._watched(Several(sent), what)  # type: ignore[no-any-return]

    def receive(self, tensor: Tensor, what: str) -> None:
        """What rank 0 sends next. ``what`` says in an error what this rank waited for."""
        work = issued(dist.irecv(tensor, group_src=0, group=self.control))
        self._watched(Several([work]), what).wait()

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks; host memory only, so that no device is synchronised."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._neighbours is not None:
            work: Any = self._neighbours.reduce_(2, tensor, torch.maximum)
            self._watched(work, "an exchange of a few numbers").wait()
            return [int(value) for value in tensor]
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        self._watched(work, "an exchange of a few numbers").wait()
        return [int(value) for value in tensor]

    def gather_on_host(self, out: Tensor, row: Tensor, what: str) -> Work:
        """out [W * n] <- every rank's row [n], uint8, in host memory. Asynchronous. ``what`` says in an error what this
        rank waited for.

        As an all-to-all of copies of the row: gloo posts all its messages at once. Its all_gather is a ring, whose
        W - 1 hops follow one another (gloo/allgather.cc, alltoall.cc).
        """
        if self._neighbours is not None:
            return self._watched(self._neighbours.gather_rows(out, row), what)  # type: ignore[no-any-return]
        # lifetime of the copies: the work holds them
        work = dist.all_to_all_single(out, row.repeat(self.world_size), group=self.control, async_op=True)
        if self._groups is not None and work is not None:
            self._groups.started(self.control, work)
        return self._watched(work, what)  # type: ignore[no-any-return]

    def same_everywhere(self, what: str, lines: Sequence[str]) -> None:
        """Raises RankMismatchError on every rank, naming the first line in which some rank differs from rank 0."""
        if self.world_size == 1:
            return
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
        low, high = self.max_on_host([-digest, digest])
        if -low == high:
            return
        gathered = self._gather_objects(list(lines))
        for rank, theirs in enumerate(gathered):
            for k in range(max(len(theirs), len(gathered[0]))):
                here = gathered[0][k] if k < len(gathered[0]) else "(nothing)"
                there = theirs[k] if k < len(theirs) else "(nothing)"
                if here != there:
                    raise RankMismatchError(f"{what} differs between ranks: rank 0 has {here}, rank {rank} has {there}")
