"""Bytes of a plan, by kind: what a rank holds, sends and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from zc.planning.plan import NUM_HOST_SUMS, Bucket, Plan

# fp32 tensors of the parameter's size that torch's optimizers keep; another one is taken as Adam
STATES = {"Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2,
          "ASGD": 1, "Rprop": 2, "SGD": 0, "Muon": 1}  # fmt: skip


def held(made: Plan, num_states: Sequence[int]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes (device, host, disk) of a rank by kind: as `zc.engine.buffers.Buffers`, without making any. State is
    counted with the shard's padding, of which it has none. ``num_states``: of each optimizer, the tensors of a
    parameter's size that it keeps. Of what ranks own in unequal parts (whole parameters), the largest part."""

    def total(numel_of: str, dtype_of: str) -> int:
        sizes = {"P": [b.numel for b in made.buckets], "S": [b.layout.numel_shard for b in made.buckets]}[numel_of]
        return sum(n * getattr(b, dtype_of).itemsize for n, b in zip(sizes, made.buckets, strict=True))

    cast = tuple(b for b in made.buckets if b.has_master)
    ragged = tuple(b for b in made.buckets if b.layout.owners is not None)
    whole = max(b.numel * b.reduce_dtype.itemsize for b in made.buckets)
    host_sum = max(made.numel_host_sum(b) * b.net_dtype.itemsize for b in made.buckets)
    in_ring, ring = made.placement.shards_gradients, min(made.num_buffers, len(made.buckets))
    acc = total("S" if in_ring else "P", "acc_dtype")
    state = heaviest(made, made.buckets, lambda b: num_states[b.optimizer] * b.acc_dtype.itemsize)
    apart = made.world_size > 1 and (in_ring or made.offload is not None)
    device = {
        "flat_param": total("P", "param_dtype"),
        "master_shard": heaviest(made, cast, lambda b: b.acc_dtype.itemsize) if made.offload is None else 0,
        "acc": 0 if made.offload is not None and made.offload.accumulates_on_host else acc,
        "flat_grad": ring * whole if in_ring else 0,
        "recv": max(map(made.nbytes_recv, made.buckets)),
        "optimizer_state": state if made.offload is None else 0,
    }
    if host_sum:
        device["host_sum"] = NUM_HOST_SUMS * host_sum
    if ragged and apart:  # during an update
        device["whole_grad"] = heaviest(made, ragged, lambda b: b.acc_dtype.itemsize)
    if made.offload is None:
        return device, {}, {}
    sizes = [made.numel_on_host(b) * b.acc_dtype.itemsize for b in made.buckets]
    device["staging"] = made.num_staging * max(sizes)
    casts = max((heaviest(made, [b], lambda b: b.param_dtype.itemsize) for b in cast), default=0)
    host = {
        "master_shard": heaviest(made, made.buckets, lambda b: b.acc_dtype.itemsize),
        "host": sum(sizes),
        "param": made.num_staging * casts,
        "optimizer_state": 0 if made.offload.state_on_disk else state,
    }
    disk = {"optimizer_state": state, "master_shard": total_of(cast)}
    return device, host, disk if made.offload.state_on_disk else {}


def total_of(buckets: Sequence[Bucket]) -> int:
    """Of the masters of these buckets' shards."""
    return sum(b.layout.numel_shard * b.acc_dtype.itemsize for b in buckets)


def heaviest(made: Plan, buckets: Sequence[Bucket], nbytes: Callable[[Bucket], int]) -> int:
    """The largest sum over ``buckets`` that a rank has of what it updates, at ``nbytes`` an element."""
    equal = sum(b.layout.numel_shard * nbytes(b) for b in buckets if b.layout.owners is None)
    return equal + max(_by_rank((b for b in buckets if b.layout.owners is not None), nbytes).values(), default=0)


