"""The plan: buckets and their layouts, what the stage shards, which ranks share a host, and by which hops a bucket
travels between ranks. It is the same on every rank and decided before anything runs. No tensors. `zc.planning.packing`
makes one.

No other code asks for the stage. Sources: ZeRO, arXiv:1910.02054, sections 5.1 to 5.3; ZeRO-Offload, arXiv:2101.06840.

A reduction has one hop in most runs. It has another one where hosts have several ranks, since sums then cross hosts
instead of gradients, and a last one where a mesh has replicas::

    2 ranks of one host               memory, among all                          into the accumulator
    2 GPUs of one host                messages, among all                        into the accumulator
    2 hosts of 2 ranks                memory or messages, inside a host          into a host_sum, or what was sent
                                      messages (or encoded), between hosts       into the accumulator
    2 replicas                        as one of these, whose last hop brings it  into a host_sum
                                      replicas, between those with one shard     into the accumulator

A gather goes the other way: between hosts first, then inside each. `zc.ranks.routes` has what does it.

Which elements, with P = 16, S = 4 and the 4 ranks of 2 hosts. Rank 2 h + l is the l-th of host h and has the
(2 l + h)-th shard, so that what a host's l-th rank sums is one piece, [8 l, 8 l + 8)::

    bucket      0   1   2   3 | 4   5   6   7 | 8   9  10  11 |12  13  14  15     flat_grad (stage 2), or acc (stage 1)
    hop 0       <--- ranks 0 and 2: 0 to 7 -->|<-- ranks 1 and 3: 8 to 15 --->     each the sum of its host, in host_sum
    hop 1       <-- rank 0 -->|<-- rank 2 --->|<-- rank 1 --->|<-- rank 3 --->     added to acc: its shard's mean
    update                                                                        each its shard of masters, in place
    gather, 1   ranks 0 and 2 have 0 to 7     | 1 and 3 have 8 to 15               in flat_param, cast from the masters
    gather, 0   all have 0 to 15                                                   where parameters are views of it
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from zc.planning.layout import ALIGN_NBYTES, LEFT, FlatLayout, Slot, align_up

if TYPE_CHECKING:
    from zc.planning.wire import Wire


@dataclass(frozen=True)
class Placement:
    """One row of the stage table.

    ``shards_gradients``: every backward reduces, through a flat_grad of the ring, and each rank accumulates its shard
    of the mean. Otherwise each rank adds its own gradients to a full-size accumulator, which each backward
    reduces that is outside of `zc.no_sync`.

    ``shards_weights``: each rank keeps its shard of the weights, and a bucket is gathered while it is read. Otherwise
    all ranks keep all weights.
    """

    stage: int
    shards_gradients: bool
    shards_weights: bool = False


PLACEMENTS: dict[int, Placement] = {
    1: Placement(1, shards_gradients=False),
    2: Placement(2, shards_gradients=True),
    3: Placement(3, shards_gradients=True, shards_weights=True),
}


@dataclass(frozen=True)
class Offload:
    """Host memory has the masters and the optimizer state, and with ``accumulates_on_host`` the accumulators, too.

    An accumulator in host memory visits the device for each backward: 8 bytes per element over the bus, and 4 for the
    first backward of an update. One that stays on the device costs 4 bytes per element there, and 4 over the bus before
    each update. With ``state_on_disk`` the optimizer state lies in mapped files instead.
    """

    accumulates_on_host: bool
    state_on_disk: bool = False


OFFLOADS: dict[str, Offload] = {"cpu": Offload(True), "device": Offload(False)}  # by offload_accumulate


@dataclass(frozen=True)
class Topology:
    """H = ``num_hosts`` hosts of L = ``ranks_per_host`` ranks each; rank r is number r % L on host r // L.

    ``reads_memory``: ranks of one host read each other's memory instead of sending messages. If hosts are unknown or
    have different numbers of ranks, every rank counts as its own host. A plan has a `usable` one.
    """

    num_hosts: int = 1
    ranks_per_host: int = 1
    reads_memory: bool = False

    @cached_property
    def has_levels(self) -> bool:
        """Whether exchanges have two levels: inside a host, and between ranks with the same number on all hosts."""
        return self.num_hosts > 1 and self.ranks_per_host > 1

    @cached_property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @cached_property
    def num_across(self) -> int:
        """How many ranks exchange with each other where bytes leave a host: one of each host in two levels, otherwise
        all."""
        return self.num_hosts if self.has_levels else self.world_size

    def of_host(self, rank: int) -> tuple[int, ...]:
        """The ranks of its host, this one included, ascending."""
        first = self.host_of(rank) * self.ranks_per_host
        return tuple(range(first, first + self.ranks_per_host))

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The other ranks of its host, ascending."""
        return tuple(r for r in self.of_host(rank) if r != rank)

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks with its number on each host, this one included, in the order of hosts."""
        return tuple(range(rank % self.ranks_per_host, self.world_size, self.ranks_per_host))

    def __str__(self) -> str:
        hosts = f"{self.num_hosts} host{'s' * (self.num_hosts > 1)} of {self.ranks_per_host}"
        return f"{hosts}, which read each other's memory" if self.reads_memory else hosts


ALONE = Topology()


def flat(world_size: int) -> Topology:
    """Each rank as its own host."""
    return Topology(world_size, 1)


def usable(topology: Topology, reduce: str, device_types: set[str]) -> Topology:
    """The topology that exchanges can use: only CPUs read memory, and levels are of several ranks each and need the
    exact reduction."""
    if device_types != {"cpu"}:
        topology = replace(topology, reads_memory=False)
    if topology.num_hosts == 1 or (topology.has_levels and reduce == "exact"):
        return topology
    return flat(topology.world_size)


@dataclass(frozen=True)
class BlockKind:
    """``name`` of the class, and the blocks' fully qualified names in order of registration."""

    name: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"block kind {self.name}: {len(self.members)} blocks, {self.members[0]} to {self.members[-1]}"


