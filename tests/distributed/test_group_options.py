"""Options that an optimizer's class sets in its groups, against the same loop in one process; and what a step returns
or draws by itself."""

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

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CASE = CASES["mlp"]


class Warms(Optimizer):
    """Counts the updates of each group that has a gradient, and warms up by that count. Reads whole parameters."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.count(group)
                for p in params:
                    p.sub_(group["lr"] * min(1.0, float(group["step"]) / 8) * self.update_of(p.grad))

    def count(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update_of(self, grad: Tensor) -> Tensor:
        return grad / (1 + grad.norm())


class CountsInTensor(Warms):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["step"] = torch.zeros(())

    def count(self, group: dict[str, Any]) -> None:
        group["step"] += 1


class FailsOnEmpty(Warms):
    """zc hides from it the groups of which a rank owns nothing."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.stack([p.sum() for p in group["params"]])
        super().step()


@zc.elementwise
class WarmsEach(Warms):
    def update_of(self, grad: Tensor) -> Tensor:
        return grad


CLASSES = {cls.__name__: cls for cls in (Warms, CountsInTensor, FailsOnEmpty, WarmsEach)}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others, "lr": 0.05}]


def _counts(optimizer: Any) -> list[float]:
    return [float(group["step"]) for group in optimizer["param_groups"]]


def _resumed(rank: int, world_size: int, stage: int, name: str) -> dict[str, Any]:
    """Trains, hands rank 0's state to a second model, and goes on there. The first parameter sits out two updates."""
    twin = CASE.model()
    plain: Any = CLASSES[name](_groups(twin))
    counts, state = [], None
    for run in range(2):
        model = CASE.model()
        model, optimizer = zc.compile(
            model, CLASSES[name](_groups(model)), stage=stage, backend="eager", bucket_nbytes=4096
        )
        if state is not None:
            zc.load_state_dict(model, optimizer, state)
        for step in range(3 * run, 3 * run + 3):
            CASE.loss(model, CASE.batch(rank, step, 0)).backward()
            for r in range(world_size):
                (CASE.loss(twin, CASE.batch(r, step, 0)) / world_size).backward()
            for each, net in ((optimizer, model), (plain, twin)):
                if step in (1, 2):
                    next(net.parameters()).grad = None
                each.step()
                each.zero_grad()
        counts.append([_counts(vars(each)) for each in (optimizer, plain)])
        state = {"model": zc.full_state_dict(model), "optimizer": zc.full_optimizer_state(model, optimizer)}
        shared = [state]
        torch.distributed.broadcast_object_list(shared, src=0)
        state = shared[0]
        counts.append([_counts(state["optimizer"]), _counts(vars(plain))])
        with zc.whole_parameters(model):
            error = worst(weights(model), weights(twin))
    return {"error": error, "counts": counts}


def test_ranks_agree_on_options_that_a_class_sets() -> None:
    cases = [(2, "Warms"), (3, "CountsInTensor"), (1, "FailsOnEmpty"), (2, "FailsOnEmpty"), (2, "WarmsEach")]
    for case, ranks in run_cases(_resumed, 2, cases):
        for seen in ranks:
            assert seen["error"][0] < 2e-5, (case, seen)
            assert all(own == wanted for own, wanted in seen["counts"]), (case, seen)


class KeepsNorm(Warms):
    """Notes in its group what this rank's gradients are like, and returns it."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
            group["norm"] = float(torch.stack(norms).norm()) if norms else 0.0
        return sum(group["norm"] for group in self.param_groups)


class Answers(KeepsNorm):
    """Returns it where the loop asks."""

    def step(self, closure: Any = None, *, returns_norm: bool = False) -> Any:
        norm = super().step(closure)
        for group in self.param_groups:
            del group["norm"]
        return norm if returns_norm else None


class Langevin(Warms):
    def update_of(self, grad: Tensor) -> Tensor:
        return grad + 0.01 * torch.randn_like(grad)


def _says(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    for cls in (KeepsNorm, Langevin, Warms, Answers):
        model = CASE.model()
        before = torch.get_rng_state()
        model, optimizer = zc.compile(model, cls(model.parameters()), backend="eager")
        assert torch.equal(before, torch.get_rng_state())
        CASE.loss(model, CASE.batch(rank, 0, 0)).backward()
        optimizer.step(**({"returns_norm": True} if cls is Answers else {}))
        seen.append((str(zc.explain(model)), optimizer.param_groups[0].get("norm")))
    return seen


def test_a_step_that_draws_or_returns_its_own_is_named() -> None:
    ((_, ranks),) = run_cases(_says, 2, [()])
    norms = [norm for (_, norm), *_ in ranks]
    assert norms[0] == norms[1] and norms[0] > 0
    for (kept, _), (drawn, _), (plain, _), (answers, _) in ranks:
        assert "Answers.step(...) returned a value to a call with arguments, which zc has not tried" in answers
        assert "KeepsNorm.step() returns a number that it makes of gradients or weights" in kept
        assert "KeepsNorm sets 'norm' of parameter group 0 to something else on each rank" in kept
        assert "Langevin draws random numbers in its step" in drawn
        notes = ("returns a number", "returned a value", "draws random", "to something else")
        assert not any(text in plain for text in notes)
