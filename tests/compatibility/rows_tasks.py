"""Item 1: several tasks an iteration, a shared trunk and a head each (deepspeed#7579)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from models import Heads
from rows import STEPS, Script, row
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

ALL = (0, 1, 2)
ORDERS = [(0, 1, 2), (2, 0), (1,), (1, 2, 0, 1), (0,)]  # a task twice, tasks missing


def task_losses(s: Script, step: int, tasks: tuple[int, ...]) -> list[Tensor]:
    x, y = s.batch(step)
    return [F.mse_loss(out, y[:, :4]) for out in s.model(x, tasks)]


@row(1, "one backward of the summed losses", make=Heads)
def one_backward_of_the_sum(s: Script) -> None:
    for step in range(STEPS):
        sum(task_losses(s, step, ALL)).backward()  # type: ignore[union-attr]
        s.update()


@row(1, "a forward for each task, one backward of the sum", make=Heads)
def forwards_then_one_backward(s: Script) -> None:
    for step in range(STEPS):
        sum(task_losses(s, step, (task,))[0] for task in ALL).backward()  # type: ignore[union-attr]
        s.update()


@row(1, "tasks in varying order and number, a backward each", make=Heads)
def varying_backwards(s: Script) -> None:
    for step, tasks in enumerate(ORDERS):
        for task in tasks:
            task_losses(s, step, (task,))[0].backward()
        s.update()


@row(1, "tasks in varying order and number, one backward", make=Heads)
def varying_sum(s: Script) -> None:
    for step, tasks in enumerate(ORDERS):
        sum(task_losses(s, step, tasks)).backward()  # type: ignore[union-attr]
        s.update()


class DictOfLosses(Heads):
    """Returns its losses by name."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {f"task{k}": F.mse_loss(out, y[:, :4]) for k, out in enumerate(super().forward(x, ALL))}


@row(1, "a dict of losses, a backward each", make=DictOfLosses)
def dict_of_losses_apart(s: Script) -> None:
    for step in range(STEPS):
        losses = s.model(*s.batch(step))
        for k, loss in enumerate(losses.values()):
            loss.backward(retain_graph=k < 2)
        s.update()


@row(1, "a task a microbatch, declared with no_sync", make=Heads)
def declared_microbatches(s: Script) -> None:
    for step in range(STEPS):
        for task in ALL:
            with s.no_sync() if task < 2 else contextlib.nullcontext():
                task_losses(s, step, (task,))[0].backward()
        s.update()


@row(1, "trunk and heads called apart, outside the model's forward", make=Heads)
def called_apart(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        shared = s.model.trunk(x)
        for task in ALL:
            F.mse_loss(s.model.heads[task](shared), y[:, :4]).backward(retain_graph=task < 2)
        s.update()


APART = {"bucket_nbytes": 64}  # a bucket a parameter: what ranks reduce then differs


@row(1, "one rank has no task at all in some iterations", make=Heads, options=APART)
def no_task_at_all(s: Script) -> None:
    for step in range(STEPS):
        if s.rank == 0 or step % 2:
            task_losses(s, step, (step % 3,))[0].backward()
        s.update()


class WeightedTasks(Heads):
    """Losses weighted by learned scalars (Kendall, arXiv:1705.07115): 0-d parameters outside the trunk and heads."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in ALL)


@row(1, "losses weighted by learned scalars in the loop", make=WeightedTasks)
def weighted(s: Script) -> None:
    for step in range(STEPS):
        losses = task_losses(s, step, ALL)
        sum(loss * (-w).exp() + w for loss, w in zip(losses, s.model.scales, strict=True)).backward()
        s.update()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.used(x), self.unused(x)


def momentum(params: Iterable[Any]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


@row(
    1, "an output that the loss leaves out, no weight decay", make=TwoOutputs, optimizer=momentum,
    note="its parameters get zeros under torch.compile, plain too, where eager has None: weight decay moves them",
)  # fmt: skip
def unused_output(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(s.model(x)[0], y).backward()
        s.update()
