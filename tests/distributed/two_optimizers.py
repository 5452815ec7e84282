"""Two optimizers for one model, as people train in 2026: one for the matrices, one for the rest; and its oracle.

`train` is the caller's loop, run unchanged on both sides: with zc on ranks, and in one process on a float64 (or fp32)
copy that sees the batches of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from models import CASES
from oracle import widen
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer, lr_scheduler

import zc

CASE = CASES["gpt_untied"]
EPS = 1e-3  # an element whose gradient is rounding alone must not move by whole steps, in fp32 others than in float64


class WideMuon(Optimizer):
    """Muon with its Newton-Schulz iteration in the parameter's own dtype, written without torch's class. A third
    party's, for zc."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.mul_(group["momentum"]).add_(param.grad)
                x = param.grad + group["momentum"] * buffer
                wide = x.size(0) <= x.size(1)
                x = (x if wide else x.T) / (x.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                param.mul_(1 - group["lr"] * group["decay"]).sub_(group["lr"] * (x if wide else x.T))
        return loss


def is_matrix(name: str, param: Tensor) -> bool:
    return param.dim() == 2 and not name.startswith(("embed", "position", "head"))


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    return [p for n, p in named if is_matrix(n, p)], [p for n, p in named if not is_matrix(n, p)]


def wide_muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = split(model)
    return [WideMuon(matrices, lr=1e-2), AdamW(rest, lr=1e-3, eps=EPS, weight_decay=0.1)]


def torch_muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = split(model)
    return [Muon(matrices, lr=1e-2), AdamW(rest, lr=1e-3, eps=EPS, weight_decay=0.1)]


def two_adamw(model: nn.Module) -> list[Optimizer]:
    matrices, rest = split(model)
    groups = [{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 3e-3}]
    return [AdamW(groups, lr=1e-3, eps=EPS, weight_decay=0.3), AdamW(rest, lr=1e-3, eps=EPS)]


MAKE: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "WideMuon": wide_muon, "Muon": torch_muon, "two AdamW": two_adamw
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """What the caller's loop does. ``every``: each optimizer steps in every k-th update."""

    make: str = "WideMuon"
    updates: int = 4
    microbatches: int = 1
    declared: bool = True
    max_norm: float | None = None
    scheduled: bool = False
    every: Sequence[int] = (1, 1)
    first: int = 0  # number of its first update
    options: dict[str, Any] = field(default_factory=dict)


def schedulers(optimizers: Sequence[Optimizer]) -> list[Any]:
    matrices, rest = optimizers
    return [
        lr_scheduler.LambdaLR(matrices, lambda step: 1 / (step + 1)),
        lr_scheduler.CosineAnnealingLR(rest, T_max=6),
    ]


def train(
    loop: Loop,
    optimizers: Sequence[Optimizer],
    backward: Callable[[int, int], None],
    clip: Callable[[float], Any],
    no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[float]:
    """Runs it; the norms that clipping has seen."""
    moves = schedulers(optimizers) if loop.scheduled else []
    norms = []
    for scheduler in moves:
        for _ in range(loop.first):
            scheduler.last_epoch += 1
    for update in range(loop.first, loop.first + loop.updates):
        for m in range(loop.microbatches):
            inside = loop.declared and m < loop.microbatches - 1
            with no_sync() if inside else contextlib.nullcontext():
                backward(update, m)
        if loop.max_norm is not None:
            norms.append(float(clip(loop.max_norm)))
        for optimizer, every in zip(optimizers, loop.every, strict=True):
            if (update + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        for scheduler in moves:
            scheduler.step()
    return norms


def plain(loop: Loop, model: nn.Module, optimizers: Sequence[Optimizer], world_size: int) -> list[float]:
    """The oracle: one process, no zc, the mean over the batches of ``world_size`` ranks."""
    dtype = next(model.parameters()).dtype

    def backward(update: int, m: int) -> None:
        for rank in range(world_size):
            batch = CASE.batch(rank, update, m)
            (CASE.loss(model, widen(batch) if dtype == torch.float64 else batch) / world_size).backward()

    return train(loop, optimizers, backward, lambda n: torch.nn.utils.clip_grad_norm_(model.parameters(), n))


def on_ranks(loop: Loop, model: nn.Module, optimizers: Any, rank: int, *, own_clip: bool = False) -> list[float]:
    """The same with compiled ``model`` and ``optimizers``."""

    def backward(update: int, m: int) -> None:
        CASE.loss(model, CASE.batch(rank, update, m)).backward()

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        with zc.no_sync(model):
            yield

    def clip(max_norm: float) -> Any:
        if own_clip:
            return zc.clip_grad_norm_(model, max_norm)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    return train(loop, list(optimizers), backward, clip, no_sync)


def reference(loop: Loop, world_size: int, dtype: torch.dtype) -> tuple[nn.Module, list[Optimizer], list[float]]:
    twin = CASE.model().to(dtype)
    optimizers = MAKE[loop.make](twin)
    return twin, optimizers, plain(loop, twin, optimizers, world_size)
