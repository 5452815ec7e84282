"""States that other programs have written, and optimizers as they may come: names with a wrapper's prefix, options of
later versions, state under strings, groups whose parameters are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import zc

X = torch.linspace(-1, 1, 12).view(3, 4)


class Wrapping(nn.Module):
    """It has an attribute of the name that wrappers give theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tail(self.module(x).tanh())
        return y


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_a_model_may_have_an_attribute_named_module(prefix: str) -> None:
    plain = Wrapping()
    plain_optimizer = AdamW(plain.parameters(), lr=0.1)
    update(plain, plain_optimizer)
    names = [prefix + name for name, _ in plain.named_parameters()]
    state = plain_optimizer.state_dict()
    by_name = {
        "state": {names[k]: item for k, item in state["state"].items()},
        "param_groups": [{**group, "params": [names[k] for k in group["params"]]} for group in state["param_groups"]],
    }
    model = Wrapping()
    optimizer = AdamW(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    weights = {prefix + name: value for name, value in plain.state_dict().items()}
    zc.load_state_dict(model, optimizer, {"model": weights, "optimizer": by_name})
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        update(one, its)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-7)


def test_options_that_an_old_state_lacks_are_those_that_torch_gives_it() -> None:
    plain = Wrapping()
    first = AdamW(plain.parameters(), lr=0.1)
    update(plain, first)
    old = first.state_dict()
    for group in old["param_groups"]:
        for option in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            group.pop(option, None)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    second = AdamW(plain.parameters(), lr=0.1, maximize=True)
    second.load_state_dict(old)
    model = Wrapping()
    optimizer = AdamW(model.parameters(), lr=0.1, maximize=True)
    zc.compile(model, optimizer, backend="eager")
    zc.load_state_dict(model, optimizer, {"model": weights, "optimizer": old})
    for one, its in ((plain, second), (model, optimizer)):
        update(one, its)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-7)
    assert not optimizer.param_groups[0]["maximize"], "torch's default for a state from before the option"
    old["param_groups"][0].pop("betas")
    with pytest.raises(zc.CheckpointError, match="lacks betas: another optimizer than AdamW"):
        zc.load_state_dict(model, optimizer, {"model": weights, "optimizer": old})


class Counting(SGD):
    """It keeps numbers of its own from its construction on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.state["count"] = 1  # type: ignore[index]
        self.state["all"] = {"steps": 0}  # type: ignore[index]

    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] += 1  # type: ignore[index]
        super().step(closure)


def test_an_optimizer_may_have_state_under_strings_from_its_construction_on() -> None:
    plain, model = Wrapping(), Wrapping()
    plain_optimizer, optimizer = Counting(plain.parameters(), 0.1), Counting(model.parameters(), 0.1)
    zc.compile(model, optimizer, backend="eager")
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        update(one, its)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-7)
    assert optimizer.state["count"] == 1 and optimizer.state["all"] == {"steps": 1}  # type: ignore[index]
    used = AdamW(plain.parameters(), lr=0.1)
    update(plain, used)
    used.state["count"] = 1  # type: ignore[index]
    with pytest.raises(zc.PlanError, match=r"has state for 4 parameters already.*\)$"):
        zc.compile(plain, used, backend="eager")
    masked = AdamW(plain.parameters(), lr=0.1)
    masked.state[plain.tail.weight]["mask"] = torch.ones(2)  # as SPAM's __init__ does
    with pytest.raises(zc.PlanError, match="If a fresh AdamW has its mask already, zc can't train with it"):
        zc.compile(plain, masked, backend="eager")


def test_a_group_of_frozen_parameters_is_saved_and_loaded_before_it_trains(tmp_path: Path) -> None:
    saved = []
    for _ in range(2):
        model = Wrapping()
        model.tail.requires_grad_(False)
        optimizer = AdamW(model.module.parameters(), lr=0.1)
        zc.compile(model, optimizer, backend="eager")
        optimizer.add_param_group({"params": list(model.tail.parameters()), "lr": 0.01})
        saved.append((model, optimizer))
    (model, optimizer), (other, again) = saved
    update(model, optimizer)
    zc.save(tmp_path / "saved", model, optimizer)
    zc.load(tmp_path / "saved", other, again)
    for one, its in saved:
        one.tail.requires_grad_(True)
        zc.recompile(one)
        update(one, its)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.01]
