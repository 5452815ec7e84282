"""Optimizer classes whose step changes gradients, against the same loop in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from harness import run_cases
from models import CASES
from oracle import weights, worst
from torch import Tensor, nn
from torch.optim import Optimizer
from training_runs import message_of

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CASE = CASES["mlp"]
WAYS = ("counted", "data", "assigned")


class Decays(Optimizer):
    """Adds a decay of the weights to the gradient itself, and reads whole parameters."""

    def __init__(self, params: Iterable[nn.Parameter], way: str, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": 0.05, "weight_decay": decay})
        self.way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if self.way == "counted":
                    p.grad.add_(p, alpha=group["weight_decay"])
                elif self.way == "data":
                    p.grad.data.add_(p, alpha=group["weight_decay"])
                else:
                    p.grad = p.grad + group["weight_decay"] * p
                p.add_(self.update_of(p.grad), alpha=-group["lr"])

    def update_of(self, grad: Tensor) -> Tensor:
        return grad / (1 + grad.norm())


@zc.elementwise
class DecaysEach(Decays):
    def update_of(self, grad: Tensor) -> Tensor:
        return grad


class Sums(Decays):
    """Gradients add up inside the optimizer, and a step that doesn't update leaves them alone."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            super().step()
            self.zero_grad()


def _pair(stage: int, cls: type[Decays], way: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    model, twin = CASE.model(), CASE.model()
    plain = cls(twin.parameters(), way)
    model, optimizer = zc.compile(
        model, cls(model.parameters(), way), stage=stage, backend="eager", bucket_nbytes=4096, **options
    )
    return model, optimizer, twin, plain


def _backward(model: nn.Module, twin: nn.Module, rank: int, world_size: int, step: int) -> None:
    CASE.loss(model, CASE.batch(rank, step, 0)).backward()
    for r in range(world_size):
        (CASE.loss(twin, CASE.batch(r, step, 0)) / world_size).backward()


def _kept(rank: int, world_size: int, stage: int, name: str, way: str, offload: str | None) -> dict[str, Any]:
    """The loop clears nothing."""
    model, optimizer, twin, plain = _pair(stage, {"each": DecaysEach, "sums": Sums}[name], way, offload=offload)
    norms = []
    for step in range(4):
        _backward(model, twin, rank, world_size, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)  # zc keeps the norm while gradients don't change
        optimizer.step()
        plain.step()
        if name == "each":
            norms.append([float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))
                          for net in (model, twin)])  # fmt: skip
    with zc.whole_parameters(model):
        return {"error": worst(weights(model), weights(twin)), "norms": norms}


def test_gradients_that_a_step_changes_stay_changed() -> None:
    cases: list[tuple[Any, ...]] = [(1 + k % 3, "each", way, None) for k, way in enumerate(WAYS)]
    cases += [(2, "each", "assigned", "cpu"), (2, "sums", "counted", None), (3, "sums", "data", None)]
    for case, ranks in run_cases(_kept, 2, cases):
        for seen in ranks:
            assert seen["error"][0] < 2e-5, (case, seen)
            assert all(own == pytest.approx(wanted, rel=1e-5) for own, wanted in seen["norms"]), (case, seen)


def _of_whole(rank: int, world_size: int, stage: int, way: str) -> dict[str, Any]:
    """The class changes its owner's copy: after a step that nobody cleared, the next one raises."""
    model, optimizer, twin, plain = _pair(stage, Decays, way)
    for step in range(2):
        _backward(model, twin, rank, world_size, step)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    _backward(model, twin, rank, world_size, 2)
    optimizer.step()
    plain.step()
    next(p for p in model.parameters() if p.grad is not None).grad.norm()
    with zc.whole_parameters(model):
        error, before = worst(weights(model), weights(twin)), weights(model)
    _backward(model, twin, rank, world_size, 3)
    raised = message_of(optimizer.step)
    with zc.whole_parameters(model):
        moved = worst(weights(model), before)
    for each in (optimizer, plain):
        each.zero_grad(set_to_none=stage != 2)
    _backward(model, twin, rank, world_size, 4)
    optimizer.step()
    plain.step()
    with zc.whole_parameters(model):
        after = worst(weights(model), weights(twin))
    return {"error": error, "raised": raised, "moved": moved, "after": after, "explain": str(zc.explain(model))}


def test_a_second_step_on_changed_gradients_of_whole_parameters_is_refused() -> None:
    for case, ranks in run_cases(_of_whole, 2, [(1 + k % 3, way) for k, way in enumerate(WAYS)]):
        for seen in ranks:
            kind, text = seen["raised"]
            assert seen["error"][0] < 2e-5 and seen["after"][0] < 2e-5 and seen["moved"][0] == 0, (case, seen)
            assert kind == "ZcError" and "Decays has changed the gradient of" in text and "zero_grad()" in text, case
            assert "Decays changes gradients in place in its step" in seen["explain"], case


def _later(rank: int, world_size: int) -> tuple[str, str]:
    """A decay that a schedule begins after zc.compile has tried the class."""
    model = CASE.model()
    model, optimizer = zc.compile(model, Decays(model.parameters(), "data", 0.0), backend="eager")
    CASE.loss(model, CASE.batch(rank, 0, 0)).backward()
    optimizer.step()
    CASE.loss(model, CASE.batch(rank, 1, 0)).backward()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.step()
    return message_of(optimizer.step)


def test_a_decay_that_begins_later_is_noticed() -> None:
    for _, ranks in run_cases(_later, 2, [()]):
        assert all(kind == "ZcError" for kind, _ in ranks), ranks