def block_of(kinds: Iterable[BlockKind]) -> dict[str, tuple[int, int]]:
    """By member name: the number of its kind, and its position among the members."""
    return {member: (k, i) for k, kind in enumerate(kinds) for i, member in enumerate(kind.members)}


def split_name(name: str, members: dict[str, tuple[int, int]]) -> tuple[str, str] | None:
    """A parameter's name as (member, name inside the member); None for a parameter outside of blocks."""
    end = name.find(".")
    while end >= 0:
        if name[:end] in members:
            return name[:end], name[end + 1 :]
        end = name.find(".", end + 1)
    return None


NUM_HOST_SUMS = 2  # the hop that sums inside a host writes one while the next hop sends the other

FIRST_FROZEN = 100_000  # the number of the first bucket of frozen parameters (`zc.planning.packing`)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced together, all of one optimizer. A record, no tensors.

    ``param_dtype`` is that of flat_param, ``grad_dtype`` that of flat_grad, which travels between ranks as it is or
    encoded; ``acc_dtype`` is that of the accumulator and of the master weights: fp32, or the parameters' own where that
    is wider.
    """

    index: int
    layout: FlatLayout
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    acc_dtype: torch.dtype
    device: torch.device
    optimizer: int = 0
    net_dtype: torch.dtype = torch.float32  # of sums of some ranks that travel: between hosts, or between replicas
    sends_differences: bool = False  # its weights travel as differences to what all ranks have

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return self.layout.slots

    @cached_property
    def numel(self) -> int:
        """P, padded."""
        return self.layout.numel_padded

    @cached_property
    def nbytes(self) -> int:
        """Of the whole weights, in param_dtype."""
        return self.numel * self.param_dtype.itemsize

    @cached_property
    def nbytes_gathered(self) -> int:
        """What the whole weights take of the arena."""
        return align_up(self.nbytes, ALIGN_NBYTES)

    def without(self, names: Collection[str]) -> Bucket:
        """The same after these parameters have left it. Each leaves its slot, under a name that no other slot has."""
        slots = tuple(
            replace(slot, name=f"{LEFT}{self.index}.{k}") if slot.name in names else slot
            for k, slot in enumerate(self.slots)
        )
        return replace(self, layout=replace(self.layout, slots=slots))

    @cached_property
    def num_params(self) -> int:
        """Its slots that have a parameter."""
        return sum(not slot.is_left for slot in self.slots)

    @cached_property
    def is_frozen(self) -> bool:
        """Its parameters get no gradient, and have no master."""
        return self.index >= FIRST_FROZEN

    @cached_property
    def has_master(self) -> bool:
        """False where the parameters are as wide as the accumulator, and equal their masters after each update: the
        master is then a slice of flat_param."""
        return self.param_dtype != self.acc_dtype or self.sends_differences


@dataclass(frozen=True)
class Plan:
    """Everything that the passes may know. ``is_boundary`` is False for the schedule of a microbatch inside no_sync.

    W = ``world_size`` ranks together have one copy of the state, in shards. There are ``num_replicas`` such copies, the
    first dimension of a mesh of two. ``topology`` is that of the W ranks.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    placement: Placement
    reduce: str  # "exact" | "native"
    num_buffers: int
    overlap: bool
    is_boundary: bool = True
    offload: Offload | None = None
    overlap_gather: bool = False
    topology: Topology = ALONE
    num_replicas: int = 1
    kinds: tuple[BlockKind, ...] = ()
    frozen: tuple[Bucket, ...] = ()  # of parameters that do not train, by ascending number; always in shards
    weight_nbytes: int | None = None  # the most bytes of gathered weights at any time; None: `weight_cap`
    # of gradients, and of weights or their differences, where they leave a host; None: they travel as they are
    reduce_encoding: Wire | None = None
    gather_encoding: Wire | None = None

    @cached_property
    def num_ranks(self) -> int:
        """The ranks that train: gradients are the mean over them."""
        return self.world_size * self.num_replicas

    @cached_property  # every block's schedule asks for it, and it grows with the number of blocks
    def slot_of(self) -> dict[str, tuple[int, int]]:
        """Parameter name -> (bucket, index of its slot)."""
        return {slot.name: (bucket.index, k) for bucket in self.with_weights for k, slot in enumerate(bucket.slots)}

    @cached_property
    def with_weights(self) -> tuple[Bucket, ...]:
        """All buckets, those of frozen parameters included."""
        return (*self.buckets, *self.frozen)

    @cached_property
    def with_masters_apart(self) -> tuple[Bucket, ...]:
        """The buckets whose masters are not the parameters' own storage, where all ranks keep that."""
        is_any = not self.placement.shards_weights
        return tuple(bucket for bucket in self.buckets if is_any and (bucket.has_master or self.offload is not None))

    def is_sharded(self, bucket: Bucket) -> bool:
        """Whether each rank keeps its shard of these weights, and gathers the bucket while it is read."""
        return bucket.is_frozen or self.placement.shards_weights

    @cached_property
    def sharded(self) -> tuple[Bucket, ...]:
        """The buckets with sharded weights: all in stage 3, else those of frozen parameters. One that all parameters
        have left is never gathered."""
        return tuple(bucket for bucket in self.with_weights if self.is_sharded(bucket) and bucket.num_params)

    @cached_property
    def sharded_names(self) -> frozenset[str]:
        """The parameters in these buckets."""
        return frozenset(slot.name for bucket in self.sharded for slot in bucket.slots if not slot.is_left)

    @cached_property
    def why_sharded(self) -> str:
        """The option that shards weights, for messages."""
        return f"stage={self.placement.stage}" if self.placement.shards_weights else "shard_frozen=True"

    def bucket(self, index: int) -> Bucket:
        """The one with this number."""
        return self.buckets[index] if index < FIRST_FROZEN else self._frozen_by_index[index]

    @cached_property
    def _frozen_by_index(self) -> dict[int, Bucket]:
        return {bucket.index: bucket for bucket in self.frozen}

    def of_optimizer(self, number: int | None) -> tuple[Bucket, ...]:
        """The buckets of one optimizer; None: of all."""
        return self.buckets if number is None else self._by_optimizer.get(number, ())

    @cached_property
    def _by_optimizer(self) -> dict[int, tuple[Bucket, ...]]:
        numbers = {bucket.optimizer for bucket in self.buckets}
        return {number: tuple(b for b in self.buckets if b.optimizer == number) for number in numbers}

    @cached_property
    def num_params(self) -> int:
        """Parameters that train and have not left the plan."""
        return sum(bucket.num_params for bucket in self.buckets)

    @cached_property
    def num_optimizers(self) -> int:
        """One more than the highest number of an optimizer that has a bucket."""
        return max((b.optimizer for b in self.buckets), default=0) + 1

    @cached_property
    def reduces(self) -> bool:
        """Whether a backward under this plan reduces, or only accumulates."""
        return self.placement.shards_gradients or self.is_boundary

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """How each reduction travels between ranks."""
        return hops_to_reduce(self)

    def encodes_gathers(self, bucket: Bucket) -> bool:
        """Whether this bucket's weights travel encoded, after an update or while they are read: in a scratch buffer,
        ``update``."""
        return any(hop.way is Way.ENCODED for hop in hops_to_gather(self, bucket))

    def weights_buffer(self, bucket: int) -> str:
        """The name of the weights that an update writes, in a schedule. It is flat_param[bucket], under another name if
        the gather outlives the schedule that launches it; in stage 3 it is this rank's shard."""
        kind = "weight" if self.placement.shards_weights else "gathered" if self.overlap_gather else "flat_param"
        return f"{kind}[{bucket}]"

    @cached_property
    def weight_cap(self) -> int:
        """The most bytes of gathered weights at any time. By default room for the largest sharded bucket, and for the
        next one as large."""
        if self.weight_nbytes is not None:
            return self.weight_nbytes
        return 2 * max((b.nbytes_gathered for b in self.sharded), default=0)

    def without(self, names: Collection[str]) -> Plan:
        """The plan after these parameters have left it, without frozen buckets that are empty then. Buckets that train
        keep their places, empty or not: schedules name them by number."""
        frozen = (bucket.without(names) for bucket in self.frozen)
        buckets = tuple(bucket.without(names) for bucket in self.buckets)
        return replace(self, buckets=buckets, frozen=tuple(bucket for bucket in frozen if bucket.num_params))

    def microbatch(self) -> Plan:
        return replace(self, is_boundary=False)

    def exact_gathers(self) -> Plan:
        """The plan of a gather that makes all weights equal to their masters, as after a load."""
        return replace(self, gather_encoding=None)

    @cached_property
    def num_staging(self) -> int:
        """Staging buffers on the device (offload)."""
        return min(self.num_buffers, len(self.buckets)) if self.offload is not None else 0

    def spreads(self, bucket: Bucket) -> bool:
        """Whether ranks send the whole parameters that they have updated to the shards in which they lie."""
        return bucket.layout.owners is not None and self.world_size > 1

    def numel_on_host(self, bucket: Bucket) -> int:
        """Elements of ``host[b]`` and of a staging buffer: P where a partial sum lives in host memory, else S."""
        partial = not self.placement.shards_gradients and self.offload is not None and self.offload.accumulates_on_host
        return bucket.numel if partial else bucket.layout.numel_shard


