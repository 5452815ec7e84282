"""Item 11: several optimizers for one model, and optimizers that read whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import Stack
from rows import STEPS, Loop, Row, Script, add, plain, row
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from two_optimizers import WideMuon

import zc


def stack() -> nn.Module:
    return Stack(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 16))


def _split(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    both = list(params)
    return [p for p in both if p.dim() == 2], [p for p in both if p.dim() != 2]


def pair(params: Iterable[Any]) -> list[Optimizer]:
    """A Muon with its iteration in the parameters' dtype, and AdamW."""
    matrices, rest = _split(params)
    return [WideMuon(matrices, lr=1e-2), AdamW(rest, lr=1e-3, eps=1e-4, weight_decay=0.1)]


def adamws(params: Iterable[Any]) -> list[Optimizer]:
    matrices, rest = _split(params)
    return [AdamW(matrices, lr=1e-3, eps=1e-4), AdamW(rest, lr=3e-3, eps=1e-4)]


def _row(name: str) -> Callable[[Loop], Loop]:
    return row(11, name, make=stack, optimizer=pair)


def _plain(name: str, optimizer: Callable[[Iterable[Any]], Any] = pair, **options: Any) -> None:
    """In the full tier: test_several_optimizers.py and test_whole_parameters.py train with the same."""
    add(Row(name, 11, plain, make=stack, optimizer=optimizer, options=options, full_only=True))


_plain("Muon-like in fp32, and AdamW: a list")
_plain("two AdamW", adamws)
_plain("two optimizers, overlap_gather", overlap_gather=True)
_plain("two optimizers, offload", offload="cpu")
_plain("two optimizers, native reduction", reduce="native")


def _every(first: int, second: int) -> Callable[[Script], None]:
    def loop(s: Script) -> None:
        for step in range(6):
            s.loss(step).backward()
            for optimizer, every in zip(s.optimizer, (first, second), strict=True):
                if (step + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    return loop


add(Row("the first steps in every third update", 11, _every(3, 1), make=stack, optimizer=pair))


@_row("model.zero_grad and zeros, two optimizers")
def by_model(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        for optimizer in s.optimizer:
            optimizer.step()
        if step % 2:
            s.model.zero_grad()
        else:
            for optimizer in s.optimizer:
                optimizer.zero_grad(set_to_none=False)


@_row("step(closure) of the first, step() of the second")
def closure(s: Script) -> None:
    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            loss = s.loss(step)
            loss.backward()
            s.reduced()
            return loss

        s.note(f"loss {step}", s.optimizer[0].step(evaluate))
        s.optimizer[1].step()
        for optimizer in s.optimizer:
            optimizer.zero_grad()


@_row("hooks around the steps of both")
def hooks(s: Script) -> None:
    calls: list[int] = []
    for k, optimizer in enumerate(s.optimizer):
        optimizer.register_step_post_hook(lambda *_, k=k: calls.append(k))
    plain(s)
    s.note("calls", torch.tensor(calls))


@_row("zc.recompile, the new parameters in either optimizer")
def recompiled(s: Script) -> None:
    for step in range(STEPS):
        if step == 2:
            s.model.add_module("more", nn.Linear(16, 16).to(s.dtype))
            with torch.no_grad():
                nn.init.constant_(s.model.more.bias, 0.1)
                s.model.more.weight.copy_(torch.eye(16))
            s.optimizer[0].add_param_group({"params": [s.model.more.weight]})
            s.optimizer[1].add_param_group({"params": [s.model.more.bias]})
            if s.is_zc:
                zc.recompile(s.model)
        s.loss(step).backward()
        s.update()


class Mixed(WideMuon):
    """Groups of two kinds in one optimizer (a MuonWithAuxAdam)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                if group["matrix"]:
                    x = param.grad / (param.grad.norm() + 1e-7)
                    param.sub_(0.05 * (1.5 * x - 0.5 * x @ x.T @ x))
                else:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                    param.sub_(0.05 * mean)


def mixed(params: Iterable[Any]) -> Optimizer:
    matrices, rest = _split(params)
    return Mixed([{"params": matrices, "matrix": True}, {"params": rest, "matrix": False}])


_plain("one optimizer with groups of two kinds", mixed)