def _by_rank(buckets: Iterable[Bucket], nbytes: Callable[[Bucket], int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for bucket in buckets:
        for rank, (start, stop) in bucket.layout.runs.items():
            found[rank] = found.get(rank, 0) + (stop - start) * nbytes(bucket)
    return found


def moved(made: Plan, dtype_of: str) -> tuple[int, int]:
    """Bytes that a rank sends of what it has reduced to those that update it, and of what it has updated back to the
    shards: of each the most that one rank sends."""
    whole = [b for b in made.buckets if b.layout.owners is not None]
    if not whole or made.world_size == 1:
        return 0, 0
    owned = _by_rank(whole, lambda b: getattr(b, dtype_of).itemsize)
    kept: dict[int, int] = {}  # a rank's own elements in its own shard
    for bucket in whole:
        for rank, (start, stop) in bucket.layout.runs.items():
            low, high = bucket.layout.shard_range(rank)
            inside = max(0, min(stop, high) - max(start, low)) * getattr(bucket, dtype_of).itemsize
            kept[rank] = kept.get(rank, 0) + inside
    reduced = dict.fromkeys(range(made.world_size), 0)
    for bucket in whole:
        end, shard = max((stop for _, stop in bucket.layout.runs.values()), default=0), bucket.layout.numel_shard
        for rank in range(-(-end // shard)):  # padding behind the last run is nobody's
            reduced[rank] += (min(end, (rank + 1) * shard) - rank * shard) * getattr(bucket, dtype_of).itemsize
    return max(n - kept.get(r, 0) for r, n in reduced.items()), max(owned[rank] - kept[rank] for rank in owned)


def sent(made: Plan, microbatches: int) -> dict[str, int]:
    """Bytes that a rank sends in a step, or others read of it: W - 1 of W parts of each bucket, for each reduction and
    for the gather (with two levels L - 1 of L in the host, and H - 1 of H of that to the other hosts; with R replicas
    R - 1 of R of a shard to these, twice); and what goes to the owners of whole parameters and back."""
    num = microbatches if made.placement.shards_gradients else 1
    others, world_size, hosts = made.world_size - 1, made.world_size, made.topology
    inside, between = hosts.ranks_per_host - 1, hosts.num_hosts - 1
    reduced = sum(b.numel // world_size * others * b.reduce_dtype.itemsize for b in made.buckets)
    if made.has_levels:
        reduced = sum(b.numel // hosts.ranks_per_host * inside * b.reduce_dtype.itemsize for b in made.buckets)
        reduced += sum(b.layout.numel_shard * between * b.net_dtype.itemsize for b in made.buckets)
    reduced += sum(sent_to_replicas(made, b) for b in made.buckets)
    return {
        "gradients": num * reduced + moved(made, "acc_dtype")[0],
        "parameters": sum(b.layout.numel_shard * others * b.param_dtype.itemsize for b in made.buckets)
        + moved(made, "param_dtype")[1],
    }


def sent_to_replicas(made: Plan, bucket: Bucket) -> int:
    """Bytes that a rank sends to its replicas in a reduction: pieces of its shard, and the sum of its own one."""
    wire = bucket.net_dtype if made.reduces_twice else bucket.reduce_dtype
    piece = bucket.layout.numel_shard // made.num_replicas
    return piece * (made.num_replicas - 1) * (wire.itemsize + bucket.acc_dtype.itemsize)


def sent_between_hosts(made: Plan, microbatches: int, ranks_per_host: int) -> dict[str, int]:
    """Bytes that leave a host in a step, of all its ranks; what the owners of whole parameters exchange is not counted.
    Of two levels the least that there is, 2 (H - 1) / H of the model with one backward; of one, L times that."""
    num = microbatches if made.placement.shards_gradients else 1
    others, copies = _pairs_between_hosts(made, ranks_per_host)
    if made.has_levels:
        others = ranks_per_host * (made.topology.num_hosts - 1)
    wires = [b.net_dtype if made.has_levels else b.reduce_dtype for b in made.buckets]
    reduced = others * sum(b.layout.numel_shard * wire.itemsize for b, wire in zip(made.buckets, wires, strict=True))
    if copies:
        reduced += copies * sum(sent_to_replicas(made, b) for b in made.buckets) // (made.num_replicas - 1)
    gathered = sum(b.layout.numel_shard * b.param_dtype.itemsize for b in made.buckets)
    return {"gradients": num * reduced, "parameters": others * gathered}


def _pairs_between_hosts(made: Plan, ranks_per_host: int) -> tuple[int, int]:
    """Pairs of a rank of one host and a rank elsewhere that messages go between: with shards of one whole, and with the
    same shard; of the host that has most. Rank r has shard r % W of replica r // W."""
    found = []
    for first in range(0, made.num_ranks, ranks_per_host):
        here = range(first, first + ranks_per_host)
        shards, replicas = Counter(r // made.world_size for r in here), Counter(r % made.world_size for r in here)
        whole = sum(n * (made.world_size - n) for n in shards.values())
        found.append((whole, sum(n * (made.num_replicas - n) for n in replicas.values())))
    return max(found)


def copied(made: Plan, microbatches: int) -> dict[str, int]:
    """Bytes over the bus in a step, by direction; what the owners of whole parameters exchange is not counted."""
    if made.offload is None:
        return {"to host": 0, "to device": 0}
    up = heaviest(made, made.buckets, lambda b: b.param_dtype.itemsize)
    shard = sum(b.layout.numel_shard * b.acc_dtype.itemsize for b in made.buckets)
    if not made.offload.accumulates_on_host:
        return {"to host": shard, "to device": up}
    visit = sum(made.numel_on_host(b) * b.acc_dtype.itemsize for b in made.buckets)
    reduced_alone = 0 if made.placement.shards_gradients or made.world_size == 1 else visit - shard
    return {"to host": microbatches * visit - reduced_alone, "to device": (microbatches - 1) * visit + up}