class Level(enum.Enum):
    """The ranks of one hop."""

    ALL = "all that share one state"
    HOST = "those of one host"
    NET = "those of one number on all hosts"
    REPLICAS = "those with the same shard"


class Way(enum.Enum):
    """How bytes travel in one hop. The routes have the same names (`zc.ranks.routes`)."""

    ALONE = "alone"  # one rank sends nothing
    MESSAGES = "messages"
    MEMORY = "memory"  # each rank reads the others' memory
    SHARDS = "shards in memory"  # a rank reads those of the others when it likes: nobody writes them between updates
    ENCODED = "encoded"  # messages of 8 bits, or 4, an element
    REPLICAS = "replicas"  # messages between the ranks with one shard, whose sum all of them get


class Into(enum.Enum):
    """Where a hop of a reduction leaves its sum."""

    ACCUMULATOR = "accumulator"  # the last hop: the mean over all ranks
    HOST_SUM = "host_sum"
    SENT = "sent"  # the start of the buffer that this rank has sent


@dataclass(frozen=True)
class Hop:
    """An exchange among ``num_ranks``. In a reduction they share one of ``parts`` equal parts of a bucket, which is
    what the hop before has left to each. ``number``: of a reduction's hops, from 0 on. ``scale``: of the sum."""

    way: Way
    among: Level
    num_ranks: int
    parts: int = 1
    into: Into = Into.ACCUMULATOR
    number: int = 0
    scale: float = 1.0

    @cached_property
    def is_last(self) -> bool:
        """Of a reduction's hops: it brings the mean over all ranks into an accumulator."""
        return self.into is Into.ACCUMULATOR

    @property
    def is_direct(self) -> bool:
        """Whether a reduction brings the sum as it reads what is summed, in one node. Otherwise what ranks have sent
        lies in a scratch buffer, until a second node sums it."""
        return self.way in (Way.ALONE, Way.MEMORY)

    def dtype(self, bucket: Bucket) -> torch.dtype:
        """Of what is sent in a reduction: gradients, or sums of some ranks' gradients."""
        return bucket.grad_dtype if self.number == 0 else bucket.net_dtype

    def numel_sent(self, bucket: Bucket) -> int:
        """Elements of what is sent in a reduction."""
        return bucket.numel // self.parts

    def numel_sum(self, bucket: Bucket) -> int:
        """Elements of its sum, in a reduction."""
        return self.numel_sent(bucket) // (1 if self.way is Way.REPLICAS else self.num_ranks)

    def nbytes_sent(self, plan: Plan, bucket: Bucket) -> int:
        """The most bytes that any rank sends to others in a reduction of this bucket."""
        width = self.dtype(bucket).itemsize + (bucket.acc_dtype.itemsize if self.way is Way.REPLICAS else 0)
        if self.way is Way.ENCODED:
            return max(sum(rows) - min(rows) for rows in encoded_rows(plan, bucket, plan.reduce_encoding))
        return self.numel_sent(bucket) * width * (self.num_ranks - 1) // self.num_ranks

    def nbytes_scratch(self, plan: Plan, bucket: Bucket) -> int:
        """Bytes of the scratch buffer for a reduction of this bucket."""
        if self.is_direct:
            return 0
        if self.way is Way.REPLICAS:
            return bucket.layout.numel_shard * bucket.acc_dtype.itemsize
        if self.way is Way.ENCODED:
            rows = encoded_rows(plan, bucket, plan.reduce_encoding)  # those that a rank sends, and its own from all
            return max(map(sum, rows)) + max(map(max, rows)) * plan.topology.num_across
        numel = self.numel_sent(bucket) if plan.reduce == "exact" else bucket.layout.numel_shard
        return numel * self.dtype(bucket).itemsize

    def nbytes_sum(self, bucket: Bucket) -> int:
        """Bytes that a route makes for as long as it sums: between replicas, the piece that a rank sums for all; else
        the sum in the accumulator's dtype, where it travels on in a narrower one. (Ranks that read each other's memory
        sum in pieces of a megabyte, which do not count.)"""
        if self.way is Way.REPLICAS:
            return self.numel_sent(bucket) // self.num_ranks * bucket.acc_dtype.itemsize
        is_narrow = not self.is_last and bucket.net_dtype != bucket.acc_dtype
        return self.numel_sum(bucket) * bucket.acc_dtype.itemsize if is_narrow and not self.is_direct else 0


