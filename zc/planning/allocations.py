"""The memory that a plan needs on a rank, as one table: `zc.engine.buffers` allocates by it, and estimates sum it.

`of_bucket` has the tensors of one bucket, by element; `shared` those that serve all buckets, in bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from zc.planning.plan import NUM_HOST_SUMS, Bucket, Plan

# In the order of reports; the optimizer's state is its own, and only estimates have it
KINDS = (
    "flat_param", "master_shard", "acc", "flat_grad", "scratch", "optimizer_state", "weight", "arena", "frozen",
    "host_sum", "update", "published", "whole_grad", "staging", "host", "param",
)  # fmt: skip
ON_DEVICE, ON_HOST = KINDS[:5], ("master_shard", "host", "param")  # reports have these, also where they have 0 bytes


class Extent(enum.Enum):
    """How many elements of a bucket a tensor has."""

    WHOLE = "P"
    SHARD = "S"
    OWNED = "those that the rank updates: its shard, or a run of whole parameters"


class Lifetime(enum.Enum):
    PLAN = "as long as the plan"
    GRADIENTS = "from a backward to the zero_grad that sets gradients to None"
    UPDATE = "during an update"
    READS = "while a forward or backward reads gathered weights"


class Allocation(NamedTuple):
    """A tensor of one bucket. ``kind``: its name in `zc.engine.buffers` and in reports."""

    kind: str
    extent: Extent
    dtype: torch.dtype
    lifetime: Lifetime = Lifetime.PLAN
    on_host: bool = False

    def numel(self, bucket: Bucket, rank: int) -> int:
        if self.extent is Extent.OWNED:
            start, stop = bucket.layout.owned_range(rank)
            return stop - start
        return bucket.numel if self.extent is Extent.WHOLE else bucket.layout.numel_shard


class Room(NamedTuple):
    """``num`` buffers of ``nbytes``, each large enough for any bucket."""

    kind: str
    num: int
    nbytes: int
    lifetime: Lifetime = Lifetime.PLAN
    on_host: bool = False


def has_own_master(plan: Plan, bucket: Bucket) -> bool:
    """Whether the masters have memory of their own, apart from the parameters (stage 3: from this rank's shard)."""
    is_apart = bucket.has_master or plan.offload is not None
    return is_apart or (plan.placement.shards_weights and bucket.layout.owners is not None)


def of_bucket(plan: Plan, bucket: Bucket) -> list[Allocation]:
    """The tensors of a bucket that exist at any time, but those that only some updates need (`Buffers.spill`)."""
    if bucket.is_frozen:
        return [Allocation("frozen", Extent.SHARD, bucket.param_dtype)]
    offload, shards_gradients = plan.offload, plan.placement.shards_gradients
    if plan.placement.shards_weights:
        found = [Allocation("weight", Extent.SHARD, bucket.param_dtype)]
    else:
        found = [Allocation("flat_param", Extent.WHOLE, bucket.param_dtype)]
    if has_own_master(plan, bucket):
        found.append(Allocation("master_shard", Extent.OWNED, bucket.acc_dtype, on_host=offload is not None))
    if bucket.sends_differences:
        found.append(Allocation("published", Extent.OWNED, bucket.param_dtype))
    if offload is not None:
        extent = Extent.WHOLE if plan.numel_on_host(bucket) == bucket.numel else Extent.SHARD
        found.append(Allocation("host", extent, bucket.acc_dtype, on_host=True))
    if offload is None or not offload.accumulates_on_host:
        extent = Extent.SHARD if shards_gradients else Extent.WHOLE
        found.append(Allocation("acc", extent, bucket.acc_dtype, Lifetime.GRADIENTS))
    # without offload stage 1 has them in its accumulators, of which a reduction leaves only a shard in use
    if bucket.layout.owners is not None and plan.world_size > 1 and (shards_gradients or offload is not None):
        found.append(Allocation("whole_grad", Extent.OWNED, bucket.acc_dtype, Lifetime.UPDATE))
    return found


def shared(plan: Plan, rank: int | None) -> list[Room]:
    """The buffers through which all buckets pass, without those that nothing needs. ``rank`` None: the most that any
    rank has, where ranks own unequal parts."""
    buckets = plan.buckets
    if not buckets:
        return []
    rooms = [Room("scratch", 1, max(map(plan.nbytes_scratch, buckets)), Lifetime.GRADIENTS)]
    host_sum = max(plan.numel_host_sum(b) * b.net_dtype.itemsize for b in buckets)
    rooms.append(Room("host_sum", NUM_HOST_SUMS, host_sum, Lifetime.GRADIENTS))
    if plan.placement.shards_gradients:
        largest = max(b.numel * b.reduce_dtype.itemsize for b in buckets)
        rooms.append(Room("flat_grad", min(plan.num_buffers, len(buckets)), largest, Lifetime.GRADIENTS))
    rooms.append(Room("arena", 1, plan.nbytes_arena if plan.sharded else 0, Lifetime.READS))
    rooms.append(Room("update", 1, max(map(plan.nbytes_update, buckets))))
    rooms.append(Room("staging", plan.num_staging, max(map(plan.nbytes_staging, buckets))))
    rooms = [room for room in rooms if room.num and room.nbytes]
    casts = [_most_owned(b, rank) * b.param_dtype.itemsize for b in buckets if b.has_master]
    if casts and plan.num_staging:  # also on a rank that owns nothing, where programs are the same
        rooms.append(Room("param", plan.num_staging, max(casts), on_host=True))
    return rooms


def _most_owned(bucket: Bucket, rank: int | None) -> int:
    if rank is not None:
        return Allocation("", Extent.OWNED, bucket.acc_dtype).numel(bucket, rank)
    if bucket.layout.owners is None:
        return bucket.layout.numel_shard
    return max((stop - start for start, stop in bucket.layout.runs.values()), default=0)


def nbytes_of(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes by kind on one rank, on the device and on the host together."""
    found = Counter[str](dict.fromkeys(ON_DEVICE, 0))
    for bucket in plan.with_weights:
        for each in of_bucket(plan, bucket):
            found[each.kind] += each.numel(bucket, rank) * each.dtype.itemsize
    for room in shared(plan, rank):
        found[room.kind] += room.num * room.nbytes
    return in_order(found)


def most_nbytes(plan: Plan, *, on_host: bool) -> dict[str, int]:
    """Bytes by kind on the device, or in host memory: of each kind the most that any rank has."""
    always = ON_DEVICE if not on_host else ON_HOST if plan.offload is not None else ()
    equal, owned = Counter[str](dict.fromkeys(always, 0)), dict[str, Counter[int]]()
    for bucket in plan.with_weights:
        for each in of_bucket(plan, bucket):
            if each.on_host == on_host:
                if each.extent is Extent.OWNED and bucket.layout.owners is not None:
                    by_rank = owned.setdefault(each.kind, Counter())
                    for rank, (start, stop) in bucket.layout.runs.items():
                        by_rank[rank] += (stop - start) * each.dtype.itemsize
                else:
                    equal[each.kind] += each.numel(bucket, 0) * each.dtype.itemsize
    for kind, by_rank in owned.items():
        equal[kind] += max(by_rank.values(), default=0)
    for room in shared(plan, None):
        if room.on_host == on_host:
            equal[room.kind] += room.num * room.nbytes
    return in_order(equal)


def in_order(nbytes: Mapping[str, int]) -> dict[str, int]:
    """The same, in the order of `KINDS`."""
    return {kind: nbytes[kind] for kind in KINDS if kind in nbytes}
