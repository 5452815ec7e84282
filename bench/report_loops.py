"""The loops of the public reports that zc was created from, and what one process in float64 makes of them.

deepspeed#7579 (multi-task losses, ZeRO-2 with offload: buckets that stay empty), deepspeed#7985 (the boundary
microbatch that missed the reduction) and deepspeed#8061 (many producers of one bucket).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WORLD_SIZE, DIM, TASKS = 2, 16, 3
Batch = tuple[Tensor, Tensor]


class MultiTask(nn.Module):
    """A trunk and a head for each task (deepspeed#7579)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.heads = nn.ModuleList(nn.Linear(DIM, 4) for _ in range(TASKS))

    def forward(self, x: Tensor, tasks: tuple[int, ...]) -> Tensor:
        shared = self.trunk(x)
        return torch.stack([self.heads[task](shared) for task in tasks])


class Probe(nn.Sequential):
    """The model of deepspeed#7985's probe."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def task_batch(rank: int, update: int, microbatch: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * update + microbatch)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, 4, generator=generator)


def probe_batch(rank: int, update: int, microbatch: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + rank)  # as the report seeds it
    x = torch.randn(4 * (microbatch + 1), 64, generator=generator)[-4:]
    return x, torch.zeros_like(x)


def task_loss(model: nn.Module, batch: Batch, tasks: tuple[int, ...]) -> Tensor:
    """The sum of the tasks' losses."""
    return (model(batch[0], tasks) - batch[1]).square().mean((1, 2)).sum()


def probe_loss(model: nn.Module, batch: Batch, tasks: tuple[int, ...]) -> Tensor:
    out = model(batch[0])
    return (out.float() if out.dtype is torch.bfloat16 else out).square().mean()


@dataclass(frozen=True)
class Loop:
    """One loop of a report. ``backwards``: the tasks of each backward of an update, whose losses are averaged.
    ``step_each``: DeepSpeed's documented loop calls engine.step() after each backward, the reports' own once."""

    report: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch, tuple[int, ...]], Tensor]
    backwards: tuple[tuple[int, ...], ...]
    stage: int
    offload: bool = False
    overlap: bool = True
    step_each: bool = True
    updates: int = 1
    dtype: torch.dtype = torch.float32
    compiled: bool = False


def _tasks(name: str, backwards: tuple[tuple[int, ...], ...], **options: Any) -> Loop:
    return Loop("deepspeed#7579", name, MultiTask, task_batch, task_loss, backwards, **options)


APART, SUMMED = ((0,), (1,), (2,)), ((0, 1, 2),)
LOOPS = (
    _tasks("a backward a task, ZeRO-2 with offload", APART, stage=2, offload=True),
    _tasks("a backward a task, one step() an iteration, ZeRO-2 with offload", APART, stage=2, offload=True,
           step_each=False, updates=3),
    _tasks("one backward of the summed losses, ZeRO-2 with offload", SUMMED, stage=2, offload=True),
    _tasks("a backward a task, ZeRO-2", APART, stage=2),
    _tasks("a backward a task, ZeRO-1", APART, stage=1),
    _tasks("a backward a task, ZeRO-1, no overlap", APART, stage=1, overlap=False),
    Loop("deepspeed#7985", "4 microbatches, bf16 model, fp32 accumulation, ZeRO-1", Probe, probe_batch, probe_loss,
         ((),) * 4, stage=1, dtype=torch.bfloat16),
    Loop("deepspeed#8061", "compiled, ZeRO-2, overlap_comm, on a CPU", MultiTask, task_batch, task_loss, SUMMED,
         stage=2,
         compiled=True),
)  # fmt: skip


class Outcome(NamedTuple):
    """What a system made of a loop: the weights after it, in fp32, and the gradient's norm at the last update (NaN
    where it says none)."""

    weights: dict[str, Tensor]
    norm: float


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().double().clone() for name, param in model.named_parameters()}


def make_model(loop: Loop) -> nn.Module:
    torch.manual_seed(0)
    return loop.make().to(loop.dtype)


def oracle(loop: Loop) -> Outcome:
    """One process, float64, all ranks' batches: no ranks, buckets or stages."""
    model = make_model(loop).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = 0.0
    for update in range(loop.updates):
        optimizer.zero_grad()
        for every in range(WORLD_SIZE):
            for k, tasks in enumerate(loop.backwards):
                x, y = loop.batch(every, update, k)
                batch = x.to(loop.dtype).double(), y.double()
                (loop.loss(model, batch, tasks) / len(loop.backwards) / WORLD_SIZE).backward()  # type: ignore[no-untyped-call]
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
        optimizer.step()
    return Outcome(weights_of(model), norm)
