"""The buffers through which gradients go to other ranks. They exist while there are gradients, and are sized for the
largest bucket."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zc.planning.allocations import Lifetime, shared
from zc.planning.plan import Plan


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

    def allocate(self) -> None:
        """Allocates them; their values are undefined."""
        tensors = {"flat_grad": self.flat_grad, "scratch": self.scratch, "host_sum": self.host_sum}
        device = self.plan.buckets[0].device
        for room in shared(self.plan, None):
            if room.lifetime is Lifetime.GRADIENTS:
                tensors[room.kind][:] = [empty(room.nbytes, torch.uint8, device) for _ in range(room.num)]
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
