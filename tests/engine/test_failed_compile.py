"""A zc.compile that fails, at whatever point, leaves the caller's model and optimizer as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zc
from zc import guards, torch_private
from zc.checkpoint import plain_state
from zc.engine.buffers import Buffers
from zc.engine.runtime import Runtime
from zc.offload.host_step import HostStep
from zc.optim.model import ShardedModel
from zc.optim.optimizer import ShardedOptimizer
from zc.weights.overlapped import OverlappedWeights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.scale


def make() -> tuple[Net, list[torch.optim.Optimizer]]:
    """Adagrad has state from the start; the caller has hooks of their own."""
    torch.manual_seed(0)
    model = Net()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adagrad([model.first.weight, model.first.bias], lr=0.1),
        torch.optim.AdamW([*model.norm.parameters(), *model.second.parameters()], lr=0.1),
    ]
    return model, optimizers


def after_two_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    for k in range(2):
        model(torch.linspace(-1, 1, 12).view(3, 4) + k).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


WANTED = after_two_steps(*make())


class Broken(Exception):
    """Of a library, a device or the network."""


def on_call(number: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Broken
        return plain(*args, **kwargs)

    return call


PLACES = [
    (torch_private, "serve_optimizer_states", 1, {}),
    (torch_private, "compiled_call", 1, {"backend": "aot_eager"}),
    (Runtime, "__init__", 1, {}),
    (zc.api, "broadcast_rest", 1, {}),
    (Buffers, "add", 1, {}),
    (Buffers, "add", 3, {}),
    (Buffers, "add_staging", 1, {}),
    (ShardedModel, "__init__", 1, {}),
    (ShardedOptimizer, "adopt", 2, {}),
    (ShardedOptimizer, "start", 2, {}),
    (HostStep, "__init__", 2, {"offload": "cpu"}),
    (Runtime, "install_hooks", 1, {}),
    (plain_state, "install_marks", 1, {}),
    (OverlappedWeights, "install_hooks", 1, {"overlap_gather": True}),
    (guards, "install", 1, {"overlap_gather": True, "backend": "aot_eager"}),
]


@pytest.mark.parametrize(("owner", "name", "number", "options"), PLACES, ids=lambda v: getattr(v, "__name__", None))
def test_what_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, options: dict[str, Any]
) -> None:
    options = {"backend": "eager", "bucket_nbytes": 60, **options}
    model, optimizers = make()
    steps: list[int] = []
    handle = optimizers[1].register_step_pre_hook(lambda *_: steps.append(1))
    before = copy.deepcopy(model.state_dict())
    groups = [[list(map(id, group["params"])) for group in each.param_groups] for each in optimizers]
    attributes = [set(vars(each)) for each in (*model.modules(), *optimizers)]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, on_call(number, getattr(owner, name)))
        with pytest.raises(Broken):
            zc.compile(model, optimizers, **options)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) and value.untyped_storage().nbytes() == value.nbytes, key
    assert groups == [[list(map(id, group["params"])) for group in each.param_groups] for each in optimizers]
    assert attributes == [set(vars(each)) for each in (*model.modules(), *optimizers)]
    # plain PyTorch trains a copy of it, and zc itself
    twin, twins = make()
    twin.load_state_dict(model.state_dict())
    assert_same(after_two_steps(twin, twins))
    zc.compile(model, optimizers, **options)
    assert_same(after_two_steps(model, optimizers))
    assert steps == [1, 1]
    handle.remove()
    optimizers[1].step()
    assert steps == [1, 1], "the caller's handle still removes the caller's hook"


def assert_same(values: dict[str, torch.Tensor]) -> None:
    for key, value in values.items():
        torch.testing.assert_close(value, WANTED[key], rtol=1e-6, atol=1e-7, msg=key)


def test_a_plain_step_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same objects train on without zc, in the dtypes that they had."""
    model, optimizers = make()
    with monkeypatch.context() as patch:
        patch.setattr(guards, "install", on_call(1, guards.install))
        with pytest.raises(Broken):
            zc.compile(model, optimizers, backend="eager", bucket_nbytes=60)
    assert_same(after_two_steps(model, optimizers))

    model, optimizers = make()
    with monkeypatch.context() as patch:
        patch.setattr(guards, "install", on_call(1, guards.install))
        with pytest.raises(Broken):
            zc.compile(model, optimizers, backend="eager", bucket_nbytes=60, param_dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert torch.equal(model.first.weight, make()[0].first.weight.bfloat16().float()), "rounded, as documented"


def test_a_renamed_function_of_dcp_is_met_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import state_dict

    model, optimizers = make()
    pointers = [param.data_ptr() for param in model.parameters()]
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.delattr(state_dict, "_get_optim_state_dict")
            with pytest.raises(AttributeError, match="_get_optim_state_dict"):
                zc.compile(model, optimizers, backend="eager")
        assert pointers == [param.data_ptr() for param in model.parameters()]
    zc.compile(model, optimizers, backend="eager")
