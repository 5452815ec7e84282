"""The buffers through which gradients go to other ranks. They exist while there are gradients, and are sized for the
largest bucket."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zc.planning.plan import NUM_HOST_SUMS, Plan


class Ring:
    """flat_grad, scratch and host_sum of one rank, as bytes. A list stays the same object while its tensors come and
    go."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.flat_grad: Final[list[Tensor]] = []
        self.scratch: Final[list[Tensor]] = []
        self.host_sum: Final[list[Tensor]] = []
        self.tensors: Final = self.flat_grad, self.scratch, self.host_sum
        self.exists = False

    @property
    def num_flat_grads(self) -> int:
        return min(self.plan.num_buffers, len(self.plan.buckets))

    def nbytes(self) -> tuple[int, int, int]:
        """Bytes of one flat_grad, of scratch, and of one host_sum; 0 if there is none."""
        plan = self.plan
        if not plan.buckets:
            return 0, 0, 0
        whole = max(b.numel * b.reduce_dtype.itemsize for b in plan.buckets)
        host_sum = max(plan.numel_host_sum(b) * b.net_dtype.itemsize for b in plan.buckets)
        scratch = max(map(plan.nbytes_scratch, plan.buckets))
        return whole if plan.placement.shards_gradients else 0, scratch, host_sum

    def allocate(self) -> None:
        """Allocates them; their values are undefined."""
        device, counts = self.plan.buckets[0].device, (self.num_flat_grads, 1, NUM_HOST_SUMS)
        for tensors, n, count in zip(self.tensors, self.nbytes(), counts, strict=True):
            tensors[:] = [empty(n, torch.uint8, device) for _ in range(count)] if n else []
        self.exists = True

    def free(self) -> None:
        for tensors in self.tensors:
            tensors.clear()
        self.exists = False

    def grow(self, plan: Plan) -> None:
        """Replaces the plan. Nothing may use the buffers meanwhile."""
        self.plan = plan
        self.free()


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All memory with undefined values comes from here: tests fill it with NaN."""
    return torch.empty(numel, dtype=dtype, device=device)


def view(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of ``raw``, which are bytes."""
    return raw[: numel * dtype.itemsize].view(dtype)