def encoded_rows(plan: Plan, bucket: Bucket, encoding: Wire | None) -> list[tuple[int, ...]]:
    """Bytes of each shard's encoded row: of those shards together whose ranks exchange rows with each other."""
    assert encoding is not None, "the plan says that this travels encoded"
    count, nbytes = plan.topology.num_across, encoding.row_nbytes(bucket.layout)
    return [nbytes[first : first + count] for first in range(0, plan.world_size, count)]


def hops_to_reduce(plan: Plan) -> tuple[Hop, ...]:
    """The hops of each reduction; none, if one rank adds its gradients to its accumulator (stage 1)."""
    if plan.num_ranks == 1:
        return (Hop(Way.ALONE, Level.ALL, 1),) if plan.placement.shards_gradients else ()
    hops: list[Hop] = []
    beyond, topology = Way.MESSAGES if plan.reduce_encoding is None else Way.ENCODED, plan.topology
    if topology.has_levels:
        near = (Way.MEMORY, Into.HOST_SUM) if topology.reads_memory else (Way.MESSAGES, Into.SENT)
        hops.append(Hop(near[0], Level.HOST, topology.ranks_per_host, into=near[1]))
        hops.append(Hop(beyond, Level.NET, topology.num_hosts, topology.ranks_per_host, Into.HOST_SUM))
    elif plan.world_size > 1:
        reads = topology.reads_memory and plan.reduce == "exact"
        hops.append(Hop(Way.MEMORY if reads else beyond, Level.ALL, plan.world_size, into=Into.HOST_SUM))
    if plan.num_replicas > 1:
        hops.append(Hop(Way.REPLICAS, Level.REPLICAS, plan.num_replicas, plan.world_size))
    hops[-1] = replace(hops[-1], into=Into.ACCUMULATOR, scale=1.0 / plan.num_ranks)
    if any(bucket.net_dtype == torch.float16 for bucket in plan.buckets):
        # each hop gives a mean: the sum of many gradients may pass float16's largest number
        hops = [replace(hop, scale=1.0 / hop.num_ranks) for hop in hops]
    return tuple(replace(hop, number=number) for number, hop in enumerate(hops))


