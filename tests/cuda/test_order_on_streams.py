"""Gradients of one stream cost no event, all ranks issue the collectives of a communicator in one order, and the
collector, which drops a model, issues nothing. tests/simulated_device has gradients of several streams
(deepspeed#8061), memory that is given away, and host memory under a queued copy."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from clocks import Event, Gpu, Lists, Stream, compare, recorded
from harness import run_ranks
from torch import Tensor, nn

import zc


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with recorded() as (device, _):
        yield device


def test_gradients_of_one_stream_cost_no_event(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=2, backend="eager", bucket_nbytes=300)
    recording: list[Stream] = []
    monkeypatch.setattr(Stream, "record_event", lambda stream: recording.append(stream))
    for _ in range(2):
        recording.clear()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not recording


def test_the_collector_issues_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run in any thread, perhaps while a graph is captured, and drops a model whose gradients are under way."""
    issued: list[str] = []
    model: nn.Module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, stage=2, backend="eager", bucket_nbytes=300)
    model(torch.ones(2, 8)).square().sum().backward()
    for kind, name in ((Stream, "wait_stream"), (Stream, "wait_event"), (Event, "record")):
        monkeypatch.setattr(kind, name, lambda *_, name=name: issued.append(name))
    dropped = weakref.ref(zc.registry.sharded(model).runtime)
    del model, optimizer
    for _ in range(2):  # the first frees the model, which is in a cycle: only then zc lets go of the rest
        gc.collect()
    assert dropped() is None and not issued


class OnGpu(Tensor):
    """A buffer that says that it lies on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


class Counting(nn.Module):
    """Two layers, and a buffer of the device that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(4).as_subclass(OnGpu))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data.add_(x.detach().sum())
        return self.b(self.a(x))


def _buffers(rank: int, world_size: int, stage: int) -> tuple[Lists, list[float]]:
    """Job: microbatches in no_sync are kept until the step. In the last update a forward alone follows, so that the
    step exchanges buffers as well."""
    with recorded() as (gpu, _):
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=300)
        seen = []
        for microbatches in ("kk", "ks", "ss", "kf"):  # kept, synchronised, or a forward alone
            for kind in microbatches:
                x = torch.full((2, 8), float(rank + 1))
                with zc.no_sync(model) if kind == "k" else contextlib.nullcontext():
                    loss = model(x).sum()
                    if kind != "f":
                        loss.backward()
                seen.append(float(model.seen[0]))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(model.seen[0]))
        return gpu.collectives, seen


@pytest.mark.parametrize("stage", [1, 2])
def test_buffers_of_a_gpu_and_kept_gradients_have_one_order_on_all_ranks(stage: int) -> None:
    lists, seen = zip(*run_ranks(_buffers, 2, stage), strict=True)
    assert not compare(lists), compare(lists)
    assert any("broadcast_" in each for issued in lists[0].values() for each in issued)
    # what DDP shows: rank 0's before each forward, if the one before it was not in no_sync
    assert seen[0] == [16, 32, 32, 48, 64, 64, 80, 96, 96, 112, 128, 128]
    assert seen[1] == [32, 64, 64, 96, 128, 128, 96, 112, 112, 128, 160, 160]


def test_the_recorder_names_the_first_collective_that_differs() -> None:
    same: Lists = {"g": ["broadcast_ of 4", "alltoall_base_ of 8"]}
    assert not compare([same, same, {}])
    assert "collective 0 of rank 0 is broadcast_ of 4, of rank 1 alltoall_base_ of 8" in compare(
        [same, {"g": same["g"][::-1]}]
    )[0]
    assert "of rank 1 none" in compare([same, {"g": same["g"][:1]}])[0]
