"""The ranks of one model, and their exchanges of gradients and weights.

There are two process groups: *data* carries gradients and weights, *control* a few bytes of host memory per step (which
parameters got a gradient, a checksum of the exchanges). Both belong to zc. On CPU gloo matches collectives by their
order, so the comm stream's thread must not race with the program's own collectives on the caller's group. With NCCL a
group has one stream for all its collectives, so a reduction would wait for those of the program, and these for zc's.
zc's stream has high priority: its kernels do not wait for compute that was issued before.

Where several hosts have several ranks each, exchanges have two levels: inside a host, and between the ranks with one
number on all hosts.

The ranks of ``mesh=``: with one dimension it is a group; with two, (replicate, shard), it has replicas. The ranks of a
row together have one copy of the state, and those of a column have the same shard::

    replicate \\ shard    0   1   2   3
        0                 0   1   2   3      each row is a copy of the optimizer state
        1                 4   5   6   7      rank 6 has the same shard as rank 2

A reduction ends with a hop between the ranks of a column. Weights need none: each row gathers its own copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zc import torch_private
from zc.errors import PlanError
from zc.planning.plan import Level, Topology, flat
from zc.ranks.control import NO_PARTS, Control, Parts, backend_of, host_backend
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


def ranks_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, parts: Parts = NO_PARTS, *, reads_memory: bool = True
) -> Group:
    """The ranks that train one model. Every rank calls it. Raises PlanError or RankMismatchError.

    ``reads_memory``: the model is on a CPU, so ranks of one host may read each other's memory.
    """
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
        if group is not None:
            raise PlanError("both group and mesh were given: leave one of them out")
        check_mesh(mesh)
        group = mesh.get_group() if mesh.ndim == 1 else None
    ranks = Group(group, parts, reads_memory=reads_memory)
    shape = "none" if mesh is None else f"({_describe(mesh)}) of the ranks {mesh.mesh.tolist()}"
    # before more groups are made: ranks with different meshes would make different groups, and wait for each other
    ranks.same_everywhere("what zc.compile was given as mesh", [shape], "Give all ranks the same one")
    if mesh is not None and has_replicas(mesh):
        ranks._shard, ranks.replicas = ranks._row_and_column = _split(ranks, mesh)
    return ranks


def _split(ranks: Group, mesh: DeviceMesh) -> tuple[Group, Group]:
    """This rank's row and column of a mesh. Every rank calls it."""
    shard = Group(mesh.get_group(1), ranks.parts, reads_memory=ranks.may_read_memory, everyone=ranks)
    replicas = Group(mesh.get_group(0), everyone=ranks)  # which send messages, wherever they are
    replicas._between = ", between replicas"
    # otherwise it follows exchanges of `shard` on another stream, and one journal has no order of the two
    replicas._keeps_journal = shard.world_size == 1
    topologies = ranks.gather_objects(str(shard.topology))
    # all ranks need one plan, and all replicas one order of summation
    hosts = f"the ranks of `shard` lie on {' or '.join(dict.fromkeys(topologies))}"
    if len(set(topologies)) > 1:
        alone = flat(shard.world_size)
        shard.send_messages(alone, f"every rank is treated as its own host, because {hosts}")
    elif shard.topology.num_hosts > 1 and shard.topology.reads_memory:
        topology = replace(shard.topology, reads_memory=False)
        shard.send_messages(topology, f"ranks of one host exchange messages, because {hosts}")
    return shard, replicas


def has_replicas(mesh: DeviceMesh) -> bool:
    return mesh.ndim == 2 and mesh.shape[0] > 1


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises PlanError for a mesh that does not fit; the error names its shape and the reason."""
    world_size, ranks, described = dist.get_world_size(), mesh.mesh, f"mesh ({_describe(mesh)})"
    if mesh.ndim > 2:
        raise PlanError(
            f"{described} has {mesh.ndim} dimensions, and zc takes one, of the ranks that share the state, or two "
            f"(replicate, shard), of all {world_size} ranks: give the part of it that data parallelism has, or a mesh "
            f"of shape (replicas, {world_size} / replicas)"
        )
    if mesh.ndim == 2 and ranks.numel() != world_size:
        raise PlanError(
            f"{described} has {ranks.numel()} ranks, and the default group has {world_size}: a mesh of two dimensions "
            f"(replicate, shard) is one of all ranks, of shape (replicas, {world_size} / replicas). For some ranks "
            "give a mesh of one dimension"
        )
    if mesh.get_coordinate() is None:
        raise PlanError(
            f"rank {dist.get_rank()} of {world_size} is not in {described} of the ranks {ranks.tolist()}: only its "
            "ranks call zc.compile"
        )
    names = mesh.mesh_dim_names
    if mesh.ndim == 2 and names is not None and ("shard" in names[0] or "replicate" in names[1]):
        raise PlanError(
            f"{described}: its dimensions are taken as (replicate, shard), in this order, as FSDP2 takes them"
        )
    if mesh.ndim == 2 and any(bool((torch.diff(ranks, dim=d) <= 0).any()) for d in (0, 1)):
        raise PlanError(
            f"{described} of the ranks {ranks.tolist()}: ranks must ascend along each dimension, as "
            "torch.distributed.device_mesh.init_device_mesh numbers them"
        )


def _describe(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or "?" * mesh.ndim
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
