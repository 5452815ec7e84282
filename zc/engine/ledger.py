"""What happened since the last update: which schedules ran, which hooks fired, what was sent, how long was waited.

Counting is all that the hot path does, one addition a schedule or hook; `zc.explain` works out the rest.
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
    """Of one update. ``runs``: schedule -> times; ``hooks``: (bucket, slot) -> gradients that came in outside of
    compiled graphs; bytes by kind of exchange, sent by this rank; seconds that the calling thread stood still for
    them, and each of its waits for what ranks announce; page faults of this process (on a CPU)."""

    runs: Counter[str] = field(default_factory=Counter)
    hooks: Counter[Where] = field(default_factory=Counter)
    nbytes_sent: Counter[str] = field(default_factory=Counter)
    exposed_s: float | None = None
    waits: Waits = field(default_factory=dict)
    num_page_faults: int | None = None


class Ledger:
    """The current step and the last one, and which parameters have been warned of."""

    def __init__(self) -> None:
        self.step, self.last = Step(), Step()
        self.num_steps = 0
        self._faults_before = num_page_faults()
        self.graphs: list[str] = []  # Dynamo's id of each graph that was compiled: frame / how often
        self.breaks_before: dict[str, int] = {}  # graph breaks in this process before this model was compiled
        self._named: set[str] = set()

    def arrived(self, programs: Iterable[Program], step: Step) -> dict[Where, Counter[str]]:
        """(bucket, slot) -> where its gradients came from in ``step``, and how many times."""
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
        """The parameters of ``buckets`` that no backward of this step has reached, on any rank, each named once:
        deepspeed#7579 ran on for days like that. ``touched``: by bucket and slot, whether some rank has a gradient."""
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
