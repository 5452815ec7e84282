"""A GPU's streams and its caching allocator, stood in for on a CPU: every operation runs at once, in the order of its
issue, and what orders it on a GPU is kept beside it.

A stream counts what it is given; its *clock* says of each stream how many of those things are done before its next one
begins. Memory goes back to the stream that allocated it, which may write it next: wrong where something that used it is
not in that stream's clock, and not in that of a stream which the allocator was told of (``record_stream``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict["Stream", int]


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, gpu: Gpu, name: str = "", priority: int = 0) -> None:
        self.gpu, self.priority = gpu, priority
        self.name = name or f"side {len(gpu.streams)}"
        self.clock: Clock = {self: 0}
        gpu.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def wait(self, clock: Clock) -> None:
        self.gpu.sweep()
        for stream, count in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.clock)

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.host_waits(f"Stream.synchronize of {self}", self.clock)


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream) -> None:
        self.gpu.sweep()
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self.gpu.host_waits("Event.synchronize", self.clock)


@dataclass
class _Memory:
    ref: StorageWeakRef
    home: Stream  # that allocated it
    made_by: str
    used: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    told: set[Stream] = field(default_factory=set)


class Gpu(TorchDispatchMode):
    """A device with one stream, ``home``, that is current where no other is; `errors` names each block of memory that
    was given away too soon, `waits` what the host stood still for."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.home = Stream(self, "home")
        self.current = self.home
        self.errors: list[str] = []
        self.waits: list[str] = []
        self._memory: dict[int, _Memory] = {}

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def host_waits(self, why: str, clock: Clock) -> None:
        """What is issued from here on comes behind ``clock``, on every stream."""
        self.waits.append(why)
        for stream in self.streams:
            stream.wait(clock)

    def told(self, tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self._of(tensor, "nobody").told.add(stream)

    def sweep(self) -> None:
        """Looks for memory that is gone."""
        for key in [key for key, memory in self._memory.items() if memory.ref.expired()]:
            memory = self._memory.pop(key)
            safe = [memory.home.clock, *(stream.clock for stream in memory.told)]
            for stream, (count, user) in memory.used.items():
                if not any(clock.get(stream, 0) >= count for clock in safe):
                    self.errors.append(
                        f"what {memory.made_by} allocated on {memory.home} is given away while {user} may be using it "
                        f"on {stream}"
                    )

    def _of(self, tensor: Tensor, maker: str) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory or self._memory[key].ref.expired():
            self._memory[key] = _Memory(StorageWeakRef(storage), self.current, maker)
        return self._memory[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        out = func(*args, **(kwargs or {}))
        self.current.clock[self.current] += 1
        place = _place()
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter):
                used = self._of(tensor, f"{func.name()} ({place})").used
                used[self.current] = self.current.clock[self.current], f"{func.name()} ({place})"
        return out


def _place() -> str:
    """The line of zc's that asks for an operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not str(frame.f_globals.get("__name__", "")).startswith("zc."):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def install(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """``gpu`` is torch's one device from here on, for tensors of the CPU."""
    patch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: Stream(gpu, priority=priority))
    patch.setattr(torch.cuda, "Event", lambda: Event(gpu))
    patch.setattr(torch.cuda, "stream", gpu.on)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: gpu.told(tensor, stream))
