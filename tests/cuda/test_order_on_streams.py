"""The host touches no memory that a queued copy still uses, gradients of one stream cost no event, and all ranks issue
the collectives of a communicator in one order. tests/simulated_device has gradients of several streams
(deepspeed#8061)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from clocks import Gpu, Lists, Stream, compare, recorded
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


def _buffers(rank: int, world_size: int, stage: int) -> tuple[Lists, list[str], list[float]]:
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
        return gpu.collectives, gpu.errors, seen


@pytest.mark.parametrize("stage", [1, 2])
def test_buffers_of_a_gpu_and_kept_gradients_have_one_order_on_all_ranks(stage: int) -> None:
    lists, errors, seen = zip(*run_ranks(_buffers, 2, stage), strict=True)
    assert not compare(lists) and errors == ([], []), (compare(lists), errors)
    assert any("broadcast_" in each for issued in lists[0].values() for each in issued)
    # what DDP shows: rank 0's before each forward, if the one before it was not in no_sync
    assert seen[0] == [16, 32, 32, 48, 64, 64, 80, 96, 96, 112, 128, 128]
    assert seen[1] == [32, 64, 64, 96, 128, 128, 96, 112, 112, 128, 160, 160]


def _partial_on_one(rank: int, world_size: int, accumulate: str) -> tuple[Lists, list[str], list[float]]:
    """Job: a bucket of host memory that holds a reduced gradient here and a further partial sum there."""
    with recorded() as (gpu, _):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zc.compile(
            model,
            optimizer,
            stage=1,
            backend="eager",
            bucket_nbytes=300,
            offload="cpu",
            offload_accumulate=accumulate,
        )
        for _ in range(2):
            for head in model:
                head(torch.ones(2, 8)).sum().backward()
            with zc.no_sync(model):
                model[rank](torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        zc.synchronize(model)
        return gpu.collectives, gpu.errors, [float(head.bias.detach()[0]) for head in model]


@pytest.mark.parametrize("accumulate", ["cpu", "device"])
def test_the_host_leaves_memory_alone_that_queued_copies_use(accumulate: str) -> None:
    torch.manual_seed(0)
    before = [float(head.bias.detach()[0]) for head in [nn.Linear(8, 8) for _ in range(2)]]
    for _, errors, biases in run_ranks(_partial_on_one, 2, accumulate):
        assert not errors, errors
        # a bias's gradient is 2 rows; one backward on all ranks, one more on one of two; two updates
        assert biases == pytest.approx([b - 2 * 0.1 * (2 + 1) for b in before], abs=1e-6)


def test_the_recorder_sees_reads_and_writes_without_order(gpu: Gpu) -> None:
    """The control: two operations on two streams, one of which writes, with and without a wait between them."""
    side = Stream(gpu, "side")
    for ordered, first, second in itertools.product((False, True), ("read", "write"), ("read", "write")):
        tensor = torch.zeros(4)
        side.wait_stream(gpu.home)
        for stream, what in ((side, first), (gpu.home, second)):
            with gpu.on(stream):
                tensor.add_(1) if what == "write" else tensor + 1
            if ordered:
                gpu.home.wait_stream(side)
        assert bool(gpu.errors) == (not ordered and "write" in (first, second)), (first, second, gpu.errors)
        gpu.home.wait_stream(side)
        gpu.errors.clear()


def test_the_recorder_sees_host_memory_under_a_queued_copy(gpu: Gpu) -> None:
    for waits, blocks in itertools.product((False, True), repeat=2):
        host, device = gpu.pinned(torch.zeros(4)), torch.ones(4)
        host.copy_(device, non_blocking=not blocks)
        if waits:
            gpu.home.synchronize()
        host.zero_()
        assert bool(gpu.errors) == (not waits and not blocks), gpu.errors
        gpu.errors.clear()


def test_the_recorder_names_the_first_collective_that_differs() -> None:
    same: Lists = {"g": ["broadcast_ of 4", "alltoall_base_ of 8"]}
    assert not compare([same, same, {}])
    assert "collective 0 of rank 0 is broadcast_ of 4, of rank 1 alltoall_base_ of 8" in compare(
        [same, {"g": same["g"][::-1]}]
    )[0]
    assert "of rank 1 none" in compare([same, {"g": same["g"][:1]}])[0]
