"""Optimizers that keep parameters beside their groups: refused, with the attribute by which they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zc

PLACES: dict[str, Callable[[Any], Iterable[nn.Parameter]]] = {
    "self.params": lambda own: own.params,
    "self.first": lambda own: own.first["params"],
    "self.names": lambda own: own.names,
    'group["mine"]': lambda own: own.param_groups[0]["mine"],
}


class Keeps(Optimizer):
    """SGD of the parameters that it keeps in one ``place``."""

    def __init__(self, params: Any, place: str, *, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.1})
        self.place, self.decay, group = place, decay, self.param_groups[0]
        if place == "self.params":
            self.params = group["params"]
        elif place == "self.first":
            self.first = group
        elif place == "self.names":
            self.names = {param: str(k) for k, param in enumerate(group["params"])}
        else:
            group["mine"] = list(group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in PLACES[self.place](self):
            if param.grad is not None:
                if self.decay:
                    param.mul_(1 - self.decay)
                param.sub_(param.grad, alpha=0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_that_keeps_parameters_is_refused_with_the_place(place: str, stage: int, decay: float) -> None:
    """The error said that zc.compile was not given it; in stage 3 a list in a group ended the process."""
    model = nn.Linear(4, 3)
    optimizer = Keeps(model.parameters(), place, decay=decay)
    zc.compile(model, optimizer, stage=stage, backend="eager")
    model(torch.ones(2, 4)).square().sum().backward()
    with pytest.raises(zc.ZcError) as raised:
        optimizer.step()
    assert "Keeps.step() met" in str(raised.value) and f"it takes parameters from {place}, where" in str(raised.value)
    zc.close(model)


class Walks(Optimizer):
    """Finds its parameters through modules that it keeps, as K-FAC's do, and updates by its groups."""

    def __init__(self, model: nn.Module, change: Callable[[nn.Parameter], object]) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.layers, self.change = [model], change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for layer in self.layers:
            self.change(layer.weight)  # type: ignore[arg-type]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.1)


CHANGES: dict[str, tuple[Callable[[Any], object], dict[str, Any]]] = {
    "a gradient in place": (lambda p: p.grad.mul_(2.0), {}),
    "a gradient assigned": (lambda p: setattr(p, "grad", p.grad * 2.0), {}),
    "a gradient made zeros": (lambda p: p.grad.zero_(), {}),
    "a weight, masters in host memory": (lambda p: p.data.mul_(0.9), {"offload": "cpu"}),
    "a weight, bf16": (lambda p: p.mul_(0.9), {"param_dtype": torch.bfloat16}),
    "a weight, in shards": (lambda p: p.mul_(0.9), {"stage": 3}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_step_changes_through_modules_is_not_lost_in_silence(what: str) -> None:
    """The class updates slices, by gradients of slices: what it wrote through the model was overwritten."""
    change, options = CHANGES[what]
    model = nn.Linear(4, 3)
    optimizer = Walks(model, change)
    zc.compile(model, optimizer, backend="eager", **options)
    model(torch.ones(2, 4, dtype=model.weight.dtype)).square().sum().backward()
    with pytest.raises(zc.ZcError, match=r"Walks\.step\(\).*it takes parameters from self\.layers"):
        optimizer.step()
    zc.close(model)


class Wraps(Optimizer):
    """Its groups are those of the optimizer inside, as pytorch_optimizer's Lookahead has them."""

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = defaults = property(lambda self: self.optimizer.state)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for param in self.param_groups[0]["params"]:
            param.mul_(0.5)


def test_a_wrapper_that_reads_parameters_without_bytes_is_named() -> None:
    """A KeyError, or the text that zc.compile was not given it."""
    model = nn.Linear(4, 3)
    optimizer = Wraps(torch.optim.SGD(model.parameters(), lr=0.1))
    zc.compile(model, optimizer, stage=3, backend="eager")
    model(torch.ones(2, 4)).square().sum().backward()
    with pytest.raises(zc.ZcError, match=r"Wraps.step\(\) met a parameter of shape .* it wraps SGD, and works on them"):
        optimizer.step()
    zc.close(model)
