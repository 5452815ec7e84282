"""The memory of a model that is dropped is not given away while a stream may be using it, and the collector, which
drops it, issues nothing. tests/simulated_device has loops and models on any streams."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clocks import Event, Gpu, Stream, recorded
from harness import run_ranks
from torch import nn

import zc


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with recorded() as (memory, _):
        yield memory


def compiled(stage: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The last layer's bucket is never full: it is written when a backward ends."""
    torch.manual_seed(0)
    model: nn.Module = nn.ModuleDict({str(k): nn.Linear(8, 8) for k in range(3)})
    model.register_parameter("unused", nn.Parameter(torch.zeros(8)))
    model.forward = lambda x: model["2"](torch.tanh(model["1"](torch.tanh(model["0"](x)))))  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters())
    return zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=400, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()


def _dropped(rank: int, world_size: int, stage: int, overlap_gather: bool) -> list[str]:
    """Job: a loop of two ranks, and a model that is dropped where reductions, or gathers, are under way."""
    with recorded() as (gpu, _):
        model, optimizer = compiled(stage, overlap_gather=overlap_gather)
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        assert len(gpu.streams) > 1, "reductions have a stream of their own"
        if not overlap_gather:
            backward(model)
        with pytest.MonkeyPatch.context() as collecting:  # in any thread, perhaps while a graph is captured
            for kind, name in ((Stream, "wait_stream"), (Stream, "wait_event"), (Event, "record")):
                collecting.setattr(kind, name, lambda *_, name=name: gpu.errors.append(f"the collector calls {name}"))
            dropped = weakref.ref(zc.registry.sharded(model).runtime)
            del model, optimizer
            for _ in range(2):  # the first frees the model, which is in a cycle: only then zc lets go of the rest
                gc.collect()
            assert dropped() is None, "the collector has taken it"
        gpu.sweep()
        return gpu.errors


@pytest.mark.parametrize("overlap_gather", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_and_a_model_that_is_dropped(stage: int, overlap_gather: bool) -> None:
    assert run_ranks(_dropped, 2, stage, overlap_gather) == [[], []]


def test_the_recorder_sees_memory_that_is_given_away(gpu: Gpu) -> None:
    """The control: used on another stream, ordered or not, told or not."""
    side = Stream(gpu, "side")
    for told, ordered in itertools.product((False, True), repeat=2):
        tensor = torch.ones(4)
        side.wait_stream(gpu.home)
        with gpu.on(side):
            tensor.add_(1)
        if told:
            tensor.record_stream(side)  # type: ignore[arg-type]
        if ordered:
            gpu.home.wait_stream(side)
        del tensor
        gpu.sweep()
        assert bool(gpu.errors) == (not told and not ordered)
        gpu.errors.clear()
