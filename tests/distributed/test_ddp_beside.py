"""DistributedDataParallel around a part of a compiled model, or around what holds one, and the optimizer that shards
states beside it: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training_runs import message_of

import zc


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _part_before(compiled: Callable[[nn.Module], nn.Module]) -> Callable[[Tensor], Tensor]:
    model = _model()
    model[0] = DistributedDataParallel(model[0])
    return compiled(model)


def _part_after(compiled: Callable[[nn.Module], nn.Module]) -> Callable[[Tensor], Tensor]:
    model = compiled(_model())
    part = DistributedDataParallel(model[0])  # type: ignore[index]
    return lambda x: model[2](model[1](part(x)))  # type: ignore[index, no-any-return]


def _whole_before(compiled: Callable[[nn.Module], nn.Module]) -> Callable[[Tensor], Tensor]:
    net = DistributedDataParallel(_model())
    compiled(net.module)
    return net


def _around(compiled: Callable[[nn.Module], nn.Module]) -> Callable[[Tensor], Tensor]:
    return DistributedDataParallel(nn.Sequential(compiled(_model()), nn.Linear(2, 2)))


WAYS = (_part_before, _part_after, _whole_before, _around)


def _train(rank: int, world_size: int, backend: str, stage: int) -> list[str]:
    """Job: what is raised, by way."""
    said, optimizers = list[str](), list[torch.optim.Optimizer]()
    for make in WAYS:
        torch._dynamo.reset()

        def compiled(model: nn.Module) -> nn.Module:
            optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
            return zc.compile(model, optimizers[-1], backend=backend, stage=stage)[0]

        def loop(make: Any = make, compiled: Any = compiled) -> None:
            net = make(compiled)  # lives on: it is DDP's reducer that writes
            net(torch.ones(2, 4) + rank).square().mean().backward()

        said.append(": ".join(message_of(loop)))
    return said


@pytest.mark.parametrize(("backend", "stage"), [("eager", 2), ("aot_eager", 1)])
def test_ddp_beside_a_compiled_model_is_refused(backend: str, stage: int) -> None:
    """DDP's finalizer wrote the mean of nothing into finished gradients: these parameters did not train, in silence."""
    for before, *others in run_ranks(_train, 2, backend, stage):
        assert before.startswith("PlanError: 0 is a DistributedDataParallel") and before.endswith(" 0.module"), before
        for said in others:
            assert "Is the model inside a DistributedDataParallel? Leave that out" in said, said


def _zero_redundancy(rank: int, world_size: int) -> dict[str, Any]:
    """Job: what is raised, of the optimizer and of a list with it, and that nothing has changed."""
    model = _model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    places = [param.data_ptr() for param in model.parameters()]
    given = (optimizer, [optimizer])
    said = [message_of(lambda each=each: zc.compile(model, each, backend="eager")) for each in given]
    is_same = places == [param.data_ptr() for param in model.parameters()]
    model, adam = zc.compile(model, torch.optim.Adam(model.parameters(), lr=0.1), backend="eager")
    model(torch.ones(2, 4)).square().mean().backward()
    adam.step()
    return {"said": said, "is_same": is_same}


def test_a_zero_redundancy_optimizer_is_refused_before_anything_changes() -> None:
    """Its step was refused, once the buckets were filled."""
    for seen in run_ranks(_zero_redundancy, 2):
        assert seen["is_same"]
        for kind, text in seen["said"]:
            assert kind == "PlanError" and "ZeroRedundancyOptimizer shards the states" in text, text
            assert "Adam(model.parameters(), ...)" in text
