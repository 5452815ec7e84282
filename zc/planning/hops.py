"""How a bucket travels between ranks: the hops of its reduction, and those of a gather. Decided with the plan; no
tensors.

A reduction has one hop in most runs. It has a second one where a host has several ranks, since sums then cross hosts
instead of gradients, and where a mesh has replicas::

    2 ranks of one host               memory, among all                          into the accumulator
    2 GPUs of one host                messages, among all                        into the accumulator
    2 hosts of 2 CPU ranks            memory, inside a host                      into a host_sum
                                      messages, between hosts                    into the accumulator
    2 hosts of 2 GPUs                 messages, inside a host                    into what was sent
                                      messages (or encoded), between hosts       into the accumulator
    2 replicas of 2 ranks             as one of the first two                    into a host_sum
                                      replicas, between those with one shard     into the accumulator

A gather goes the other way: between hosts first, then inside each. `zc.ranks.routes` has what does it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from zc.planning.layout import FlatLayout
    from zc.planning.plan import Bucket, Plan


class Encoding(Protocol):
    """How elements that leave a host travel in fewer bits (`zc.planning.wire`): a row of bytes for each shard."""

    @property
    def block(self) -> int:
        """Slots and shards begin at multiples of so many elements."""

    @property
    def bits(self) -> int:
        """Of most elements."""

    def row_nbytes(self, layout: FlatLayout) -> tuple[int, ...]:
        """Bytes of each shard's row."""

    def exact_numel(self, plan: Plan) -> int:
        """Elements of parameters that travel as they are."""


class Level(enum.Enum):
    """The ranks of one hop."""

    ALL = "all that share one state"
    HOST = "those of one host"
    NET = "those of one number on all hosts"
    REPLICAS = "those with the same shard"


class Way(enum.Enum):
    """How bytes travel in one hop. The routes have the same names: those of `zc.ranks.routes`, and those that
    `zc.compile` hands over."""

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
    """``number``: of a reduction's hops, from 0 on."""

    way: Way
    among: Level
    into: Into = Into.ACCUMULATOR
    number: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether a reduction brings the sum as it reads what is summed, in one node. Otherwise what ranks have sent
        lies in a scratch buffer, until a second node sums it."""
        return self.way in (Way.ALONE, Way.MEMORY)

    def dtype(self, bucket: Bucket) -> torch.dtype:
        """Of what is sent in a reduction: gradients, or sums of some ranks' gradients."""
        return bucket.reduce_dtype if self.number == 0 else bucket.net_dtype

    def numel_sent(self, bucket: Bucket) -> int:
        """Elements of what is sent in a reduction."""
        by_level = {Level.NET: bucket.layout.numel_host_range, Level.REPLICAS: bucket.layout.numel_shard}
        return by_level.get(self.among, bucket.numel) if self.number else bucket.numel

    def numel_sum(self, bucket: Bucket) -> int:
        """Elements of its sum, in a reduction."""
        return bucket.layout.numel_host_range if self.among is Level.HOST else bucket.layout.numel_shard

    def nbytes_sent(self, plan: Plan, bucket: Bucket) -> int:
        """Bytes that a rank sends to others in a reduction of this bucket."""
        if self.way is Way.ALONE:
            return 0
        if self.way is Way.ENCODED:
            nbytes, count = largest(plan, bucket, plan.reduce_encoding)[0], num_rows(plan)
            return nbytes * (count - 1) // count
        count = _num_ranks(plan, self.among)
        width = self.dtype(bucket).itemsize + (bucket.acc_dtype.itemsize if self.way is Way.REPLICAS else 0)
        return self.numel_sent(bucket) * width * (count - 1) // count

    def nbytes_scratch(self, plan: Plan, bucket: Bucket) -> int:
        """Bytes of the scratch buffer for a reduction of this bucket."""
        if self.is_direct:
            return 0
        if self.way is Way.REPLICAS:
            return bucket.layout.numel_shard * bucket.acc_dtype.itemsize
        if self.way is Way.ENCODED:
            return sum(largest(plan, bucket, plan.reduce_encoding))
        numel = self.numel_sent(bucket) if plan.reduce == "exact" else bucket.layout.numel_shard
        return numel * self.dtype(bucket).itemsize


