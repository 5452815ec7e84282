"""Streams of a device: torch's streams and events, whatever accelerator it is.

The host waits for no device in a forward or backward.

With several ranks it waits for the *hosts* of other ranks, once per backward: the calling thread issues comm's tasks,
and a reduction needs their announcements first (`zc.engine.announcements`). `zc.explain` counts these waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Event, Stream

from zc.engine.clock import Clock
from zc.schedule.buffer import COMM, HOST, MAIN


class DeviceStreams:
    """The main stream is the current stream where the schedule runs, for instance in autograd's device thread. Others
    are made when first used. Only comm has high priority, so that a reduction's kernels do not queue behind compute.

    Side streams need no record_stream for memory that crosses streams. It lives as long as the plan; or the main stream
    makes it before others use it, and drops it after it has joined them (`zc.engine.buffers`). `hand_to_main` calls
    record_stream when the main stream differs from the allocating one, for example if a forward and its backward run on
    different streams. There is one event object per name: a wait captures the record before it, so recording the event
    again later is safe.

    The host stream is the calling thread: its tasks run at once, and a wait on it blocks until the event has happened.
    Kernels issued before continue meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.clock = device, Clock(device)
        # Only the issuing thread changes these three. The garbage collector reads the streams in any thread
        # (`record_streams`), by copying them in one step.
        self._sides: dict[str, Stream] = {}
        self._events: dict[str, Event] = {}
        self._last_main: Stream | None = None

    def run_on(self, stream: str, task: Callable[[], object]) -> None:
        if stream == HOST:
            with torch.no_grad():
                task()
        elif stream == MAIN:
            self._stream(MAIN)
            task()
        else:
            with self._stream(stream), torch.no_grad():
                task()

    def record(self, event: str, stream: str) -> None:
        if stream == HOST:
            self._events.pop(event, None)  # it has happened already, so a wait for it does nothing
            return
        if event not in self._events:
            self._events[event] = Event(self._device)
        self._events[event].record(self._stream(stream))

    def wait(self, event: str, stream: str) -> None:
        if event in self._events and stream == HOST:
            self._events[event].synchronize()
        elif event in self._events:
            self._stream(stream).wait_event(self._events[event])

    def error_before(self, event: str) -> str | None:
        """None: the issuing thread raises the errors of tasks, and the device's end the process."""
        return None

    def join_main(self) -> None:
        for name in list(self._sides):
            self.record(f"join/{name}", name)
            self.wait(f"join/{name}", MAIN)

    def synchronize(self) -> None:
        self.join_main()
        self._stream(MAIN).synchronize()

    def mark(self) -> Event | None:
        stream = torch.accelerator.current_stream(self._device)
        return None if stream == self._last_main else stream.record_event()  # main runs after its predecessor

    def hand_to_main(self, tensors: Iterable[object], marks: Iterable[Any] = ()) -> None:
        main = self._stream(MAIN)
        for mark in marks:
            if mark is not None:
                main.wait_event(mark)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                tensor.record_stream(main)  # the allocator ignores it if this stream allocated the memory

    def record_streams(self, memory: Iterable[list[torch.Tensor]]) -> None:
        streams = [*self._sides.values(), *([self._last_main] if self._last_main is not None else [])]
        for tensor in (tensor for tensors in memory for tensor in tensors):
            if tensor.device.type == self._device.type:
                for stream in streams:
                    tensor.record_stream(stream)  # the allocator records events when it frees, or after a capture

    def close(self) -> None:
        """Does nothing: streams and events end with this object."""

    def _stream(self, name: str) -> Stream:
        if name == MAIN:
            main = torch.accelerator.current_stream(self._device)
            if self._last_main is not None and self._last_main != main:
                # a program may change its stream between steps: keep program order
                main.wait_stream(self._last_main)
            self._last_main = main
            return main
        if name not in self._sides:
            self._sides[name] = Stream(self._device, priority=-1 if name == COMM else 0)
        return self._sides[name]
