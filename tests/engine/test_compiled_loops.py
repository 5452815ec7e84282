"""A loop that the caller has compiled: zc's hooks and schedules run in it as they are, and the numbers are right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import FULL
from torch import Tensor, nn

import zc
from zc.engine.runtime import Runtime

Step = Callable[[Tensor], Tensor]
BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: Callable[[Any], Any]) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return compiled(step)


def forward_and_backward(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: Callable[[Any], Any]) -> Step:
    def passes(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    passes = compiled(passes)

    def step(x: Tensor) -> Tensor:
        loss = passes(x)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: Callable[[Any], Any]) -> Step:
    update = compiled(lambda: optimizer.step())

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss

    return step


def trained(loop: Callable[..., Step], stage: int | None = None, backend: str = "") -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if stage is None:
        return run(loop(model, optimizer, lambda function: function), model.state_dict)
    zc.compile(model, optimizer, stage=stage, backend=backend, bucket_nbytes=256)
    step = loop(model, optimizer, lambda function: torch.compile(function, backend="aot_eager"))
    seen = run(step, lambda: zc.full_state_dict(model))
    zc.close(model)
    return seen


def run(step: Step, state: Callable[[], dict[str, Tensor]]) -> list[Tensor]:
    losses = [step(x).detach() for x in BATCHES]
    return losses + list(state().values())


LOOPS = (whole_step, forward_and_backward, step_alone)
EVERY = list(itertools.product(LOOPS, ("eager", "aot_eager"), (2, 3)))
CASES = EVERY if FULL else [EVERY[k] for k in (1, 2, 4, 7, 9, 10)]  # each pair of two of the three


@pytest.mark.parametrize(("loop", "backend", "stage"), CASES)
def test_a_loop_under_the_callers_torch_compile(loop: Callable[..., Step], stage: int, backend: str) -> None:
    torch.compiler.reset()
    for value, wanted in zip(trained(loop, stage, backend), trained(loop), strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("backend", "num_brought"), [("aot_eager", 0), ("eager", 2)])
def test_a_hook_asks_nobody_about_a_gradient_that_a_graph_has(
    backend: str, num_brought: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd calls it for each parameter, so a step of many small ones would be made of these calls."""
    brought, receive = list[tuple[int, int]](), Runtime._post_accumulate_grad

    def counting(runtime: Runtime, bucket: int, slot: int, param: nn.Parameter) -> None:
        brought.append((bucket, slot))
        receive(runtime, bucket, slot, param)

    monkeypatch.setattr(Runtime, "_post_accumulate_grad", counting)
    model = nn.Linear(8, 8)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    model(BATCHES[0]).sum().backward()
    assert len(brought) == num_brought
    assert all(param.grad is not None for param in model.parameters())
