"""A gradient's memory is not given away while a stream may be using it, on whatever streams the steps of a loop are."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clocks import Event, Gpu, Stream, recorded
from harness import run_ranks
from torch import nn

import zc
from zc import torch_private


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


@pytest.mark.parametrize("stage", [1, 2])
def test_backward_step_and_zero_grad_on_any_streams(stage: int, gpu: Gpu) -> None:
    """The loop orders its forward behind its update, as it must in plain PyTorch too, and nothing else."""
    model, optimizer = compiled(stage)
    side, third = Stream(gpu, "side"), Stream(gpu, "third")
    for streams in itertools.product((gpu.home, side, third), repeat=3):
        with gpu.on(streams[0]):
            backward(model)
        with gpu.on(streams[1]):
            streams[1].wait_stream(streams[0])
            zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
        with gpu.on(streams[2]):
            optimizer.zero_grad()
        gc.collect()
        gpu.sweep()
        assert not gpu.errors, (streams, gpu.errors)
        streams[0].wait_stream(streams[1])
        for stream in gpu.streams:
            stream.wait_stream(streams[0])


@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_that_ends_on_another_stream_than_its_gradients(
    stage: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's hooks run on the stream of the forward, its final callback on the one that ``backward()`` was called
    on: a bucket that is not full is written there."""
    model, optimizer = compiled(stage)
    side, plain = Stream(gpu, "side"), torch_private.queue_callback

    def queue_callback(callback: Callable[[], None]) -> None:
        def end() -> None:
            gpu.home.wait_stream(side)
            with gpu.on(gpu.home):
                callback()

        plain(end)

    monkeypatch.setattr(torch_private, "queue_callback", queue_callback)
    for _ in range(2):
        with gpu.on(side):
            backward(model)
        gpu.sweep()
        optimizer.step()
        optimizer.zero_grad()
        side.wait_stream(gpu.home)
    assert not gpu.errors, gpu.errors


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


class Branches(nn.ModuleList):
    """Two layers on two streams; all of their weights are in one bucket."""

    def forward(self, x: torch.Tensor, gpu: Gpu, side: Stream, both: bool) -> torch.Tensor:
        side.wait_stream(gpu.home)
        with gpu.on(side):
            one: torch.Tensor = self[0](x)
        other = self[1](x) if both else 0.0
        gpu.home.wait_stream(side)
        one.record_stream(gpu.home)  # type: ignore[arg-type]
        return one + other


def _read_on_two_streams(gpu: Gpu, how: str) -> weakref.ref[object]:
    model = Branches(nn.Linear(8, 8) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, backend="eager")
    with torch.set_grad_enabled(how != "without gradients"):
        out = model(torch.ones(2, 8), gpu, Stream(gpu, "side"), how != "penalty")
    if how == "penalty":
        (out.sum() + sum(p.square().sum() for p in model[1].parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weakref.ref(zc.registry.sharded(model).runtime)


@pytest.mark.filterwarnings("ignore:zc. stage=3. code that is not compiled")
@pytest.mark.parametrize("how", ["without gradients", "dropped", "penalty"])
def test_weights_that_one_stream_made_whole_and_another_reads(how: str, gpu: Gpu) -> None:
    """Stage 3: they are freed at the end of a forward without gradients, with the model, or at the update."""
    dropped = _read_on_two_streams(gpu, how)
    for _ in range(2):
        gc.collect()
    assert dropped() is None
    gpu.sweep()
    assert not gpu.errors, gpu.errors


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
