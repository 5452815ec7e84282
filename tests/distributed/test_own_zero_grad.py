"""Optimizers that decide themselves when gradients are cleared, against the same loop in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from models import CASES
from oracle import weights, worst
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from training_runs import message_of

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CASE = CASES["mlp"]
STAGES = (1, 2, 3)
Params = Iterable[nn.Parameter]


class Skips(SGD):
    """Each fourth call of step updates, and each fourth zero_grad clears."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        return super().step(closure) if self.num_steps % 4 == 0 else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.num_steps % 4 == 0:
            super().zero_grad(set_to_none)


class SetsRate(SGD):
    """Its zero_grad sets the learning rate, and takes another argument."""

    num_calls = 0

    def zero_grad(self, set_to_none: bool = True, *, decay: float = 1.5) -> None:
        self.num_calls += 1
        for group in self.param_groups:
            group["lr"] /= decay
        super().zero_grad(set_to_none)


class ByHand(SGD):
    """Its zero_grad clears every second time, one parameter after the other."""

    num_calls, to_none = 0, True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_calls += 1
        for param in (p for group in self.param_groups for p in group["params"] if self.num_calls % 2 == 0):
            if self.to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


class ZeroesByHand(ByHand):
    to_none = False


def patched(params: Params, cls: type[SGD] = SGD) -> Optimizer:
    """Clears every fourth time, by a function on the object."""
    optimizer = cls(params, lr=0.1)
    of_torch, calls = optimizer.zero_grad, list[bool]()

    def zero_grad(set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        if len(calls) % 4 == 0:
            of_torch(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


OVERRIDES: dict[str, Callable[[Params], Optimizer]] = {
    **{cls.__name__: lambda params, cls=cls: cls(params, lr=0.1) for cls in (Skips, SetsRate, ByHand, ZeroesByHand)},
    "patched": patched,
}


def _against_one_process(
    rank: int, world_size: int, stage: int, make: Callable[[Params], Optimizer], clears: bool
) -> dict[str, Any]:
    """``clears``: the loop calls zero_grad."""
    model, twin = CASE.model(), CASE.model()
    plain = make(twin.parameters())
    model, optimizer = zc.compile(model, make(model.parameters()), stage=stage, backend="eager", bucket_nbytes=4096)
    shown = []
    for step in range(8):
        CASE.loss(model, CASE.batch(rank, step, 0)).backward()
        for r in range(world_size):
            (CASE.loss(twin, CASE.batch(r, step, 0)) / world_size).backward()
        for each in (optimizer, plain):
            each.step()
            if isinstance(each, Shrinks) and step % 2:
                each.shrink()
            if clears:
                each.zero_grad()
        has_grad, wanted = ([p.grad is not None for p in each.parameters()] for each in (model, twin))
        shown.append(has_grad == wanted)
    with zc.whole_parameters(model):
        error = worst(weights(model), weights(twin))
    rates = [[group["lr"] for group in each.param_groups] for each in (optimizer, plain)]
    return {"error": error, "shown": shown, "rates": rates[0] == rates[1]}


def _overridden(rank: int, world_size: int, stage: int, name: str) -> dict[str, Any]:
    return _against_one_process(rank, world_size, stage, OVERRIDES[name], clears=True)


def test_a_zero_grad_of_the_class_or_the_object_is_called() -> None:
    cases = [(stage, "Skips") for stage in STAGES] + [(1 + k % 3, name) for k, name in enumerate(OVERRIDES) if k]
    for case, ranks in run_cases(_overridden, 2, cases):
        for seen in ranks:
            assert seen["error"][0] < 2e-5 and all(seen["shown"]) and seen["rates"], (case, seen)


class UpdatesSometimes(SGD):
    """Gradients add up inside the optimizer: each ``every``-th step updates and clears."""

    every, num_steps = 2, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            super().step(closure)
            self.clear_all()

    def clear_all(self) -> None:
        self.zero_grad()


class EachFourth(UpdatesSometimes):
    every = 4


class ZeroesEachFourth(EachFourth):
    def clear_all(self) -> None:
        self.zero_grad(set_to_none=False)


class BiasesByHand(UpdatesSometimes):
    """Sets some gradients to None; the others go on adding up."""

    def clear_all(self) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.dim() == 1):
            param.grad = None


class ZeroesByHandSometimes(UpdatesSometimes):
    def clear_all(self) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            _zero(param.grad)


def _zero(grad: Any) -> None:
    grad.detach().zero_()


class OnlyHere(UpdatesSometimes):
    """One rank alone clears, by a condition of its own."""

    def clear_all(self) -> None:
        if torch.distributed.get_rank() == 0:
            self.zero_grad()


class Shrinks(SGD):
    """Clears in another method of the class, which changes weights."""

    def shrink(self) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            param.data.mul_(0.9)
        self.zero_grad()


CLASSES = (UpdatesSometimes, EachFourth, ZeroesEachFourth, BiasesByHand, ZeroesByHandSometimes, Shrinks)
STEPS: dict[str, Callable[[Params], Optimizer]] = {
    **{cls.__name__: lambda params, cls=cls: cls(params, lr=0.05) for cls in CLASSES},
    "patched": lambda params: patched(params, UpdatesSometimes),
}


def _in_step(rank: int, world_size: int, stage: int, name: str) -> dict[str, Any]:
    return _against_one_process(rank, world_size, stage, STEPS[name], clears=False)


def test_what_a_step_clears_is_cleared_and_nothing_else() -> None:
    cases = [(stage, "UpdatesSometimes") for stage in STAGES] + [(1 + k % 3, name) for k, name in enumerate(STEPS) if k]
    for case, ranks in run_cases(_in_step, 3, cases):
        for seen in ranks:
            assert seen["error"][0] < 2e-5 and all(seen["shown"]), (case, seen)


def _on_one_rank(rank: int, world_size: int) -> tuple[str, str]:
    model = CASE.model()
    model, optimizer = zc.compile(model, OnlyHere(model.parameters(), lr=0.05), backend="eager")
    CASE.loss(model, CASE.batch(rank, 0, 0)).backward()
    optimizer.step()
    return message_of(optimizer.step)


def test_ranks_that_clear_differently_are_refused() -> None:
    for kind, text in run_ranks(_on_one_rank, 2):
        assert kind == "ZcError" and "OnlyHere has set the gradient of" in text and "on others" in text


def _leaves_a_group(rank: int, world_size: int, stage: int, set_to_none: bool, of_model: bool) -> dict[str, Any]:
    """A parameter leaves its group for two updates. Nobody clears its gradient there but the model's zero_grad."""
    model, twin = CASE.model(), CASE.model()
    plain = AdamW(twin.parameters(), lr=1e-2)
    model, optimizer = zc.compile(
        model, AdamW(model.parameters(), lr=1e-2), stage=stage, backend="eager", bucket_nbytes=4096
    )
    for step in range(6):
        CASE.loss(model, CASE.batch(rank, step, 0)).backward()
        for r in range(world_size):
            (CASE.loss(twin, CASE.batch(r, step, 0)) / world_size).backward()
        for each, net in ((optimizer, model), (plain, twin)):
            params = list(net.parameters())
            each.step()
            if step == 1:  # between the step and zero_grad: the first one already leaves it
                each.param_groups[0]["params"] = [p for p in params if p is not params[0]]
            if of_model:
                net.zero_grad(set_to_none)
            else:
                each.zero_grad(set_to_none)
            if step == 3:
                each.param_groups[0]["params"].append(params[0])
    with zc.whole_parameters(model):
        return {"error": worst(weights(model), weights(twin))}


def test_zero_grad_keeps_the_gradient_of_what_has_left_its_groups() -> None:
    cases = [(1, True, False), (2, True, False), (2, False, False), (3, True, False), (2, True, True)]
    for case, ranks in run_cases(_leaves_a_group, 2, cases):
        for seen in ranks:
            assert seen["error"][0] < 2e-5, (case, seen)
