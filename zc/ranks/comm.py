"""The collectives that zc uses, over one process group.

Two groups: *data* carries gradients and weights, *control* carries a few bytes of host memory a step (which parameters
got a gradient, a hash of the order of reductions). Both are groups of zc's own. On CPU gloo matches collectives by
their order, and the comm stream's thread must not race with the program's own collectives on the caller's group. With
NCCL a group has one stream for all its collectives: behind one of the program's a reduction would wait, and the
program's behind zc's; zc's has high priority, so that its kernels do not wait for compute that was issued before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private
from zc.errors import PlanError
from zc.planning.plan import Plan
from zc.planning.topology import flat
from zc.ranks.control import Control, backend_of, host_backend
from zc.ranks.journal import EXCHANGES, Entry
from zc.ranks.neighbours import Neighbours
from zc.ranks.pieces import joined, keep_own, lengths
from zc.ranks.watch import Work
from zc.ranks.works import Several, issued


def _all_gather() -> Any:
    # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class Group(Control):
    """The same ranks, with the exchanges of gradients and weights. Those of a mesh of two dimensions are `split`: what
    all ranks tell each other goes on among all."""

    def __init__(self, group: dist.ProcessGroup | None, *, is_near: bool = True, reads_memory: bool = True) -> None:
        super().__init__(group, is_near=is_near, reads_memory=reads_memory)
        self._shard: Group | None = None
        self.replicas: Group | None = None  # the ranks that have this one's shard; None: nobody else has it
        self.data: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")  # of the tensors that `data` takes
        self._by_pairs = False
        self._waits_on_stream = False
        self._by_memory = False  # ranks read the gradients and weights where they lie

    @property
    def shard(self) -> Group:
        """The ranks that share one state: all, or this one's row of a mesh."""
        return self if self._shard is None else self._shard

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.world_size

    def split(self, shard: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
        """Into rows and columns of a mesh. Every rank calls it."""
        self._shard = Group(shard, reads_memory=self._may_read_memory)
        self.replicas = Group(replicas, is_near=False)
        self._shard._is_all = self.replicas._is_all = False
        self.replicas._between = ", between replicas"
        # else it follows what the ranks of `shard` exchange, on another stream: one journal has no order of the two
        self.replicas._keeps_journal = self._shard.world_size == 1
        found = self._gather_objects(str(self._shard.topology))
        # all ranks have one plan, and replicas one order of summation; a plan has two levels, and with replicas both
        if len(set(found)) > 1 or self._shard.topology.has_levels:
            self._shard.leave_memory(f"the ranks of `shard` lie on {' or '.join(dict.fromkeys(found))}")

    def leave_memory(self, why: str) -> None:
        """These ranks send messages, each to each."""
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours, self.topology = None, flat(self.world_size)
        self.note = f"each rank stands for itself: {why}"

    @property
    def _parts(self) -> list[Group]:
        return [group for group in (self._shard, self.replicas) if group is not None]

    def watch(self, plan: Plan, store: Any) -> None:
        super().watch(plan, store)
        if self.check is None or not self._parts:
            return
        abandons = [group._groups.abandon for group in (self, *self._parts) if group._groups is not None]
        self.check.on_failure = partial(_each, abandons)
        for group in self._parts:
            group.check = self.check
            group._watch_links()

    def take_nbytes_sent(self) -> Counter[str]:
        return sum((group.take_nbytes_sent() for group in self._parts), super().take_nbytes_sent())

    def close(self) -> None:
        for group in self._parts:  # under the watch, which closes with the ranks that have it
            group.close()
        super().close()
        self.data, self._by_memory = None, False

    def open_data(self, device: torch.device) -> None:
        """Makes the group that carries gradients and weights of ``device``. With NCCL it has the timeout and the NCCL
        configuration (``config.max_ctas`` and the like) of the group that the caller passed."""
        self._device = device
        for group in self._parts:
            group.open_data(device)
        if self.world_size > 1:
            given = self._given if self._given is not None else dist.group.WORLD
            assert given is not None and self._groups is not None
            self.timeout = torch_private.timeout_of(given, device.type)
            backend = host_backend(given)
            if device.type != "cpu":
                found = backend_of(given, device.type)
                if found is None:
                    raise PlanError(
                        f"parameters are on {device}, for whose tensors the process group has no backend: it has "
                        f"{dist.get_backend_config(given)}"
                    )
                backend = found
            if device.type == "cpu":
                self.data = self._groups.new(backend)
            else:
                self.data = self._groups.new(backend, self.timeout, like=given, device=device)
            self._by_memory = device.type == "cpu" and self._all_near is not None
            self._by_pairs = device.type == "cpu" and backend == "gloo"
            # gloo blocks the host for a GPU's tensors too. Others make the current stream wait; with a timeout, which a
            # watched wait has, NCCL's work blocks the host until it is done (ProcessGroupNCCL.hpp, torch 2.11)
            self._waits_on_stream = device.type != "cpu" and backend != "gloo"

    def _watched_data(self, work: Any, entry: Entry) -> Any:
        """Of the data group: watched where it is the host that waits."""
        return work if self._waits_on_stream else self._watched(work, entry)

    def all_to_all(self, out: Tensor, rows: Tensor, bucket: int) -> Work | None:
        """out[s*S:(s+1)*S] on rank r <- rows[r*S:(r+1)*S] of rank s; both [P], contiguous. Asynchronous."""
        entry = self._begin("reduce", bucket, self._others(rows.nbytes))
        if not self._by_pairs:
            return self._watched_data(dist.all_to_all_single(out, rows, group=self.data, async_op=True), entry)  # type: ignore[no-any-return]
        theirs, mine = out.view(self.world_size, -1), rows.view(self.world_size, -1)
        work = self._pairs(list(theirs), list(mine), entry)
        theirs[self.rank].copy_(mine[self.rank])  # while the others' rows are on their way
        return work

    # --- ranks that read each other's memory: nodes of a schedule ---

    def signal_full(self, what: str, bucket: int, tensor: Tensor) -> None:
        """The others of this host may read ``tensor``: of what is reduced a part each, of what is gathered all."""
        count = len(self.near().ranks)
        read = tensor.nbytes // count if what == EXCHANGES[0] else tensor.nbytes
        self._begin(what, bucket, read * (count - 1))
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
        entry = self._begin("reduce", bucket, self._others(flat.nbytes))
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._watched_data(call(out, flat, op=dist.ReduceOp.SUM, group=self.data, async_op=True), entry)  # type: ignore[no-any-return]

    # --- between hosts, the ranks of one number ---

    def reduce_net(self, out: Tensor, rows: Tensor, bucket: int) -> Work:
        """out[h] <- rows[this host] of the rank on host h, both [H, S]. Asynchronous. No entry of its own in the
        journal: it follows the exchange inside of the host, on a stream of its own."""
        return self._net("reduce", bucket, list(out), list(rows))

    def gather_net(self, rows: Tensor, bucket: int) -> Work:
        """rows[h] <- those of the rank on host h, [H, S]; this rank's own is there. Asynchronous."""
        return self._net("gather weights", bucket, list(rows), [rows[self.topology.host_of(self.rank)]] * len(rows))

    def _net(self, what: str, bucket: int, received: list[Tensor], sent: list[Tensor]) -> Work:
        ranks, here = self.topology.across(self.rank), self.topology.host_of(self.rank)
        tag, started = len(EXCHANGES) * bucket + EXCHANGES.index(what), []
        for distance in range(1, len(ranks)):
            source, target = (here - distance) % len(ranks), (here + distance) % len(ranks)
            started.append(issued(dist.irecv(received[source], group_src=ranks[source], group=self.data, tag=tag)))
            started.append(issued(dist.isend(sent[target], group_dst=ranks[target], group=self.data, tag=tag)))
            self._nbytes_sent[f"{what}, between hosts"] += sent[target].nbytes
        if received[here].data_ptr() != sent[here].data_ptr():
            received[here].copy_(sent[here])
        return self._watched(Several(started), (what, bucket))  # type: ignore[no-any-return]

    def all_gather(
        self, out: Tensor, shard: Tensor, what: str, bucket: int, order: Sequence[int] | None = None
    ) -> Work | None:
        """out [P] <- every rank's shard [S]; shard may be this rank's slice of out. ``what`` is one of EXCHANGES.
        ``order``: of each rank, which shard is its; None: in the order of the ranks. Asynchronous."""
        entry = self._begin(what, bucket, self._others(out.nbytes))
        if self._by_memory and self._neighbours is not None:
            rows = out.view(self.world_size, -1)
            if rows[self.rank].data_ptr() != shard.data_ptr():
                rows[self.rank].copy_(shard)
            received = dict(enumerate(rows))
            reads = self._neighbours.exchange(EXCHANGES.index(what), bucket, received, shard)
            return self._watched(reads, entry)  # type: ignore[no-any-return]
        if not self._by_pairs and order is None:
            return self._watched_data(_all_gather()(out, shard, group=self.data, async_op=True), entry)  # type: ignore[no-any-return]
        shards = out.view(self.world_size, -1)
        theirs = [shards[k] for k in order or range(self.world_size)]
        work = self._pairs(theirs, [shard] * self.world_size, entry)
        if theirs[self.rank].data_ptr() != shard.data_ptr():
            theirs[self.rank].copy_(shard)
        return work

    def exchange(
        self, received: Sequence[tuple[int, Tensor]], sent: Sequence[tuple[int, Tensor]], what: str, bucket: int
    ) -> Work:
        """Pieces of unequal length, each straight into its place: (rank, piece) ascending in rank, at most one a rank,
        the pieces of either list behind one another in memory. This rank's own is copied, unless it is there already.
        ``what`` is one of EXCHANGES. Asynchronous; called by all ranks, also those without a piece."""
        entry = self._begin(what, bucket, sum(piece.nbytes for rank, piece in sent if rank != self.rank))
        if self._by_memory and self._neighbours is not None:
            keep_own(received, sent, self.rank)
            reads = self._neighbours.exchange(EXCHANGES.index(what), bucket, dict(received), dict(sent))
            return self._watched(reads, entry)  # type: ignore[no-any-return]
        if not self._by_pairs:
            out, rows = joined(received, sent, self._device), joined(sent, received, self._device)
            splits = lengths(received, self.world_size), lengths(sent, self.world_size)
            work = dist.all_to_all_single(out, rows, splits[0], splits[1], group=self.data, async_op=True)
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
            entry = self._begin(kind, value.numel(), self._others(2 * value.nbytes))
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
