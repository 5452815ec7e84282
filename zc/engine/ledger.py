"""Counts events since the last update: schedules that ran, hooks that fired, bytes sent, time waited.

The hot path only counts, with one addition per schedule or hook. `zc.explain` derives the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zc import torch_private
from zc.machine import num_page_faults
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.program import Program

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
    waits: Waits = field(default_factory=dict)
    num_page_faults: int | None = None


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

    def close_step(
        self,
        *,
        num_reductions: Counter[int],
        nbytes_sent: Counter[str],
        nbytes_moved: dict[str, int],
        exposed_s: float | None,
        waits: Waits,
    ) -> None:
        """Ends the current step; it becomes the last one."""
        step = self.step
        step.num_reductions, step.nbytes_sent, step.nbytes_moved = num_reductions, nbytes_sent, nbytes_moved
        step.exposed_s, step.waits = exposed_s, waits
        faults = num_page_faults()
        if faults is not None and self._faults_before is not None:
            step.num_page_faults = faults - self._faults_before
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
