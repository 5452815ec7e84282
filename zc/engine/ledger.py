"""What steps did. The `Ledger` counts events since the last update: schedules that ran, hooks that fired, bytes sent,
time waited. The `Clock` notes when each operation of one step ran, for `zc.explain(model, format="html")`.

The hot path only counts, with one addition per schedule or hook. `zc.explain` derives the rest.

The runtime tells the clock after each update how many graphs are compiled so far. Only the third step after the last
compilation is clocked, since a clocked operation costs a few more microseconds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import record_function

from zc import torch_private
from zc.machine import allocated_nbytes, resident_nbytes
from zc.planning.plan import Bucket
from zc.ranks.exchanges import WaitForRank, noting_waits

if TYPE_CHECKING:
    from zc.engine.program import Program

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


Where = tuple[int, int]  # bucket, slot
Waits = dict[str, list[float]]  # at which point of a step -> seconds of each wait


@dataclass
class Step:
    """Counts of one update. ``runs``: how often each schedule ran. ``hooks``: gradients from outside of compiled
    graphs, by (bucket, slot). ``num_reductions``: by bucket. ``nbytes_sent`` by this rank, by kind of exchange;
    ``nbytes_moved`` over the bus, by direction (offload). ``exposed_s``: how long the calling thread waited for
    exchanges; ``waits``: its waits for announcements. Page faults are this process's, on a CPU."""

    runs: Counter[str] = field(default_factory=Counter)
    hooks: Counter[Where] = field(default_factory=Counter)
    num_reductions: Counter[int] = field(default_factory=Counter)
    nbytes_sent: Counter[str] = field(default_factory=Counter)
    nbytes_moved: dict[str, int] = field(default_factory=dict)
    exposed_s: float | None = None
    waits: Waits = field(default_factory=lambda: {"inside": [], "at its end": [], "at the boundary": []})
    num_page_faults: int | None = None


def num_page_faults() -> int | None:
    """Minor page faults of this process since it began, also on pages that malloc had returned to the system before;
    None if the system does not count them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource is not None else None


class Ledger:
    """The current step, the last one, and the parameters that a warning has named."""

    def __init__(self) -> None:
        self.step, self.last = Step(), Step()
        self.num_steps = 0
        self._faults_before = num_page_faults()
        self.graphs: list[str] = []  # Dynamo's id of each compiled graph: frame / compilation
        self.breaks_before = torch_private.graph_breaks()  # in this process, before this model was compiled
        self._named: set[str] = set()
        self._updated: set[int] = set()  # optimizers, in this step

    def arrived(self, programs: Iterable[Program], step: Step) -> dict[Where, Counter[str]]:
        """How often each schedule, or its hook, brought the gradient of each (bucket, slot) in ``step``."""
        sources: dict[Where, Counter[str]] = {}
        for program in programs:
            times = step.runs[program.name]
            if times:
                for where in program.gradients:
                    sources.setdefault(where, Counter())[program.name] += times
        for where, times in step.hooks.items():
            sources.setdefault(where, Counter())["hook"] += times
        return sources

    def completes_step(self, optimizer: int, optimizers: set[int]) -> bool:
        """Called after each update of one of ``optimizers``, by number: whether it is the last one of the step. That is
        so when all have had one, or when this one has its second."""
        is_second = optimizer in self._updated
        self._updated.add(optimizer)
        is_last = is_second or optimizers <= self._updated
        if is_last:
            self._updated.clear()
        return is_last

    def close_step(self) -> None:
        """Ends the current step; it becomes the last one."""
        faults = num_page_faults()
        if faults is not None and self._faults_before is not None:
            self.step.num_page_faults = faults - self._faults_before
        self._faults_before = faults
        self.last, self.step = self.step, Step()
        self.num_steps += 1

    def unused(
        self, programs: Iterable[Program], buckets: Sequence[Bucket], touched: Sequence[Sequence[bool]]
    ) -> str | None:
        """A warning for the parameters of ``buckets`` that no backward of this step has reached on any rank, each named
        once (deepspeed#7579). ``touched``: whether some rank has a gradient, by bucket and slot."""
        if all(sum(touched[bucket.index]) == bucket.num_params for bucket in buckets):
            return None
        arrived = self.arrived(programs, self.step)
        slots = [(b.index, k, slot.name) for b in buckets for k, slot in enumerate(b.slots) if not slot.is_left]
        names = [name for b, k, name in slots if (b, k) not in arrived and not touched[b][k]]
        if len(names) == len(slots):
            return "optimizer.step() was called, and no parameter had a gradient"
        fresh = [name for name in names if name not in self._named]
        self._named.update(fresh)
        if not fresh:
            return None
        first = ", ".join(fresh[:5]) + (f" and {len(fresh) - 5} more" if len(fresh) > 5 else "")
        return f"took part in no backward since the last step, on any rank, and was not updated: {first}"

    def uncompiled(self, programs: Iterable[Program], buckets: Sequence[Bucket], names: frozenset[str]) -> str | None:
        """A note, if hooks alone have brought the gradients of some of the parameters ``names`` in the last step. They
        are those outside of the model's blocks."""
        written = set().union(*(program.gradients for program in programs))
        by_hooks = (buckets[bucket].slots[k].name for bucket, k in self.last.hooks.keys() - written)
        eager = sorted(names & set(by_hooks))
        if not eager:
            return None
        return (
            f"the code that reads {', '.join(eager[:3])}{', ...' if len(eager) > 3 else ''} runs op by op: Dynamo "
            "compiles no function that calls blocks in a loop. Move what stands before and after the loop (norm, "
            "head, loss) into methods of their own, which are compiled. Or pass fullgraph=True: all is one graph, "
            "whose first step takes longer with each block"
        )


SETTLE = 2  # steps after a compilation that are not clocked

Task = Callable[[], object]
Named = Callable[[str, str, str, Task], Task]  # a node's name, its stream, what a trace shows of it


class Span(NamedTuple):
    """One operation or phase, in microseconds from the start of the step. ``program``: "" for a phase of the loop.
    ``waits``: when the operation waited for other ranks, as far as the host knows."""

    program: str
    name: str
    stream: str
    start: float
    stop: float
    waits: tuple[WaitForRank, ...] = ()  # in microseconds as well


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
        waited = tuple(WaitForRank(rank, self._us(since, a), self._us(since, b)) for rank, a, b in waits)
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