def largest(plan: Plan, bucket: Bucket, encoding: Encoding | None) -> tuple[int, int]:
    """The most encoded bytes of any rank: of one row for each rank that it exchanges rows with, and of as many rows of
    its own shard. 0 without ``encoding``."""
    if encoding is None:
        return 0, 0
    count, nbytes = num_rows(plan), encoding.row_nbytes(bucket.layout)
    together = [sum(nbytes[first : first + count]) for first in range(0, plan.world_size, count)]
    return max(together), max(nbytes) * count


def num_rows(plan: Plan) -> int:
    """How many ranks exchange encoded rows with each other: those with one number on all hosts, or all."""
    return plan.topology.num_hosts if plan.topology.has_levels else plan.world_size


def _num_ranks(plan: Plan, among: Level) -> int:
    topology = plan.topology
    counts = {Level.HOST: topology.ranks_per_host, Level.NET: topology.num_hosts, Level.REPLICAS: plan.num_replicas}
    return counts.get(among, plan.world_size)


def hops_to_reduce(plan: Plan) -> tuple[Hop, ...]:
    """The hops of each reduction; none, if one rank adds its gradients to its accumulator (stage 1)."""
    if plan.num_ranks == 1:
        return (Hop(Way.ALONE, Level.ALL),) if plan.placement.shards_gradients else ()
    parts: list[tuple[Way, Level, Into]] = []
    beyond = Way.MESSAGES if plan.reduce_encoding is None else Way.ENCODED
    if plan.world_size > 1 and plan.topology.has_levels:
        near = (Way.MEMORY, Into.HOST_SUM) if plan.topology.reads_memory else (Way.MESSAGES, Into.SENT)
        parts = [(near[0], Level.HOST, near[1]), (beyond, Level.NET, Into.HOST_SUM)]
    elif plan.world_size > 1:
        reads = plan.topology.reads_memory and plan.reduce == "exact"
        parts = [(Way.MEMORY if reads else beyond, Level.ALL, Into.HOST_SUM)]
    if plan.num_replicas > 1:
        parts.append((Way.REPLICAS, Level.REPLICAS, Into.HOST_SUM))
    last = len(parts) - 1
    return tuple(
        Hop(way, among, Into.ACCUMULATOR if number == last else into, number)
        for number, (way, among, into) in enumerate(parts)
    )


def hops_to_gather(plan: Plan, bucket: Bucket, *, is_exact: bool = False) -> tuple[Hop, ...]:
    """The hops of each gather of this bucket's weights, after an update or while they are read; with ``is_exact``, one
    that makes them equal to their masters. Ranks read each other's shards only where one hop brings all of them: in
    stage 3 every rank gathers in an order of its own."""
    if plan.world_size == 1:
        return (Hop(Way.ALONE, Level.ALL),)
    in_shards, reads = plan.is_sharded(bucket), plan.topology.reads_memory
    is_encoded = not is_exact and plan.gather_encoding is not None and (not in_shards or plan.encodes_weights(bucket))
    beyond = Way.ENCODED if is_encoded else Way.MESSAGES
    if not plan.topology.has_levels:
        by_memory = Way.SHARDS if in_shards else Way.MEMORY
        return (Hop(by_memory if reads and not is_encoded else beyond, Level.ALL),)
    near = Way.MEMORY if reads and not in_shards else Way.MESSAGES
    return Hop(beyond, Level.NET), Hop(near, Level.HOST)


def reads_shards(plan: Plan) -> bool:
    """Whether ranks read each other's shards of weights where they lie (stage 3)."""
    return plan.world_size > 1 and plan.topology.reads_memory and not plan.topology.has_levels
