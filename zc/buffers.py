"""The tensors behind a plan, all allocated here, once.

Bytes that a rank holds persistently, by element of P (docs/design.md has the table by stage)::

    flat_param    P * param_dtype    the parameters' own storage, whole on every rank
    master_shard  S * acc_dtype      only where param_dtype is narrower than acc_dtype
    acc           S (stage 2) or P (stage 1) * acc_dtype
    ring          num_buffers flat_grad and one recv, in reduce_dtype, sized for the largest bucket
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.plan import Bucket, Plan


def fp32_shard(plan: Plan, bucket: Bucket) -> int:
    """Elements of the accumulator of one bucket: P where gradients stay partial, S where they are sharded."""
    return bucket.layout.numel_shard if plan.placement.gradient_in_ring else bucket.numel


class Buffers:
    """flat_param, master_shard, accumulators and ring of one rank.

    Lifetimes: everything here lives as long as the plan. A ring buffer holds one bucket's gradient from its
    flatten_cast until its accumulate; the schedule's events keep the next user away until then. ``flat_param[b]`` never
    moves: every parameter is a view of it.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.flat_param: list[Tensor] = []
        self.master_shard: list[Tensor] = []
        self.acc: list[Tensor] = []
        for bucket in plan.buckets:
            start, stop = bucket.layout.shard_range(rank)
            self.flat_param.append(torch.zeros(bucket.numel, dtype=bucket.param_dtype, device=bucket.device))
            self.master_shard.append(
                torch.zeros(stop - start, dtype=bucket.acc_dtype, device=bucket.device)
                if bucket.has_master
                else self.flat_param[-1][start:stop]
            )
            self.acc.append(torch.zeros(fp32_shard(plan, bucket), dtype=bucket.acc_dtype, device=bucket.device))
        self._flat_grad, self._recv = self._make_ring()

    def _make_ring(self) -> tuple[list[Tensor], list[Tensor]]:
        plan = self.plan
        if not plan.buckets:
            return [], []
        whole = max(b.numel * b.reduce_dtype.itemsize for b in plan.buckets)
        shard = max(b.layout.numel_shard * b.reduce_dtype.itemsize for b in plan.buckets)
        recv = 0 if plan.world_size == 1 else whole if plan.reduce == "exact" else shard
        sizes = (whole if plan.placement.gradient_in_ring else 0, recv)
        device = plan.buckets[0].device
        num = min(plan.num_buffers, len(plan.buckets))
        flat_grad, received = (
            [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)] if nbytes else []
            for nbytes, count in zip(sizes, (num, 1), strict=True)
        )
        return flat_grad, received

    def acc_shard(self, bucket: Bucket) -> Tensor:
        """[S]: this rank's part of the accumulator, the reduced gradient once the bucket is reduced."""
        acc = self.acc[bucket.index]
        if self.plan.placement.gradient_in_ring:
            return acc
        start, stop = bucket.layout.shard_range(self.rank)
        return acc[start:stop]

    def named(self, name: str, bucket: Bucket) -> Tensor:
        """The tensor behind a buffer of the schedule: ``flat_grad[i]`` [P], ``recv[i]`` [P] or [S], ``acc[b]``."""
        kind, index = name[:-1].split("[")
        if kind == "acc":
            return self.acc[int(index)]
        if kind == "flat_grad":
            return self._view(self._flat_grad[int(index)], bucket, bucket.numel)
        if kind == "recv":
            numel = bucket.numel if self.plan.reduce == "exact" else bucket.layout.numel_shard
            return self._view(self._recv[int(index)], bucket, numel)
        raise AssertionError(f"no buffer is named {name}")

    @staticmethod
    def _view(raw: Tensor, bucket: Bucket, numel: int) -> Tensor:
        return raw[: numel * bucket.reduce_dtype.itemsize].view(bucket.reduce_dtype)

    def nbytes(self) -> dict[str, int]:
        """Persistent bytes on this rank, counted from the tensors themselves, each storage once."""
        masters = [m for b, m in zip(self.plan.buckets, self.master_shard, strict=True) if b.has_master]
        groups = {
            "flat_param": self.flat_param,
            "master_shard": masters,
            "acc": self.acc,
            "flat_grad": self._flat_grad,
            "recv": self._recv,
        }
        return {name: sum(t.untyped_storage().nbytes() for t in tensors) for name, tensors in groups.items()}
