"""Bytes of a plan, by kind: what a rank holds, sends and copies."""

from __future__ import annotations

from collections.abc import Sequence

from zc.planning.plan import Bucket, Plan

# fp32 tensors of the parameter's size that torch's optimizers keep; another one is taken as Adam
STATES = {"Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2,
          "ASGD": 1, "Rprop": 2, "SGD": 0, "Muon": 1}  # fmt: skip


def held(made: Plan, num_states: Sequence[int]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Persistent bytes (on the device, on the host, on a disk) of a rank, by kind: `zc.engine.buffers.Buffers`, without
    making any. State is counted with the shard's padding, of which it has none. ``num_states``: of each optimizer, the
    tensors of a parameter's size that it keeps."""

    def total(numel_of: str, dtype_of: str, buckets: tuple[Bucket, ...] = made.buckets) -> int:
        sizes = {"P": [b.numel for b in buckets], "S": [b.layout.numel_shard for b in buckets]}[numel_of]
        return sum(n * getattr(b, dtype_of).itemsize for n, b in zip(sizes, buckets, strict=True))

    cast = tuple(b for b in made.buckets if b.has_master)
    whole = max(b.numel * b.reduce_dtype.itemsize for b in made.buckets)
    shard = max(b.layout.numel_shard * b.reduce_dtype.itemsize for b in made.buckets)
    in_ring, ring = made.placement.gradient_in_ring, min(made.num_buffers, len(made.buckets))
    acc = total("S" if in_ring else "P", "acc_dtype")
    state = sum(count * total("S", "acc_dtype", made.of_optimizer(k)) for k, count in enumerate(num_states))
    device = {
        "flat_param": total("P", "param_dtype"),
        "master_shard": total("S", "acc_dtype", cast) if made.offload is None else 0,
        "acc": 0 if made.offload is not None and made.offload.accumulates_on_host else acc,
        "flat_grad": ring * whole if in_ring else 0,
        "recv": 0 if made.world_size == 1 else whole if made.reduce == "exact" else shard,
        "optimizer_state": state if made.offload is None else 0,
    }
    if made.offload is None:
        return device, {}, {}
    sizes = [made.numel_on_host(b) * b.acc_dtype.itemsize for b in made.buckets]
    device["staging"] = made.num_staging * max(sizes)
    casts = max((b.layout.numel_shard * b.param_dtype.itemsize for b in cast), default=0)
    host = {
        "master_shard": total("S", "acc_dtype"),
        "host": sum(sizes),
        "param": made.num_staging * casts,
        "optimizer_state": 0 if made.offload.state_on_disk else state,
    }
    disk = {"optimizer_state": state, "master_shard": total("S", "acc_dtype", cast)}
    return device, host, disk if made.offload.state_on_disk else {}


def sent(made: Plan, microbatches: int) -> dict[str, int]:
    """Bytes that a rank sends in a step: W - 1 of W parts of each bucket, for each reduction and for the gather."""
    num = microbatches if made.placement.reduces_every_backward else 1
    others, world_size = made.world_size - 1, made.world_size
    reduced = sum(b.numel // world_size * others * b.reduce_dtype.itemsize for b in made.buckets)
    return {
        "gradients": num * reduced,
        "parameters": sum(b.layout.numel_shard * others * b.param_dtype.itemsize for b in made.buckets),
    }


def copied(made: Plan, microbatches: int) -> dict[str, int]:
    """Bytes over the bus in a step, by direction."""
    if made.offload is None:
        return {"to host": 0, "to device": 0}
    up = sum(b.layout.numel_shard * b.param_dtype.itemsize for b in made.buckets)
    shard = sum(b.layout.numel_shard * b.acc_dtype.itemsize for b in made.buckets)
    if not made.offload.accumulates_on_host:
        return {"to host": shard, "to device": up}
    visit = sum(made.numel_on_host(b) * b.acc_dtype.itemsize for b in made.buckets)
    reduced_alone = 0 if made.placement.gradient_in_ring or made.world_size == 1 else visit - shard
    return {"to host": microbatches * visit - reduced_alone, "to device": (microbatches - 1) * visit + up}
