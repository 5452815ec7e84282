"""Streams, and their two kinds: threads for CPUs, and torch's streams and events for whatever
accelerator there is.

A stream runs its tasks in order. Only an event, recorded on one stream and waited for on another, orders two streams.

On a device the host waits for no device in a forward or backward. With several ranks it waits for the *hosts* of other
ranks, once or twice per backward: the calling thread issues comm's tasks, and a reduction needs their announcements
first, as does the end of a backward that compiled graphs did not bring whole (`zc.engine.announcements`). `zc.explain`
counts these waits.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Event, Stream

from zc.engine.ledger import Clock
from zc.errors import ZcError
from zc.ranks import process
from zc.schedule.buffer import COMM, HOST, MAIN

Task = Callable[[], object]


class Streams:
    """The streams that schedules run on. As in CUDA, a wait for an event that was never recorded does nothing."""

    clock: Clock

    def run_on(self, stream: str, task: Task) -> None:
        """Issues ``task`` on ``stream``."""
        raise NotImplementedError

    def record(self, event: str, stream: str) -> None:
        """Records ``event`` after all tasks issued on ``stream`` so far."""
        raise NotImplementedError

    def wait(self, event: str, stream: str) -> None:
        """Makes later tasks of ``stream`` start after the latest record of ``event``."""
        raise NotImplementedError

    def error_before(self, event: str) -> str | None:
        """The error because of which tasks before the latest record of ``event`` did not run; None: the host knows of
        none. It stays after it has been raised. On a device the issuing thread raises the errors of tasks, and the
        device's end the process."""
        return None

    def join_main(self) -> None:
        """Makes the main stream wait for all tasks issued on other streams."""
        raise NotImplementedError

    def on_calling_thread(self) -> AbstractContextManager[None]:
        """For a schedule in which main does nothing but wait: inside, the calling thread runs the tasks of idle streams
        where main waits for them. On a device, whose streams have no thread, it changes nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Makes the host wait for all tasks, and raises the first error of any stream."""
        raise NotImplementedError

    def mark(self) -> object:
        """Marks the work issued so far on the caller's current stream, for `hand_to_main`. None: main runs after it
        anyway, as where a thread has finished what it has issued."""
        return None

    def hand_to_main(self, tensors: Iterable[object], marks: Iterable[Any] = ()) -> None:
        """Makes the caller's current stream the main stream, after all work issued on the previous one and after
        ``marks``. Main may use ``tensors`` (an entry may be None) or free them: no other stream reuses their memory
        before main is done. Threads need nothing: a task refers to its tensors until it has run, and malloc knows no
        streams."""

    def record_streams(self, memory: Iterable[list[torch.Tensor]]) -> None:
        """The caller is about to free these tensors, which all streams may use: their memory is reused only after the
        tasks issued so far. The garbage collector calls it, in any thread, so it issues nothing. Threads need nothing,
        as in `hand_to_main`."""

    def close(self) -> None:
        """Ends what the streams have started, such as threads, after their last task. A device's streams and events end
        with this object."""


class Lane:
    """A worker thread: one stream on a CPU. After an error it runs no task until the error has been raised."""

    def __init__(self, name: str) -> None:
        # Its thread sets it. The issuing thread raises and resets it: until then the lane runs no task, so it sets no
        # other one meanwhile.
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Task | _Fence | None] = queue.SimpleQueue()
        self.process = os.getpid()
        self._last_fence: _Fence | None = _REACHED  # that was put; None: a task was, which refers to the model's memory
        self.thread = process.start_thread(_work, (weakref.ref(self), self._tasks), f"zc {name}")
        self.close = weakref.finalize(self, self._tasks.put, None)
        _LANES.add(self)

    def refuse_fork(self) -> NoReturn:
        """Called in a process that was forked: the thread is its parent's, so a wait for it would not end."""
        raise ZcError(
            f"process {os.getpid()} was forked from process {self.process}, and has none of its threads, which "
            "gather weights: before a fork call zc.synchronize(model); in stage 3 and with shard_frozen, fork "
            "inside `with zc.whole_parameters(model):`"
        )

    def put(self, task: Task | _Fence) -> None:
        if self.process != os.getpid():
            self.refuse_fork()
        self._last_fence = task if isinstance(task, _Fence) else None
        self._tasks.put(task)

    @property
    def is_idle(self) -> bool:
        """Whether its thread has nothing to run, by what the issuing thread knows."""
        return self._last_fence is not None and self._last_fence.reached.is_set() and self.error is None


class _Lanes(dict[str, Lane]):
    """By stream; made when first used."""

    def __missing__(self, stream: str) -> Lane:
        return self.setdefault(stream, Lane(stream))


_LANES: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _end_lanes(timeout: float = 10.0) -> None:
    """Lets lanes finish before the interpreter exits: their last tasks may be gathers for which no forward waits. The
    timeout, in seconds for all lanes together, is for one that hangs in a collective: `zc.ranks.process` ends it."""
    lanes = list(_LANES)
    for lane in lanes:
        lane.close()
    process.join([lane.thread for lane in lanes], timeout)


def _work(lane: weakref.ref[Lane], tasks: queue.SimpleQueue[Task | _Fence | None]) -> None:
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            owner = lane()
            if owner is None:
                return
            try:
                if isinstance(task, _Fence):
                    task.reach(owner.error)
                elif owner.error is None:
                    task()
            except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
                _clear_variables(error)
                owner.error = error
            del owner, task  # while the thread waits, the lane may be collected, and so may what the task refers to


