"""Clocks one step: when each operation of its schedules ran, for `zc.explain(model, format="html")`.

The runtime says after each update how many graphs are compiled so far. Only the third step after the last compilation
is clocked, since a clocked operation costs a few more microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from zc import torch_private
from zc.devices import allocated_nbytes
from zc.machine import resident_nbytes
from zc.ranks.waits import WaitForRank, noting_waits

SETTLE = 2  # steps after a compilation that are not clocked

Task = Callable[[], object]
Named = Callable[[str, str, str, Task], Task]  # a node's name, its stream, what a trace shows of it


class Waited(NamedTuple):
    """A wait for another rank, in microseconds from the start of the step. ``rank``: as of `WaitForRank`."""

    rank: int | None
    start: float
    stop: float


class Span(NamedTuple):
    """One operation or phase, in microseconds from the start of the step. ``program``: "" for a phase of the loop.
    ``waits``: when the operation waited for other ranks, as far as the host knows."""

    program: str
    name: str
    stream: str
    start: float
    stop: float
    waits: tuple[Waited, ...] = ()


class ClockedStep(NamedTuple):
    """``memory``: (microseconds, bytes), allocated on a GPU, resident of this process on a CPU. ``exposed``: how many
    microseconds the calling thread waited for exchanges; None where a device waits by itself."""

    spans: tuple[Span, ...]
    phases: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]
    exposed: float | None = None


class Clock:
    """On a GPU it records events on the streams of the operations, on a CPU it reads the clock in their threads."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device, self._on_host = device, device.type == "cpu"
        self._num_graphs, self._num_quiet = 0, 0  # graphs so far; steps since the last one was compiled
        # The threads of all streams append to these two; `step` reads them after the step. Others: the issuing thread.
        self._spans: list[tuple[str, str, str, Any, Any, list[WaitForRank]]] = []
        self._memory: list[tuple[Any, int]] = []
        self._phases: list[tuple[str, Any]] = []
        self._exposed_s: float | None = None

    @property
    def needs_names(self) -> bool:
        """Whether schedules run with the names of their operations: for a clocked step or a profiler."""
        return self.is_on or torch_private.is_profiling()

    def end_step(self, num_graphs: int, exposed_s: float | None = None) -> None:
        """Called between two updates."""
        if self.is_on:
            self.phase("end")
            self._exposed_s = exposed_s
        self._num_quiet = self._num_quiet + 1 if num_graphs == self._num_graphs else 0
        self._num_graphs = num_graphs
        self.is_on = self._num_quiet == SETTLE
        if self.is_on:
            self._spans, self._phases, self._memory = [], [], []
            self.phase("forward")

    def phase(self, name: str) -> None:
        """The caller's loop enters this phase."""
        if self.is_on and (not self._phases or self._phases[-1][0] != name):
            now = self._now()
            self._phases.append((name, now))
            self._memory.append((now, self._nbytes()))

    def named(self, program: str) -> Named:
        """A wrapper for the tasks of a schedule: it names them in traces, and clocks them while the clock is on."""
        spans, memory = (self._spans, self._memory) if self.is_on else (None, None)

        def wrap(node: str, stream: str, label: str, task: Task) -> Task:
            def run() -> object:
                with record_function(label):
                    if spans is None or memory is None:
                        return task()
                    start = self._now()
                    with noting_waits() as waits:
                        result = task()
                    stop = self._now()
                    spans.append((program, node, stream, start, stop, waits if self._on_host else []))
                    memory.append((stop, self._nbytes()))
                    return result

            return run

        return wrap

    def step(self) -> ClockedStep | None:
        """The step that was clocked; None before its end."""
        if self.is_on or len(self._phases) < 2:
            return None
        if not self._on_host:
            torch.accelerator.synchronize(self._device)
        since = self._phases[0][1]
        spans = tuple(self._span(since, *span) for span in self._spans)
        pairs = zip(self._phases, self._phases[1:], strict=False)
        phases = tuple(Span("", n, "loop", self._us(since, a), self._us(since, b)) for (n, a), (_, b) in pairs)
        memory = sorted((self._us(since, t), nbytes) for t, nbytes in self._memory)
        exposed = self._exposed_s * 1e6 if self._exposed_s is not None else None
        return ClockedStep(spans, phases, tuple(memory), exposed)

    def _span(
        self, since: Any, program: str, name: str, stream: str, start: Any, stop: Any, waits: list[WaitForRank]
    ) -> Span:
        waited = tuple(Waited(rank, self._us(since, a), self._us(since, b)) for rank, a, b in waits)
        return Span(program, name, stream, self._us(since, start), self._us(since, stop), waited)

    def _now(self) -> Any:
        if self._on_host:
            return time.perf_counter_ns()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _us(self, since: Any, then: Any) -> float:
        if self._on_host:
            return float(then - since) / 1e3
        return float(since.elapsed_time(then)) * 1e3

    def _nbytes(self) -> int:
        return resident_nbytes() if self._on_host else allocated_nbytes(self._device)
