"""Item 6: param.grad as a sharded gradient, read, clipped and assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Heads
from rows import STEPS, Row, Script, add, row
from torch import nn


@row(6, "stock clip_grad_norm_, the infinity norm, after two backwards", tolerance=2e-5)
def clip_inf(s: Script) -> None:
    for step in range(3):
        for m in range(2):
            s.loss(step, m).backward()
        s.reduced()
        s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.01, norm_type=float("inf")))
        s.update()


@row(6, "the norm of each param.grad, and scaling it", tolerance=2e-5)
def norms(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        for name, param in s.model.named_parameters():
            s.note(f"{name} {step}", param.grad.norm())
            s.note(f"{name} {step} 1", torch.linalg.vector_norm(param.grad, 1))
            param.grad.mul_(0.5)
        s.model[0].weight.grad.div_(2.0)
        s.update()


@row(6, "clipping where a rank's tasks differ from step to step", make=Heads)
def clip_heads(s: Script) -> None:
    for step in range(3):
        x, y = s.batch(step)
        for out in s.model(x, (step % 3,)):
            (out - y[:, :4]).square().mean().backward()
        s.reduced()
        s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.05))
        s.update()


@row(6, "param.grad.full_tensor()")
def full(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        for name, param in s.model.named_parameters():
            s.note(f"{name} {step}", s.grad(param))
        s.update()


@row(6, "norms of one backward, within 1e-6 of plain PyTorch's", tolerance=1e-6)
def exact_norms(s: Script) -> None:
    s.loss(0).backward()
    s.reduced()
    for name, param in s.model.named_parameters():
        s.note(f"{name}", param.grad.norm())
    s.note("all", torch.nn.utils.clip_grad_norm_(s.model.parameters(), float("inf")))


@row(6, "get_total_norm and clip_grads_with_norm_")
def total_norm(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        norm = torch.nn.utils.get_total_norm([p.grad for p in s.model.parameters()], norm_type=1.0)
        torch.nn.utils.clip_grads_with_norm_(s.model.parameters(), 0.5, norm)
        s.note(f"norm {step}", norm)
        s.update()


USES: dict[str, Callable[[Script, nn.Parameter], Any]] = {
    "NumPy": lambda s, p: p.grad.numpy(),
    "one row": lambda s, p: p.grad[0],
    "a product of matrices": lambda s, p: p.grad @ torch.ones_like(p.grad).t(),
    "all_reduce": lambda s, p: torch.distributed.all_reduce(p.grad),
}


def _use(use: Callable[[Script, nn.Parameter], Any]) -> Callable[[Script], None]:
    def loop(s: Script) -> None:
        s.loss(0).backward()
        use(s, s.model[0].weight)

    return loop


for _name, _call in USES.items():
    add(Row(f"param.grad: {_name}", 6, _use(_call), refused={"always": "ZcError: sharded over ranks"}))


@row(6, "param.grad assigned by hand", refused={"always": "UncoveredGradientError: param.grad by hand"})
def assigned(s: Script) -> None:
    s.loss(0).backward()
    s.model[0].weight.grad = torch.zeros_like(s.model[0].weight)
    s.optimizer.step()


@row(6, "clipping the optimizer's parameters")
def clip_groups(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        params = [p for group in s.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 0.01)
        s.update()
