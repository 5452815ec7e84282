"""The ranks of one model, and their exchanges of gradients and weights.

There are two process groups: *data* carries gradients and weights, *control* a few bytes of host memory per step (which
parameters got a gradient, a checksum of the exchanges). Both belong to zc. On CPU gloo matches collectives by their
order, so the comm stream's thread must not race with the program's own collectives on the caller's group. With NCCL a
group has one stream for all its collectives, so a reduction would wait for those of the program, and these for zc's.
zc's stream has high priority: its kernels do not wait for compute that was issued before.

Where several hosts have several ranks each, exchanges have two levels: inside a host, and between the ranks with one
number on all hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zc import torch_private
from zc.errors import PlanError
from zc.planning.plan import Level, Topology
from zc.ranks.control import Control, backend_of, host_backend
from zc.ranks.exchanges import Exchanges, Pieces, Work, collective, copy_own_piece
from zc.ranks.journal import EXCHANGES, LARGEST, SUM

if TYPE_CHECKING:
    from zc.ranks.neighbours import Neighbours


class Levels(NamedTuple):
    """A rank's exchanges in two levels: with the ranks of its host, and with those that have its number on all
    hosts."""

    host: Exchanges
    net: Exchanges


class Group(Control):
    """The ranks of `Control`, with the exchanges of gradients and weights. With a mesh of two dimensions these are of
    the rows and columns; announcements still go to all ranks."""

    _shard: Group | None = None
    replicas: Group | None = None  # the ranks with the same shard as this one, or None without replicas
    _row_and_column: Sequence[Group] = ()  # of a mesh with two dimensions, this rank's: the two above
    levels: Levels | None = None  # with two levels
    _new_data: Callable[..., dist.ProcessGroup] | None = None  # makes one more group like `data`
    _by_memory = False  # ranks read each other's gradients and weights in place

    @property
    def shard(self) -> Group:
        """The ranks that share one state: all, or this one's row of a mesh."""
        return self if self._shard is None else self._shard

    def mesh(self) -> DeviceMesh | None:
        """These ranks as a mesh of one dimension, over the caller's group; None for one rank."""
        return None if self.world_size == 1 else DeviceMesh.from_group(self.callers_group, self._device.type)

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.world_size

    def of_level(self, level: Level) -> Exchanges:
        """The ranks of this exchange, other than replicas."""
        if level is Level.ALL or self.levels is None:
            return self
        return self.levels.host if level is Level.HOST else self.levels.net

    def send_messages(self, topology: Topology, note: str) -> None:
        """Makes these ranks exchange messages instead of reading each other's memory."""
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours, self.topology, self.note = None, topology, note

    def take_nbytes_sent(self) -> Counter[str]:
        parts: list[Exchanges] = [*self._row_and_column, *(self.levels or ())]
        return sum((part.take_nbytes_sent() for part in parts), super().take_nbytes_sent())

    def close(self) -> None:
        for group in self._row_and_column:  # before the journal that covers them
            group.close()
        super().close()
        self.data, self.levels, self._new_data, self._by_memory = None, None, None, False

    def open_data(self, device: torch.device) -> None:
        """Makes the group that carries gradients and weights of ``device``. With NCCL it has the timeout and the NCCL
        configuration (``config.max_ctas`` and the like) of the group that the caller passed."""
        self._device = device
        for group in self._row_and_column:
            group.open_data(device)
        if self.world_size > 1:
            callers_group = self.callers_group
            self.timeout = torch_private.timeout_of(callers_group, device.type)
            if device.type == "cpu":
                backend: str | None = host_backend(callers_group)
                self._new_data = partial(self.new_group, backend)
            else:
                backend = backend_of(callers_group, device.type)
                if backend is None:
                    raise PlanError(
                        f"parameters are on {device}, for whose tensors the process group has no backend: it has "
                        f"{dist.get_backend_config(callers_group)}"
                    )
                self._new_data = partial(self.new_group, backend, self.timeout, like=callers_group, device=device)
            self.data = self._new_data()
            self._by_memory = device.type == "cpu" and self._all_on_this_host is not None
            self._by_pairs = device.type == "cpu" and backend == "gloo"
            # gloo blocks the host for a GPU's tensors, too; other backends make the current stream wait. With a
            # timeout, as a watched wait has, NCCL's work blocks the host until it is done (ProcessGroupNCCL.hpp, 2.11)
            self._waits_on_stream = device.type != "cpu" and backend != "gloo"

    def open_levels(self) -> None:
        """Makes the groups that carry gradients and weights inside a host and between hosts, after `open_data`. All
        ranks call it."""
        topology = self.topology
        host = self._part(topology.of_host(self.rank))
        net = self._part(topology.across(self.rank), ", between hosts")
        net._keeps_journal = False  # each of its exchanges belongs to one inside the host
        # where reductions read memory, these are gathers of stage 3, which run on another stream than reductions, and
        # one journal has no order of the two
        host._keeps_journal = not topology.reads_memory
        self.levels = Levels(host, net)

    def _part(self, members: Sequence[int], between: str = "") -> Exchanges:
        """Some of the ranks, by their numbers in the group. gloo's messages name their receiver, so there one process
        group is enough."""
        part = Exchanges(members.index(self.rank), len(members), self.journal, between)
        part._device, part._by_pairs, part._waits_on_stream = self._device, self._by_pairs, self._waits_on_stream
        part.data, part._members = self.data, members
        part.numbers = [self.numbers[member] for member in members]
        if not self._by_pairs:
            assert self._new_data is not None, "open_data has been called"
            part.data, part._members = self._new_data(members=members), None
        return part

    @property
    def neighbours(self) -> Neighbours:
        assert self._neighbours is not None, "the plan says that ranks read each other's memory"
        return self._neighbours

    # --- exchanges by memory, or of a few numbers ---

    def all_gather(self, out: Tensor, shard: Tensor, kind: str, bucket: int) -> Work:
        """As `Exchanges.all_gather`. In two levels shards are in the order of a layout with as many hosts, and the host
        waits for the first level."""
        if self._by_memory:
            rows = list(enumerate(out.view(self.world_size, -1)))
            return self.exchange_pieces(rows, [(rank, shard) for rank, _ in rows], kind, bucket)
        if self.levels is not None:
            part = out.view(self.levels.host.world_size, -1)[self.levels.host.rank]
            self.levels.net.all_gather(part, shard, kind, bucket).wait()
            return self.levels.host.all_gather(out, part, kind, bucket)
        return super().all_gather(out, shard, kind, bucket)

    def exchange_pieces(self, received: Pieces, sent: Pieces, kind: str, bucket: int) -> Work:
        """As `Exchanges.exchange_pieces`."""
        if self._by_memory and self._neighbours is not None:
            entry = self.begin(kind, bucket, sum(piece.nbytes for rank, piece in sent if rank != self.rank))
            copy_own_piece(received, sent, self.rank)
            steps = self._neighbours.read_tensors(EXCHANGES.index(kind), bucket, dict(received), dict(sent))
            return Work(entry, *steps, journal=self.journal)
        return super().exchange_pieces(received, sent, kind, bucket)

    def sum_(self, value: Tensor) -> None:
        """Adds a small tensor over the ranks, in place."""
        self._all_reduce(SUM, value, dist.ReduceOp.SUM, torch.add)

    def max_(self, value: Tensor) -> None:
        """The largest over the ranks, elementwise, in place."""
        self._all_reduce(LARGEST, value, dist.ReduceOp.MAX, torch.maximum)

    def _all_reduce(self, kind: str, value: Tensor, op: Any, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        if self.world_size > 1:
            entry = self.begin(kind, value.numel(), self._others(2 * value.nbytes))
            if self._by_memory and self._neighbours is not None:
                Work(entry, *self._neighbours.reduce_(int(kind == SUM), value, add), journal=self.journal).wait()
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
