"""The memory that a plan needs on a rank, as one table: `zc.engine.buffers` allocates by it, and estimates sum it; and
the bytes that a rank sends and copies, by kind.

`of_bucket` has the tensors of one bucket, by element; `shared` those that serve all buckets, in bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zc.planning.plan import NUM_HOST_SUMS, Bucket, Into, Plan, encoded_rows

if TYPE_CHECKING:
    from zc.planning.wire import Wire

# In the order of reports; the optimizer's state is its own, and only estimates have it
KINDS = (
    "flat_param", "master_shard", "acc", "flat_grad", "scratch", "optimizer_state", "weight", "arena", "frozen",
    "host_sum", "sum", "spill", "update", "published", "whole_grad", "staging", "host", "param",
)  # fmt: skip
ON_DEVICE, ON_HOST = KINDS[:5], ("master_shard", "host", "param")  # reports have these, also where they have 0 bytes


class Share(enum.Enum):
    """How many elements of a bucket a tensor has."""

    WHOLE = "P"
    SHARD = "S"
    OWNED = "those that the rank updates: its shard, or a run of whole parameters"


class Lifetime(enum.Enum):
    PLAN = "as long as the plan"
    GRADIENTS = "from a backward to the zero_grad that sets gradients to None"
    UPDATE = "during an update"
    REDUCTION = "while a route sums"
    READS = "while a forward or backward reads gathered weights"


class Allocation(NamedTuple):
    """A tensor of one bucket. ``kind``: its name in `zc.engine.buffers` and in reports."""

    kind: str
    share: Share
    dtype: torch.dtype
    lifetime: Lifetime = Lifetime.PLAN
    on_host: bool = False

    def numel(self, bucket: Bucket, rank: int) -> int:
        if self.share is Share.OWNED:
            return _numel_owned(bucket, rank)
        return bucket.numel if self.share is Share.WHOLE else bucket.layout.numel_shard


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
        return [Allocation("frozen", Share.SHARD, bucket.param_dtype)]
    offload, shards_gradients = plan.offload, plan.placement.shards_gradients
    if plan.placement.shards_weights:
        tensors = [Allocation("weight", Share.SHARD, bucket.param_dtype)]
    else:
        tensors = [Allocation("flat_param", Share.WHOLE, bucket.param_dtype)]
    if has_own_master(plan, bucket):
        tensors.append(Allocation("master_shard", Share.OWNED, bucket.acc_dtype, on_host=offload is not None))
    if bucket.sends_differences:
        tensors.append(Allocation("published", Share.OWNED, bucket.param_dtype))
    if offload is not None:
        share = Share.WHOLE if plan.numel_on_host(bucket) == bucket.numel else Share.SHARD
        tensors.append(Allocation("host", share, bucket.acc_dtype, on_host=True))
    if offload is None or not offload.accumulates_on_host:
        share = Share.SHARD if shards_gradients else Share.WHOLE
        tensors.append(Allocation("acc", share, bucket.acc_dtype, Lifetime.GRADIENTS))
    # without offload stage 1 has them in its accumulators, of which a reduction leaves only a shard in use
    if bucket.layout.owners is not None and plan.world_size > 1 and (shards_gradients or offload is not None):
        tensors.append(Allocation("whole_grad", Share.OWNED, bucket.acc_dtype, Lifetime.UPDATE))
    return tensors


def shared(plan: Plan, rank: int | None) -> list[Room]:
    """The buffers through which all buckets pass, without those that nothing needs. ``rank`` None: the most that any
    rank has, where ranks own unequal parts."""
    buckets = plan.buckets
    if not buckets:
        return []
    of_hops = [(hop, bucket) for hop in plan.hops for bucket in buckets]
    # one scratch, and one sum: the hops that need one follow each other on comm
    scratch = max((hop.nbytes_scratch(plan, bucket) for hop, bucket in of_hops), default=0)
    rooms = [Room("scratch", 1, scratch, Lifetime.GRADIENTS)]
    sums = [hop.numel_sum(b) * b.net_dtype.itemsize for hop, b in of_hops if hop.into is Into.HOST_SUM]
    rooms.append(Room("host_sum", NUM_HOST_SUMS, max(sums, default=0), Lifetime.GRADIENTS))
    sums = [hop.nbytes_sum(bucket) for hop, bucket in of_hops]
    rooms.append(Room("sum", 1, max(sums, default=0), Lifetime.REDUCTION))
    if plan.placement.shards_gradients:
        largest = max(b.numel * b.grad_dtype.itemsize for b in buckets)
        rooms.append(Room("flat_grad", min(plan.num_buffers, len(buckets)), largest, Lifetime.GRADIENTS))
    arena = min(plan.weight_cap, sum(b.nbytes_gathered for b in plan.sharded))
    rooms.append(Room("arena", 1, arena, Lifetime.READS))
    if plan.gather_encoding is not None:  # the encoded differences that a gather brings together
        rows = [row for bucket in buckets for row in encoded_rows(plan, bucket, plan.gather_encoding)]
        rooms.append(Room("update", 1, max(map(sum, rows))))
    rooms.append(Room("staging", plan.num_staging, max(_nbytes_staging(plan, bucket) for bucket in buckets)))
    rooms = [room for room in rooms if room.num and room.nbytes]
    casts = [_numel_owned(b, rank) * b.param_dtype.itemsize for b in buckets if b.has_master]
    if casts and plan.num_staging:  # also on a rank that owns nothing, where programs are the same
        rooms.append(Room("param", plan.num_staging, max(casts), on_host=True))
    return rooms


def _nbytes_staging(plan: Plan, bucket: Bucket) -> int:
    """A bucket's gradient, or in stage 3 the whole parameters of one rank."""
    gradient = plan.numel_on_host(bucket) * bucket.acc_dtype.itemsize
    if not (plan.placement.shards_weights and plan.spreads(bucket)):
        return gradient
    return max(gradient, _numel_owned(bucket, None) * bucket.param_dtype.itemsize)


