"""Models of one process share nothing: not what Dynamo has learnt of sizes, not its limits, and not their lives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiers import full_cases
from torch import nn

import zc


class Net(nn.Module):
    """``apart``: Dynamo compiles forward itself, whose code all models of the class share, after a graph break."""

    def __init__(self, width: int = 4, apart: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.apart = nn.Linear(width, 4), nn.Linear(4, 2), apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.apart:
            torch._dynamo.graph_break()
        return self.second(x)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def trained(model: nn.Module, num: int, width: int = 4, **options: object) -> torch.optim.Optimizer:
    """One update of ``model`` on a batch of ``num``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="aot_eager", **options)
    model(torch.randn(num, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def num_schedules(model: nn.Module) -> int:
    return sum(title.startswith("schedule backward") for title in zc.explain(model).sections)


def test_the_second_models_sizes_are_no_dynamic_sizes_of_the_first() -> None:
    """DCGAN: with one code object for all models, the sizes of the second were symbols, and Inductor failed on them."""
    models = [Net(4), Net(5)]
    optimizers = [trained(model, num, width) for model, num, width in zip(models, (3, 6), (4, 5), strict=True)]
    for model in models:
        (program,) = zc.registry.sharded(model).runtime.programs
        values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
        assert not any(isinstance(value, torch.SymInt) for value in values)
        assert all(isinstance(size, int) for value in values for size in value.shape)
    del optimizers


@pytest.mark.parametrize("apart", [False, True], ids=["one graph", "a graph break"])
@full_cases("one graph")
def test_many_models_are_all_compiled(apart: bool) -> None:
    """The compiled forward has its own limit for each model; where they share code, each raises the common one."""
    models = []
    for _ in range(10):  # Dynamo's own limit is 8
        model = Net(apart=apart)
        models.append((model, trained(model, 3)))
        assert num_schedules(model) == 1 + apart


def test_a_backward_without_its_model_and_optimizer_says_so() -> None:
    """Either keeps alive what the backward needs."""
    model = Net()
    optimizer = trained(model, 3)
    streams = zc.registry.sharded(model).runtime.streams
    losses = [model(torch.ones(3, 4)).sum() for _ in range(2)]
    del model
    gc.collect()
    losses[0].backward()
    streams.synchronize()  # a task that is still running holds what it works on
    del optimizer
    gc.collect()
    with pytest.raises(zc.ZcError, match="keep the model or its optimizer until the last backward"):
        losses[1].backward()


@pytest.mark.parametrize("overlap_gather", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["one graph", "a graph break"])
def test_a_dropped_model_goes_with_its_graphs(apart: bool, overlap_gather: bool) -> None:
    """Dynamo keeps graphs by code object, out of the collector's sight: what they owned stayed for good."""
    model = Net(apart=apart)
    optimizer = trained(model, 3, overlap_gather=overlap_gather)
    runtime = zc.registry.sharded(model).runtime
    left = {
        "model": weakref.ref(model),
        "a parameter": weakref.ref(model.first.weight),
        "optimizer": weakref.ref(optimizer),
        "runtime": weakref.ref(runtime),
        "buffers": weakref.ref(runtime.buffers),
        "a schedule": weakref.ref(runtime.programs[0]),
    }
    del model, optimizer, runtime
    for _ in range(2):  # the first frees the graphs, which let go of the rest
        gc.collect()
    assert [name for name, reference in left.items() if reference() is not None] == []
