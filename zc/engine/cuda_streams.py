"""Streams on CUDA: torch.cuda streams and events; the host waits for no device in forward or backward.

With several ranks it waits for the *hosts* of the others: the calling thread issues comm's tasks, so it waits there for
the answer that a reduction needs (`zc.engine.announcements`), once per backward. `zc.explain` counts these waits.

Not run here yet: no GPU was at hand when it was written (tests/gpu stands ready).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zc.engine.clock import Clock
from zc.schedule.buffer import COMM, HOST, MAIN


class CudaStreams:
    """The main stream is whatever stream is current where the schedule runs, in autograd's device thread for instance;
    the others are made when first used. Only comm has high priority, so that a reduction's kernels are not queued
    behind compute.

    The caching allocator is told nothing of the others: what crosses streams lives as long as the plan, or is made by
    the main stream before others see it and dropped after it has joined them (`zc.engine.buffers`), or has a
    ``release`` in the schedule. It is told where main is another stream than the one that has allocated (`take`): of a
    forward and its backward, an update, or a zero_grad that are on different ones. An event object is made once a name:
    a wait captures the record before it, so recording it again later is safe.

    The host stream is the calling thread: its tasks run at once, a wait on it blocks until the event has happened, and
    what it records has happened already. Kernels that were issued before go on meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.clock = device, Clock(device)
        self._sides: dict[str, torch.cuda.Stream] = {}
        self._events: dict[str, torch.cuda.Event] = {}
        self._last_main: torch.cuda.Stream | None = None

    def run_on(self, stream: str, task: Callable[[], object]) -> None:
        if stream == HOST:
            with torch.no_grad():
                task()
        elif stream == MAIN:
            self._stream(MAIN)
            task()
        else:
            with torch.cuda.stream(self._stream(stream)), torch.no_grad():
                task()

    def record(self, event: str, stream: str) -> None:
        if stream == HOST:
            self._events.pop(event, None)  # it has happened: whoever waits for it has nothing to wait for
            return
        if event not in self._events:
            self._events[event] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._events[event].record(self._stream(stream))

    def wait(self, event: str, stream: str) -> None:
        if event in self._events and stream == HOST:
            self._events[event].synchronize()
        elif event in self._events:
            self._stream(stream).wait_event(self._events[event])

    def join_main(self) -> None:
        for name in list(self._sides):
            self.record(f"join/{name}", name)
            self.wait(f"join/{name}", MAIN)

    def synchronize(self) -> None:
        self.join_main()
        self._stream(MAIN).synchronize()

    def mark(self) -> torch.cuda.Event | None:
        stream = torch.cuda.current_stream(self._device)
        return None if stream == self._last_main else stream.record_event()  # a later main comes after the last one

    def take(self, tensors: Iterable[object], marks: Iterable[Any] = ()) -> None:
        main = self._stream(MAIN)
        for mark in marks:
            if mark is not None:
                main.wait_event(mark)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                tensor.record_stream(main)  # the allocator leaves this away where the memory is of this stream

    def leave(self, memory: Iterable[list[torch.Tensor]]) -> None:
        streams = [*self._sides.values(), *([self._last_main] if self._last_main is not None else [])]
        for tensor in (tensor for tensors in memory for tensor in tensors):
            if tensor.device.type == self._device.type:
                for stream in streams:
                    tensor.record_stream(stream)  # the allocator records events when it frees, or after a capture

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name == MAIN:
            main = torch.cuda.current_stream(self._device)
            if self._last_main is not None and self._last_main != main:
                # a program may run its steps on other streams: program order goes on over the change
                main.wait_stream(self._last_main)
            self._last_main = main
            return main
        if name not in self._sides:
            self._sides[name] = torch.cuda.Stream(self._device, priority=-1 if name == COMM else 0)  # type: ignore[no-untyped-call]
        return self._sides[name]
