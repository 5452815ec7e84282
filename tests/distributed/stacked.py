"""A third party's optimizer that stacks each group: one momentum per group, under its first parameter (nanochat's
MuonAdamW keeps it so), one compiled kernel, and gradients that it reduces between ranks itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Stacked(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            params = group["params"]
            grads = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(grads))
            second = state.setdefault("second", torch.zeros(*grads.shape[:-1], 1))
            self.update(momentum, second, grads, group["momentum"])
            for param, row, scale in zip(params, momentum, second, strict=True):
                param.sub_(group["lr"] * row / (scale.sqrt() + 1e-2))

    def update(self, momentum: Tensor, second: Tensor, grads: Tensor, factor: float) -> None:
        momentum.mul_(factor).add_(grads)
        second.mul_(factor).add_(grads.square().mean(-1, keepdim=True))


class Reducing(Stacked):
    """With several ranks it reduces the gradients in its own step, and has no variant for a single process."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if dist.is_initialized() and dist.get_world_size() > 1:
            for param in (param for group in self.param_groups for param in group["params"]):
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        super().step()


def squares() -> nn.Module:
    """Four matrices of one shape, and one of another, which one rank alone can own."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)] + [nn.Linear(16, 8, bias=False)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """By shape, as such an optimizer needs them."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.shape == shape]} for shape in sorted({p.shape for p in params})]


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The same on every rank."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def train(model: nn.Module, optimizer: Optimizer, first: int, stop: int) -> list[float]:
    losses = []
    for step in range(first, stop):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