def _numel_owned(bucket: Bucket, rank: int | None) -> int:
    """Elements that ``rank`` updates; None: the most that any rank does."""
    layout = bucket.layout
    is_one = rank is not None or layout.owners is None  # without owners all ranks have equal shards
    ranges = [layout.owned_range(rank or 0)] if is_one else layout.runs.values()
    return max((stop - start for start, stop in ranges), default=0)


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
                if each.share is Share.OWNED and bucket.layout.owners is not None:
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


def of_ddp(plan: Plan, states: Sequence[int]) -> int:
    """Bytes that DDP keeps between steps in the masters' dtype, fp32 or float64: weights, gradients (views of its
    buckets), and the whole state of each optimizer. ``states`` as in `resident`."""
    return sum(s.numel * b.acc_dtype.itemsize * (2 + states[b.optimizer]) for b in plan.buckets for s in b.slots)


def resident(plan: Plan, states: Sequence[int]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes (device, host, disk) of a rank by kind. If ranks own unequal parts (whole parameters),
    the largest counts. Optimizer state counts with the shard's padding, although it has none. ``states``: how many
    tensors of a parameter's size each optimizer keeps."""
    device, host = most_nbytes(plan, on_host=False), most_nbytes(plan, on_host=True)
    state, kind = heaviest(plan.buckets, lambda b: states[b.optimizer] * b.acc_dtype.itemsize), "optimizer_state"
    if plan.offload is None:
        return in_order({**device, kind: state}), host, {}
    device[kind] = 0
    if not plan.offload.state_on_disk:
        return in_order(device), {**host, kind: state}, {}
    masters = in_shards((b for b in plan.buckets if b.has_master), "acc_dtype")
    return in_order(device), {**host, kind: 0}, {kind: state, "master_shard": masters}


def in_shards(buckets: Iterable[Bucket], dtype_of: str) -> int:
    """Bytes of one shard of each bucket, in its dtype of that name, such as "param_dtype"."""
    return sum(b.layout.numel_shard * getattr(b, dtype_of).itemsize for b in buckets)


def heaviest(buckets: Sequence[Bucket], nbytes: Callable[[Bucket], int]) -> int:
    """The most bytes that any rank has of elements that it updates in ``buckets``, at ``nbytes`` per element."""
    equal = sum(b.layout.numel_shard * nbytes(b) for b in buckets if b.layout.owners is None)
    return equal + max(_by_rank((b for b in buckets if b.layout.owners is not None), nbytes).values(), default=0)


def _by_rank(buckets: Iterable[Bucket], nbytes: Callable[[Bucket], int]) -> dict[int, int]:
    by_rank: dict[int, int] = {}
    for bucket in buckets:
        for rank, (start, stop) in bucket.layout.runs.items():
            by_rank[rank] = by_rank.get(rank, 0) + (stop - start) * nbytes(bucket)
    return by_rank


def moved(plan: Plan, dtype_of: str) -> tuple[int, int]:
    """Bytes that a rank sends for whole parameters: reduced gradients to their owners, and updated weights back to the
    shards. Each is the most that any rank sends."""
    whole = [b for b in plan.buckets if b.layout.owners is not None]
    if not whole or plan.world_size == 1:
        return 0, 0
    owned = _by_rank(whole, lambda b: getattr(b, dtype_of).itemsize)
    unsent: dict[int, int] = {}  # by rank: bytes of its elements in its own shard
    for bucket in whole:
        for rank, (start, stop) in bucket.layout.runs.items():
            low, high = bucket.layout.shard_range(rank)
            inside = max(0, min(stop, high) - max(start, low)) * getattr(bucket, dtype_of).itemsize
            unsent[rank] = unsent.get(rank, 0) + inside
    reduced = dict.fromkeys(range(plan.world_size), 0)
    for bucket in whole:
        end, shard = max((stop for _, stop in bucket.layout.runs.values()), default=0), bucket.layout.numel_shard
        for rank in range(-(-end // shard)):  # nobody owns the padding after the last run
            reduced[rank] += (min(end, (rank + 1) * shard) - rank * shard) * getattr(bucket, dtype_of).itemsize
    return max(n - unsent.get(r, 0) for r, n in reduced.items()), max(owned[rank] - unsent[rank] for rank in owned)


def sent(plan: Plan, microbatches: int) -> dict[str, int]:
    """Bytes that a rank sends in a step, or that others read from it.

    Each hop of a reduction sends all but one of its ranks' parts of each bucket, and the gathers W - 1 of W parts.
    Gradients and weights of whole parameters travel to their owners and back.
    """
    num = microbatches if plan.placement.shards_gradients else 1
    others, count = plan.world_size - 1, plan.topology.num_across
    reduced = sum(hop.nbytes_sent(plan, b) for hop in plan.hops for b in plan.buckets)
    trained = others * in_shards(plan.buckets, "param_dtype")
    if plan.gather_encoding is not None:
        trained = (plan.world_size - count) * in_shards(plan.buckets, "param_dtype")
        trained += sum((count - 1) * max(plan.gather_encoding.row_nbytes(b.layout)) for b in plan.buckets)
    return {
        "gradients": num * reduced + moved(plan, "acc_dtype")[0],
        "parameters": _gathered(plan, microbatches, trained, others) + moved(plan, "param_dtype")[1],
    }


def _gathered(plan: Plan, microbatches: int, trained: int, others: int) -> int:
    """Bytes of a step's gathers: ``trained`` of what trains, and ``others`` shards of what is frozen. Sharded weights
    are gathered for each forward and backward, an upper bound: some stay until the backward; all others once per
    update."""
    often = 2 * microbatches
    frozen = often * others * in_shards(plan.frozen, "param_dtype")
    return frozen + (often if plan.placement.shards_weights else 1) * trained


def sent_between_hosts(plan: Plan, microbatches: int, ranks_per_host: int) -> dict[str, int]:
    """Bytes that leave a host in a step, from all its ranks, without the exchanges of whole parameters' owners. Two
    levels send the least possible, 2 (H - 1) / H of the model with one backward; one level sends L times that."""
    num = microbatches if plan.placement.shards_gradients else 1
    others, copies = _pairs_between_hosts(plan, ranks_per_host)
    wire = "grad_dtype"
    if plan.topology.has_levels:
        others, wire = ranks_per_host * (plan.topology.num_hosts - 1), "net_dtype"
    reduced = others * in_shards(plan.buckets, wire)
    if copies:
        to_replicas = sum(plan.hops[-1].nbytes_sent(plan, b) for b in plan.buckets)
        reduced += copies * to_replicas // (plan.num_replicas - 1)
    if plan.reduce_encoding is not None:
        reduced = sum(_encoded_between_hosts(plan, b, plan.reduce_encoding, others) for b in plan.buckets)
    trained = others * in_shards(plan.buckets, "param_dtype")
    if plan.gather_encoding is not None:
        trained = sum(_encoded_between_hosts(plan, b, plan.gather_encoding, others) for b in plan.buckets)
    return {"gradients": num * reduced, "parameters": _gathered(plan, microbatches, trained, others)}


def _encoded_between_hosts(plan: Plan, bucket: Bucket, encoding: Wire, num_shards: int) -> int:
    """Bytes of ``num_shards`` rows that leave a host: an average over shards, since rows differ in length."""
    return num_shards * sum(encoding.row_nbytes(bucket.layout)) // plan.world_size


def _pairs_between_hosts(plan: Plan, ranks_per_host: int) -> tuple[int, int]:
    """How many pairs of ranks on different hosts exchange messages: inside a replica, and with the same shard of two
    replicas. Counts the host with the most. Rank r has shard r % W of replica r // W."""
    pairs = []
    for first in range(0, plan.num_ranks, ranks_per_host):
        here = range(first, first + ranks_per_host)
        shards, replicas = Counter(r // plan.world_size for r in here), Counter(r % plan.world_size for r in here)
        whole = sum(n * (plan.world_size - n) for n in shards.values())
        pairs.append((whole, sum(n * (plan.num_replicas - n) for n in replicas.values())))
    return max(pairs)


def copied(plan: Plan, microbatches: int) -> dict[str, int]:
    """Bytes over the bus in a step, by direction, without the exchanges of whole parameters' owners."""
    if plan.offload is None:
        return {"to host": 0, "to device": 0}
    up = heaviest(plan.buckets, lambda b: b.param_dtype.itemsize)
    shard = in_shards(plan.buckets, "acc_dtype")
    if not plan.offload.accumulates_on_host:
        return {"to host": shard, "to device": up}
    visit = sum(plan.numel_on_host(b) * b.acc_dtype.itemsize for b in plan.buckets)
    reduced_alone = 0 if plan.placement.shards_gradients or plan.world_size == 1 else visit - shard
    return {"to host": microbatches * visit - reduced_alone, "to device": (microbatches - 1) * visit + up}
