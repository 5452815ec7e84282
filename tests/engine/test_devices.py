"""Devices that are neither the CPU nor CUDA's: which are taken, which are refused, and what they lose by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zc import checks, kernels, machine
from zc.engine.streams import MAIN, DeviceStreams, ThreadStreams, make_streams
from zc.errors import PlanError
from zc.offload.host_step import HostMemory

XPU, MPS = torch.device("xpu", 1), torch.device("mps", 0)


def install(patch: pytest.MonkeyPatch, device: torch.device | None, new_stream: Any, current: Any) -> None:
    """``device`` is torch's accelerator; ``new_stream`` makes a stream of it."""
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    patch.setattr(torch.accelerator, "current_stream", lambda device=None: current)
    patch.setattr(torch, "Stream", new_stream)


def raises(device: torch.device) -> Any:
    raise RuntimeError("Backend doesn't support create a new Stream.")


def test_a_device_has_streams_where_a_new_one_is_another_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    install(monkeypatch, torch.device("xpu"), lambda device: made.append(device) or "side", "current")
    assert machine.has_streams(XPU) and made == [XPU]
    assert machine.accelerator_type() == "xpu"
    assert not machine.has_streams(MPS), "torch's accelerator is another one"
    assert not machine.has_streams(torch.device("meta"))
    install(monkeypatch, torch.device("mps"), lambda device: "the queue", "the queue")
    assert not machine.has_streams(MPS), "one queue is all that it has"
    install(monkeypatch, torch.device("mps"), raises, "current")
    assert not machine.has_streams(MPS)
    install(monkeypatch, None, raises, "current")
    assert not machine.has_streams(XPU) and machine.accelerator_type() == "cuda"


def test_a_device_without_streams_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a CPU's streams, in silence: threads that queue work in any order."""
    install(monkeypatch, torch.device("mps"), raises, "current")
    params: Any = {"weight": SimpleNamespace(device=MPS)}
    with pytest.raises(PlanError, match="parameters are on mps:0, and torch has no streams of mps"):
        checks._check_devices(params)
    install(monkeypatch, torch.device("mps"), lambda device: "side", "current")
    checks._check_devices(params)


def test_streams_by_device() -> None:
    assert isinstance(make_streams(torch.device("cpu")), ThreadStreams)
    assert isinstance(make_streams(XPU), DeviceStreams)


def test_host_memory_of_another_device_is_pinned_by_torch_and_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    plain = torch.zeros

    def zeros(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return plain(*size, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    memory = HostMemory(XPU)
    assert memory.note is None
    tensor = memory.zeros(3, torch.bfloat16)
    assert asked == [True] and tensor.shape == (3,) and tensor.dtype == torch.bfloat16
    assert memory.note is not None and "pinned by PyTorch's allocator" in memory.note and "xpu:1" in memory.note
    memory.unlock()


def test_kernels_of_another_device_are_their_references_and_say_so() -> None:
    assert "torch reference on xpu:1, slower" in str(kernels.note_of(XPU))
    assert kernels.note_of(torch.device("cpu")) is None


class Main:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: Main) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


def test_work_on_another_main_stream_waits_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may change its stream between two steps."""
    streams, events = DeviceStreams(XPU), list[str]()
    first, second = Main("first", events), Main("second", events)
    for main in (first, second, second):
        install(monkeypatch, XPU, None, main)
        streams.run_on(MAIN, lambda: events.append("task"))
    assert events == ["task", "second waits for first", "task", "task"]
