"""`optimizer.step(closure)`: called once, gradients on, before they are finished; its loss comes back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from models import CASES
from oracle import weights, worst
from torch import Tensor, nn
from training_runs import DIFFERS_MOST, adamw, message_of

import zc


class Counting(torch.optim.Optimizer):
    """Calls its closure as often as it is told."""

    def __init__(self, params: Any, times: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.times, self.seen = times, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        for _ in range(self.times):
            loss = closure()
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                param.sub_(group["lr"] * param.grad)
        self.seen += 1
        return loss


def _third_party(rank: int, world_size: int, times: int) -> dict[str, Any]:
    case = CASES["mlp"]
    model = case.model()
    model, optimizer = zc.compile(model, Counting(model.parameters(), times), backend="eager")
    before, state = weights(model), torch.get_rng_state()

    def closure() -> Tensor:
        loss = case.loss(model, case.batch(rank, 0, 0))
        loss.backward()
        return loss

    raised = message_of(lambda: optimizer.step(closure))
    return {
        "raised": raised,
        "same": all(torch.equal(before[n], w) for n, w in weights(model).items()),
        "grads": [p.grad is not None for p in model.parameters()],
        "seen": optimizer.seen,  # type: ignore[attr-defined]
        "random": torch.equal(state, torch.get_rng_state()),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_calls_its_closure_once_is_taken() -> None:
    """A second evaluation would see weights of this rank alone, and gradients that nobody has reduced."""
    for times, ranks in run_cases(_third_party, 2, (0, 1, 2)):
        for seen in ranks:
            assert seen["random"]
            if times == 1:
                assert seen["raised"] == ("", "") and not seen["same"] and seen["seen"] == 1
                continue
            assert seen["raised"][0] == "PlanError" and f"calls it {times} times" in seen["raised"][1]
            assert seen["same"] and not any(seen["grads"]), "nothing was called"


class Extrapolating(Counting):
    """Evaluates its closure elsewhere, from its seventh step on, as schedulefree's RAdamScheduleFreeClosure does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for param in self.param_groups[0]["params"] if self.seen >= 6 else ():
            param.add_(0.1)
        return super().step(closure)


def test_what_moves_weights_before_its_closure_is_refused() -> None:
    """zc calls the closure first. It did so with the weights of before, and updated by other gradients, in silence."""
    case = CASES["mlp"]
    model, optimizer = zc.compile(model := case.model(), Extrapolating(model.parameters(), 1), backend="eager")
    before = weights(model)
    kind, text = message_of(lambda: optimizer.step(lambda: pytest.fail("it was called")))
    assert kind == "PlanError" and "Extrapolating.step was given a closure, and moves the weights before" in text
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())
    zc.close(model)


def _raises(rank: int, world_size: int) -> dict[str, Any]:
    """A closure that raises leaves everything as it was, and the loop goes on."""
    case = CASES["mlp"]
    model = case.model()
    model, optimizer = zc.compile(model, adamw(model), backend="eager")
    before = weights(model)

    def closure() -> Tensor:
        raise ValueError("no data")

    raised = message_of(lambda: optimizer.step(closure))
    same = all(torch.equal(before[n], w) for n, w in weights(model).items())
    case.loss(model, case.batch(rank, 0, 0)).backward()
    optimizer.step()
    return {"raised": raised, "same": same, "moved": not torch.equal(before["0.weight"], weights(model)["0.weight"])}


def test_a_closure_that_raises_changes_nothing() -> None:
    for seen in run_ranks(_raises, 2):
        assert seen["raised"] == ("ValueError", "no data") and seen["same"] and seen["moved"]


class Child(torch.optim.SGD):
    """Its step goes on behind its parent's, which torch has wrapped as well where there is an SGD."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in (p for p in group["params"] if p.grad is not None):
                    param.sub_(0.05 * param.grad)
        return loss


def _nested(rank: int, world_size: int, stage: int, by_closure: bool) -> tuple[DIFFERS_MOST, int]:
    case = CASES["mlp"]
    model, twin = case.model(), case.model().double()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.15)
    model, optimizer = zc.compile(model, Child(model.parameters(), lr=0.1), stage=stage, backend="eager")
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            loss = case.loss(model, case.batch(rank, step, 0))
            loss.backward()
            return loss

        if step == 1:  # a step that raised leaves no trace
            message_of(lambda: optimizer.step(lambda: 1 / 0))
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        optimizer.zero_grad()
        for r in range(world_size):
            batch = tuple(t.double() for t in case.batch(r, step, 0))
            (case.loss(twin, batch) / world_size).backward()
        plain.step()
        plain.zero_grad()
    return worst(weights(model), weights(twin)), zc.registry.sharded(model).runtime.ledger.num_steps


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_inside_a_step_is_one_update() -> None:
    for case, ranks in run_cases(_nested, 2, itertools.product((1, 2), (True, False))):
        for error, num_steps in ranks:
            assert error[0] < 2e-6 and num_steps == 3, (case, error)
