"""Counts events since the last update: schedules that ran, hooks that fired, bytes sent, time waited.

The hot path only counts, with one addition per schedule or hook. `zc.explain` derives the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zc.machine import num_page_faults
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.program import Program
    from zc.ranks.announcement import Waits

Where = tuple[int, int]  # bucket, slot


@dataclass
class Step:
    """Counts of one update. ``runs``: how often each schedule ran. ``hooks``: gradients from outside of compiled
    graphs, by (bucket, slot). ``nbytes_sent`` by this rank, by kind of exchange. ``exposed_s``: how long the calling
    thread waited for exchanges; ``waits``: its waits for announcements. Page faults are this process's, on a CPU."""

    runs: Counter[str] = field(default_factory=Counter)
    hooks: Counter[Where] = field(default_factory=Counter)
    nbytes_sent: Counter[str] = field(default_factory=Counter)
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
        self.breaks_before: dict[str, int] = {}  # graph breaks in this process before this model was compiled
        self._named: set[str] = set()

    def arrived(self, programs: Iterable[Program], step: Step) -> dict[Where, Counter[str]]:
        """How often each schedule, or its hook, brought the gradient of each (bucket, slot) in ``step``."""
        sources: dict[Where, Counter[str]] = {}
        for program in programs:
            times = step.runs[program.name]
            if times:
                for where in program.brings:
                    sources.setdefault(where, Counter())[program.name] += times
        for where, times in step.hooks.items():
            sources.setdefault(where, Counter())["hook"] += times
        return sources

    def close_step(self, exposed_s: float | None, nbytes_sent: Counter[str], waits: Waits) -> None:
        self.step.exposed_s, self.step.nbytes_sent, self.step.waits = exposed_s, nbytes_sent, waits
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
        if all(all(touched[bucket.index]) for bucket in buckets):
            return None
        arrived = self.arrived(programs, self.step)
        slots = [(b.index, k, slot.name) for b in buckets for k, slot in enumerate(b.slots)]
        names = [name for b, k, name in slots if (b, k) not in arrived and not touched[b][k]]
        if len(names) == len(slots):
            return "optimizer.step() was called, and no parameter had a gradient"
        fresh = [name for name in names if name not in self._named]
        self._named.update(fresh)
        if not fresh:
            return None
        first = ", ".join(fresh[:5]) + (f" and {len(fresh) - 5} more" if len(fresh) > 5 else "")
        return f"took part in no backward since the last step, on any rank, and was not updated: {first}"
