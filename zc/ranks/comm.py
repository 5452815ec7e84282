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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private
from zc.errors import PlanError
from zc.planning.topology import flat
from zc.ranks.control import Control, backend_of, host_backend
from zc.ranks.journal import EXCHANGES, Entry
from zc.ranks.neighbours import Neighbours
from zc.ranks.pieces import joined, keep_own, lengths
from zc.ranks.work import Work, collective, messages


def _all_gather() -> Any:
    # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group(Control):
    """The ranks of `Control`, with the exchanges of gradients and weights. A mesh of two dimensions `split`s these;
    announcements still go to all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        is_near: bool = True,
        reads_memory: bool = True,
        whole: Control | None = None,
    ) -> None:
        super().__init__(group, is_near=is_near, reads_memory=reads_memory, whole=whole)
        self._shard: Group | None = None
        self.replicas: Group | None = None  # the ranks with the same shard as this one, or None without replicas
        self.data: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")  # of the tensors that `data` takes
        self._by_pairs = False
        self._waits_on_stream = False
        self._by_memory = False  # ranks read the gradients and weights in place

    @property
    def shard(self) -> Group:
        """The ranks that share one state: all, or this one's row of a mesh."""
        return self if self._shard is None else self._shard

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.world_size

    def split(self, shard: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
        """Splits the ranks into rows and columns of a mesh. Every rank calls it."""
        self._shard = Group(shard, reads_memory=self._may_read_memory, whole=self)
        self.replicas = Group(replicas, is_near=False, whole=self)
        self.replicas._between = ", between replicas"
        # else it follows what the ranks of `shard` exchange, on another stream: one journal has no order of the two
        self.replicas._keeps_journal = self._shard.world_size == 1
        topologies = self._gather_objects(str(self._shard.topology))
        # all ranks have one plan, and replicas one order of summation; a plan has two levels, and with replicas both
        if len(set(topologies)) > 1 or self._shard.topology.has_levels:
            self._shard.leave_memory(f"the ranks of `shard` lie on {' or '.join(dict.fromkeys(topologies))}")

    def leave_memory(self, why: str) -> None:
        """Makes these ranks exchange messages, each with each."""
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours, self.topology = None, flat(self.world_size)
        self.note = f"each rank stands for itself: {why}"

    @property
    def _parts(self) -> list[Group]:
        return [group for group in (self._shard, self.replicas) if group is not None]

    def take_nbytes_sent(self) -> Counter[str]:
        return sum((group.take_nbytes_sent() for group in self._parts), super().take_nbytes_sent())

    def close(self) -> None:
        for group in self._parts:  # before the journal that covers them
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
                device_backend = backend_of(given, device.type)
                if device_backend is None:
                    raise PlanError(
                        f"parameters are on {device}, for whose tensors the process group has no backend: it has "
                        f"{dist.get_backend_config(given)}"
                    )
                backend = device_backend
            if device.type == "cpu":
                self.data = self._new_group(backend)
            else:
                self.data = self._new_group(backend, self.timeout, like=given, device=device)
            self._by_memory = device.type == "cpu" and self._all_near is not None
            self._by_pairs = device.type == "cpu" and backend == "gloo"
            # gloo blocks the host for a GPU's tensors too. Others make the current stream wait; with a timeout, which a
            # watched wait has, NCCL's work blocks the host until it is done (ProcessGroupNCCL.hpp, torch 2.11)
            self._waits_on_stream = device.type != "cpu" and backend != "gloo"

    def _data_work(self, work: dist.Work | None, entry: Entry) -> Work:
        """Of the data group: watched where it is the host that waits."""
        return Work(entry, collective(work), journal=None if self._waits_on_stream else self.journal)

    def all_to_all(self, out: Tensor, rows: Tensor, bucket: int) -> Work:
        """out[s*S:(s+1)*S] on rank r <- rows[r*S:(r+1)*S] of rank s; both [P], contiguous. Asynchronous."""
        entry = self._begin("reduce", bucket, self._others(rows.nbytes))
        if not self._by_pairs:
            return self._data_work(self._post(dist.all_to_all_single, out, rows, group=self.data, async_op=True), entry)
        theirs, mine = out.view(self.world_size, -1), rows.view(self.world_size, -1)
        work = self._between_pairs(list(theirs), list(mine), entry)
        theirs[self.rank].copy_(mine[self.rank])  # while the others' rows are on their way
        return work

    # --- ranks that read each other's memory: nodes of a schedule ---

    def signal_full(self, what: str, bucket: int, tensor: Tensor) -> None:
        """Lets the others on this host read ``tensor``: one part each if it is reduced, all of it if it is gathered."""
        count = len(self.near().ranks)
        read = tensor.nbytes // count if what == EXCHANGES[0] else tensor.nbytes
        self._begin(what, bucket, read * (count - 1))
        self.near().signal_full(EXCHANGES.index(what), bucket, tensor)

    def await_full(self, what: str, bucket: int) -> dict[int, bytes]:
        """Waits for all others' signals. Returns the addresses of their data, for `read` and `rows`."""
        places: dict[int, bytes] = {}
        self._work((what, bucket), self.near().await_full(EXCHANGES.index(what), bucket, places)).wait()
        return places

    def signal_free(self, what: str, bucket: int) -> None:
        """Signals that this rank has read the others' data."""
        self.near().signal_free(EXCHANGES.index(what), bucket)

    def await_free(self, what: str, bucket: int) -> None:
        """Returns once all others have read this rank's data."""
        self._work((what, bucket), self.near().await_free(EXCHANGES.index(what), bucket)).wait()

    def near(self) -> Neighbours:
        assert self._neighbours is not None, "the plan says that ranks read each other's memory"
        return self._neighbours

    def reduce_scatter(self, out: Tensor, flat: Tensor, bucket: int) -> Work:
        """out [S] <- sum over ranks of this rank's rows of flat [P]. Asynchronous."""
        entry = self._begin("reduce", bucket, self._others(flat.nbytes))
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._data_work(self._post(call, out, flat, op=dist.ReduceOp.SUM, group=self.data, async_op=True), entry)

    # --- between hosts, the ranks of one number ---

    def reduce_net(self, out: Tensor, rows: Tensor, bucket: int) -> Work:
        """out[h] <- rows[this host] of the rank on host h, both [H, S]. Asynchronous. It has no journal entry, because
        it follows the exchange inside the host, on its own stream."""
        return self._net("reduce", bucket, list(out), list(rows))

    def gather_net(self, rows: Tensor, bucket: int) -> Work:
        """rows[h] <- those of the rank on host h, [H, S]; this rank's own is there. Asynchronous."""
        return self._net("gather weights", bucket, list(rows), [rows[self.topology.host_of(self.rank)]] * len(rows))

    def exchange_net(self, what: str, bucket: int, received: list[Tensor], sent: list[Tensor]) -> Work:
        """received[h] <- sent[this host] of the rank on host h. Asynchronous, without a journal entry."""
        return self._net(what, bucket, received, sent)

    def gather_rows(self, rows: list[Tensor], what: str, bucket: int) -> Work:
        """rows[r] <- those of rank r, of any length; this rank's own is there. Asynchronous."""
        own = rows[self.rank]
        entry = self._begin(what, bucket, own.nbytes * (self.world_size - 1))
        if self._by_pairs:
            return self._between_pairs(rows, [own] * self.world_size, entry)
        return self._data_work(self._post(dist.all_gather, rows, own, group=self.data, async_op=True), entry)

    def _net(self, what: str, bucket: int, received: list[Tensor], sent: list[Tensor]) -> Work:
        ranks, here = self.topology.across(self.rank), self.topology.host_of(self.rank)
        tag, works = len(EXCHANGES) * bucket + EXCHANGES.index(what), []
        for distance in range(1, len(ranks)):
            source, target = (here - distance) % len(ranks), (here + distance) % len(ranks)
            works.append(self._post(dist.irecv, received[source], group_src=ranks[source], group=self.data, tag=tag))
            works.append(self._post(dist.isend, sent[target], group_dst=ranks[target], group=self.data, tag=tag))
            self._nbytes_sent[f"{what}, between hosts"] += sent[target].nbytes
        if received[here].data_ptr() != sent[here].data_ptr():
            received[here].copy_(sent[here])
        return self._work((what, bucket), messages(works))

    def all_gather(
        self, out: Tensor, shard: Tensor, what: str, bucket: int, order: Sequence[int] | None = None
    ) -> Work:
        """out [P] <- every rank's shard [S]; shard may be this rank's slice of out. ``what`` is one of EXCHANGES.
        ``order``: by rank, the number of its shard; None: in the order of the ranks. Asynchronous."""
        entry = self._begin(what, bucket, self._others(out.nbytes))
        if self._by_memory and self._neighbours is not None:
            rows = out.view(self.world_size, -1)
            if rows[self.rank].data_ptr() != shard.data_ptr():
                rows[self.rank].copy_(shard)
            received = dict(enumerate(rows))
            return self._work(entry, *self._neighbours.exchange(EXCHANGES.index(what), bucket, received, shard))
        if not self._by_pairs and order is None:
            return self._data_work(self._post(_all_gather(), out, shard, group=self.data, async_op=True), entry)
        shards = out.view(self.world_size, -1)
        theirs = [shards[k] for k in order or range(self.world_size)]
        work = self._between_pairs(theirs, [shard] * self.world_size, entry)
        if theirs[self.rank].data_ptr() != shard.data_ptr():
            theirs[self.rank].copy_(shard)
        return work

    def exchange(
        self, received: Sequence[tuple[int, Tensor]], sent: Sequence[tuple[int, Tensor]], what: str, bucket: int
    ) -> Work:
        """Pieces of unequal length, each straight into its place: (rank, piece) ascending in rank, at most one per
        rank. The pieces of either list are adjacent in memory. This rank's own is copied, unless it is there already.
        ``what`` is one of EXCHANGES. Asynchronous; called by all ranks, also those without a piece."""
        entry = self._begin(what, bucket, sum(piece.nbytes for rank, piece in sent if rank != self.rank))
        if self._by_memory and self._neighbours is not None:
            keep_own(received, sent, self.rank)
            steps = self._neighbours.exchange(EXCHANGES.index(what), bucket, dict(received), dict(sent))
            return self._work(entry, *steps)
        if not self._by_pairs:
            out, rows = joined(received, sent, self._device), joined(sent, received, self._device)
            splits = lengths(received, self.world_size), lengths(sent, self.world_size)
            work = self._post(dist.all_to_all_single, out, rows, splits[0], splits[1], group=self.data, async_op=True)
            return self._data_work(work, entry)
        tag = len(EXCHANGES) * bucket + EXCHANGES.index(what)
        others = [(rank, piece) for rank, piece in received if rank != self.rank]
        works = [self._post(dist.irecv, piece, group_src=rank, group=self.data, tag=tag) for rank, piece in others]
        for rank, piece in sorted(sent, key=lambda item: (item[0] - self.rank) % self.world_size):
            if rank != self.rank:
                works.append(self._post(dist.isend, piece, group_dst=rank, group=self.data, tag=tag))
        keep_own(received, sent, self.rank)
        return self._work(entry, messages(works))

    def _between_pairs(self, received: list[Tensor], sent: list[Tensor], entry: Entry) -> Work:
        """received[s] <- sent[this rank] of rank s, for all others, straight into place. (gloo's own all_gather fills
        a buffer of [P] and copies it.) The tag names the exchange: on ranks that are out of step two different buckets
        wait, and never mix."""
        kind, index = entry
        tag = len(EXCHANGES) * index + EXCHANGES.index(kind)
        works = []
        for distance in range(1, self.world_size):  # each starts with its neighbour: no rank gets all messages at once
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            works.append(self._post(dist.irecv, received[source], group_src=source, group=self.data, tag=tag))
            works.append(self._post(dist.isend, sent[target], group_dst=target, group=self.data, tag=tag))
        return self._work(entry, messages(works))

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
                self._work(entry, *self._neighbours.reduce_(int(kind == "sum"), value, add)).wait()
                return
            self._data_work(self._post(dist.all_reduce, value, op=op, group=self.data, async_op=True), entry).wait()

    def broadcast_(self, tensor: Tensor) -> None:
        """Rank 0's values, in place, any dtype. ``tensor`` is contiguous."""
        if self.world_size > 1 and tensor.numel():
            # a buffer may lie in host memory beside a model on a GPU, and NCCL takes none
            group = self.control if tensor.device.type == "cpu" else self.data
            # as bytes: gloo knows no bool, and a broadcast does no arithmetic
            work = self._post(
                dist.broadcast, tensor.view(-1).view(torch.uint8), group_src=0, group=group, async_op=True
            )
            journal = None if self._waits_on_stream and group is self.data else self.journal
            Work("the weights or buffers of rank 0", collective(work), journal=journal).wait()
