"""`zc.elementwise`: a declared class gets equal shards, a wrong declaration is caught before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import weights
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer, lr_scheduler
from training_runs import message_of

import zc
from zc.optim.assignment import note_of, rule_of, try_out
from zc.planning.layout import Rule

CPU = torch.device("cpu")


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                self.update(param, param.grad, self.state[param], group)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param))
        param.sub_(group["lr"] * mean.lerp(grad, 0.1).sign())
        mean.lerp_(grad, 0.01)


@zc.elementwise
class Declared(Lion):
    pass


@zc.elementwise(block=64)
class Blocks(Lion):
    """64 elements share a scale, the largest magnitude of their mean: what 8-bit states do."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(grad, 0.1)
        flat = mean.view(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
        scale = padded.abs().amax(dim=1, keepdim=True) / 127 + 1e-12
        flat.copy_(((padded / scale).round() * scale).view(-1)[: flat.numel()])
        param.sub_(group["lr"] * 10 * mean)


@zc.elementwise
class NoBlocks(Blocks):
    """The same without saying so."""


@zc.elementwise
class Trust(Lion):
    """LAMB's ratio of norms (arXiv:1904.00962): right on whole parameters only."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad * (param.norm() / (grad.norm() + 1e-6)))


@zc.elementwise
class Noisy(Lion):
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (grad + torch.randn_like(grad)))


class OwnNoise(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.drawn = torch.Generator().manual_seed(0)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (grad + torch.randn(grad.shape, generator=self.drawn)))


@zc.elementwise
class DeclaredNoise(OwnNoise):
    pass


@zc.elementwise
class OnlyState(Lion):
    """Its first update is elementwise, and its state would make the next one wrong."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("mean", torch.zeros_like(param)).add_(grad / grad.norm())
        param.sub_(group["lr"] * grad)


@zc.elementwise
class Flagged(Lion):
    """One of its groups reads matrices (a MuonWithAuxAdam)."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group.get("matrix"):
            grad = grad / grad.norm()
        param.sub_(group["lr"] * grad)


@zc.elementwise
class OwnMuon(Muon):
    pass


@zc.elementwise
class Wrapper(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = AdamW(self.param_groups, lr=1e-3)


def layer() -> nn.Linear:
    return nn.Linear(16, 16)


def flagged(params: Any) -> Optimizer:
    weight, bias = params
    return Flagged([{"params": [bias]}, {"params": [weight], "matrix": True}])


LIES = {
    "trust": (Trust, "the new weights"),
    "blocks": (NoBlocks, "differ from those of its slices"),
    "state": (OnlyState, "the state 'mean'"),
    "noise": (Noisy, "draws random numbers"),
    "own noise": (DeclaredNoise, "a generator of its own, its attribute drawn: a slice's update"),
    "one group": (flagged, "parameter group 1 is not elementwise"),
    "Muon": (lambda params: OwnMuon([p for p in params if p.dim() == 2]), "refuses elements"),
    "a wrapper": (Wrapper, "its attribute inner holds another optimizer"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_caught_and_nothing_changes(lie: str) -> None:
    """Equal shards of such an optimizer would train with other numbers, and nobody would see it."""
    make, text = LIES[lie]
    model = layer()
    if lie == "Muon":
        model = nn.Linear(16, 16, bias=False)
    optimizer = make(model.parameters())
    before, random = weights(model), torch.get_rng_state()
    kind, message = message_of(lambda: zc.compile(model, optimizer, backend="eager"))
    assert kind == "PlanError" and text in message and type(optimizer).__name__ in message, message
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())
    assert torch.equal(random, torch.get_rng_state()) and not optimizer.state


def test_a_generator_of_its_own_is_the_reason_that_an_undeclared_one_is_told() -> None:
    """It was told of a norm over all parameters, and to clip in the loop."""
    with pytest.raises(zc.PlanError, match="OwnNoise draws random numbers from a generator of its own"):
        try_out(OwnNoise(layer().parameters()), 2, CPU)


@pytest.mark.parametrize("make", [Declared, Blocks])
def test_a_true_declaration_passes(make: type[Optimizer]) -> None:
    optimizer = make(layer().parameters())
    try_out(optimizer, 2, CPU)
    assert rule_of(optimizer) == Rule(block=64 if make is Blocks else 1)


def test_a_rate_of_zero_hides_nothing() -> None:
    """A warmup that was made before zc.compile has set the rate to 0 by then: an update that changes nothing is
    elementwise."""
    optimizer = Trust(layer().parameters())
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    with pytest.raises(zc.PlanError, match="not elementwise"):
        try_out(optimizer, 2, CPU)


def test_a_subclass_needs_its_own_declaration() -> None:
    class Child(Declared):
        pass

    assert rule_of(Child(layer().parameters())) == Rule(whole=True)
    assert rule_of(AdamW(layer().parameters())) == Rule() == rule_of(Declared(layer().parameters()))
    optimizers = [make(layer().parameters()) for make in (Child, AdamW, Declared)]
    assert [note_of(optimizer) is None for optimizer in optimizers] == [False, True, True]


@pytest.mark.parametrize("given", [AdamW, 3, nn.Linear, Muon])
def test_what_can_be_declared(given: Any) -> None:
    if given is AdamW:
        assert zc.elementwise(AdamW) is AdamW
        return
    with pytest.raises(TypeError, match=r"takes a class of optimizers|Muon is not elementwise"):
        zc.elementwise(given)
    with pytest.raises(TypeError, match="block must be a whole number"):
        zc.elementwise(block=0)