def _clear_variables(error: BaseException | None) -> None:
    """Clears the variables of the calls in which ``error``, and what caused it, was raised. They refer to the model's
    memory. The finalizer of that memory refers to the streams, so a lane whose error nobody raises would keep both."""
    seen: list[BaseException] = []
    while error is not None and not any(error is other for other in seen):
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__ or error.__context__


class _Fence:
    """One record of an event. A lane reaches it also after an error, so that no wait lasts for ever."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        # because of which the lane has not run the tasks before it; in words, since a traceback keeps a model alive
        self.error: str | None = None

    def reach(self, error: BaseException | None = None) -> None:
        self.error = None if error is None else f"{type(error).__name__}: {error}"
        self.reached.set()


_REACHED = _Fence()  # each record on the main stream, whose tasks the issuing thread has run
_REACHED.reach()


class ThreadStreams(Streams):
    """CPU streams: the main stream is the thread that issues schedules, and every other one is a worker thread, made
    when first used. Only the issuing thread calls the methods, `record_streams` excepted.
    """

    def __init__(self) -> None:
        self.clock = Clock(torch.device("cpu"))
        # Only the issuing thread uses these two. A lane gets its tasks, and nothing else.
        self._lanes = _Lanes()
        self._fences: dict[str, tuple[str, _Fence]] = {}  # event -> stream and latest record
        self._deferred: deque[tuple[str, Task | _Fence]] | None = None  # in `on_calling_thread`: by stream, in order
        self.wait_for: Callable[[threading.Event], object] = threading.Event.wait  # how the main stream waits
        self.on_error: Callable[[], object] = lambda: None  # called before the error of a lane is raised

    def run_on(self, stream: str, task: Task) -> None:
        if stream == MAIN:
            task()
        else:
            self._put(stream, task)

    def _put(self, stream: str, task: Task | _Fence) -> None:
        if self._deferred is None:
            self._lanes[stream].put(task)
        else:
            self._deferred.append((stream, task))

    def record(self, event: str, stream: str) -> None:
        fence = _REACHED
        if stream != MAIN:
            fence = _Fence()
            self._put(stream, fence)
        self._fences[event] = (stream, fence)

    def wait(self, event: str, stream: str) -> None:
        recorded_on, fence = self._fences.get(event, (stream, None))
        if fence is None or recorded_on == stream:
            return
        if stream == MAIN:
            if self._deferred:
                self._run_deferred(fence)
            lane = self._lanes[recorded_on]
            if not fence.reached.is_set():
                if lane.process != os.getpid():
                    lane.refuse_fork()
                self.wait_for(fence.reached)
            if lane.error is not None:  # a lane reaches a fence after an error, too
                self._raise(recorded_on)
        elif not fence.reached.is_set():
            self._put(stream, fence.reached.wait)

    def error_before(self, event: str) -> str | None:
        _, fence = self._fences.get(event, (MAIN, None))
        return None if fence is None else fence.error

    def join_main(self) -> None:
        fences = {name: _Fence() for name, lane in self._lanes.items() if not lane.is_idle}
        for name, fence in fences.items():
            self._lanes[name].put(fence)
        for fence in fences.values():
            self.wait_for(fence.reached)
        for name in fences:
            if self._lanes[name].error is not None:
                self._raise(name)

    def synchronize(self) -> None:
        self.join_main()

    @contextmanager
    def on_calling_thread(self) -> Iterator[None]:
        """To start a thread's task and to learn of its end are two wakes, some 0.2 ms each on a virtual machine. The
        order in which tasks are issued is one that events allow."""
        if all(lane.is_idle for lane in self._lanes.values()):
            self._deferred = deque()
        try:
            yield
        finally:
            self._hand_over_deferred()

    def _run_deferred(self, last: _Fence) -> None:
        """Runs the tasks up to this fence, as their threads would."""
        assert self._deferred is not None
        with torch.no_grad():
            while self._deferred and not last.reached.is_set():
                stream, task = self._deferred.popleft()
                try:
                    task.reach() if isinstance(task, _Fence) else task()
                except RuntimeError as error:  # its thread runs no further task until this has been raised
                    self._lanes[stream].error = error
                    self._hand_over_deferred()
                    return

    def _hand_over_deferred(self) -> None:
        """What nobody has waited for, or what an error or Ctrl-C has left, is run by the threads."""
        tasks, self._deferred = self._deferred or (), None
        for stream, task in tasks:
            self._lanes[stream].put(task)

    def close(self) -> None:
        """Ends the threads after their last task. If nobody calls it, they end with this object or with the
        process."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._fences.clear()

    def _raise(self, stream: str) -> None:
        lane = self._lanes[stream]
        error, lane.error = lane.error, None
        assert error is not None, "its caller has looked"
        self.on_error()
        raise error


def make_streams(device: torch.device) -> Streams:
    """Streams for the device that the parameters are on: a CPU, or one that `has_streams`."""
    if device.type == "cpu":
        return ThreadStreams()
    return DeviceStreams(device)


class DeviceStreams(Streams):
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

    def run_on(self, stream: str, task: Task) -> None:
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