def hops_to_gather(plan: Plan, bucket: Bucket, *, is_exact: bool = False) -> tuple[Hop, ...]:
    """The hops of each gather of this bucket's weights, after an update or while they are read; with ``is_exact``, one
    that makes them equal to their masters. Ranks read each other's shards only where one hop brings all of them: in
    stage 3 every rank gathers in an order of its own. A plan encodes nothing that ranks of one host read, so that no
    way is by memory and encoded."""
    if plan.world_size == 1:
        return (Hop(Way.ALONE, Level.ALL, 1),)
    in_shards, topology, reads = plan.is_sharded(bucket), plan.topology, plan.topology.reads_memory
    is_encoded = not is_exact and plan.gather_encoding is not None and not bucket.is_frozen
    beyond = Way.ENCODED if is_encoded else Way.MESSAGES
    if not topology.has_levels:
        by_memory = Way.SHARDS if in_shards else Way.MEMORY
        return (Hop(by_memory if reads and not is_encoded else beyond, Level.ALL, plan.world_size),)
    near = Way.MEMORY if reads and not in_shards else Way.MESSAGES
    net, host = (Level.NET, topology.num_hosts), (Level.HOST, topology.ranks_per_host)
    return Hop(beyond, *net), Hop(near, *host)


def gathers_by_memory(plan: Plan) -> bool:
    """Whether ranks read each other's new weights after an update. They wait for each other by the sockets of their
    host, as well on the calling thread as on any other: gloo needs a thread for each wait that must end."""
    return plan.world_size > 1 and all(hop.way is Way.MEMORY for hop in hops_to_gather(plan, plan.buckets[0]))


def reads_shards(plan: Plan) -> bool:
    """Whether ranks read each other's shards of weights where they lie (stage 3)."""
    return plan.world_size > 1 and plan.topology.reads_memory and not plan.topology.has_levels
