"""Streams that do the worst that the events allow: the same schedule, on CPU, in any legal order.

``run_on``, ``record`` and ``wait`` only collect; ``synchronize`` then runs what was collected, one task at a time, and
at each step asks a *chooser* which stream goes on. Whatever order comes out, some device could have had it. The idea is
that of systematic concurrency testing (VeriSoft, POPL 1997; PCT, ASPLOS 2010), here with the worst orders by hand:
each stream in turn delayed to the last legal moment, and run at the first.

Storage that is not yet written, or no longer in use, is NaN (`Values`, and buffers filled with NaN), so that a task
which runs too early or too late can't be right by luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from zc.engine.streams import Task
from zc.schedule.buffer import MAIN

T = TypeVar("T")


class Ready(NamedTuple):
    """A stream that can go on, and when its next task was issued."""

    stream: str
    issued: int


Chooser = Callable[[Sequence[Ready]], int]


class _Fence:
    """An event's record: ``reached`` once its stream has got there. Streams that stand at it are ``waiting``."""

    def __init__(self) -> None:
        self.reached = False
        self.waiting: list[str] = []


class Values(dict[str, Any]):
    """A schedule's values by name. What is not there, not yet or no more, is NaN."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.tensor(float("nan"))

    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(name, torch.tensor(float("nan")))


class AdversarialStreams:
    """One run of collected schedules. Several may be collected one after the other; make a new one for each order."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self._lanes: dict[str, list[tuple[int, Task | _Fence | _Silent]]] = {MAIN: []}
        self._at: dict[str, int] = {}
        self._events: dict[str, _Fence] = {}
        self._issued = 0
        self.trace: list[str] = []  # streams, in the order in which their tasks ran

    # --- the protocol ---

    def run_on(self, stream: str, task: Task) -> None:
        self._put(stream, task)

    def record(self, event: str, stream: str) -> None:
        """No task that a chooser could delay, since whoever waits for it can be delayed itself."""
        self._events[event] = _Fence()
        self._put(stream, _Silent(self._events[event]))

    def wait(self, event: str, stream: str) -> None:
        if event in self._events:
            self._put(stream, self._events[event])

    def join_main(self) -> None:
        for name in sorted(self._lanes):
            if name != MAIN:
                self.record(f"join/{name}", name)
                self.wait(f"join/{name}", MAIN)

    def synchronize(self) -> None:
        """Runs all that was collected."""
        ready: dict[str, Ready] = {}
        moved = list(self._lanes)
        while True:
            self._pass(moved, ready)
            if not ready:
                break
            choices = sorted(ready.values())
            stream = choices[self._choose(choices)].stream
            task = self._lanes[stream][self._at[stream]][1]
            self._at[stream] += 1
            del ready[stream]
            self.trace.append(stream)
            assert callable(task)
            task()
            moved = [stream]
        stuck = [s for s, tasks in self._lanes.items() if self._at.get(s, 0) < len(tasks)]
        assert not stuck, f"streams {stuck} wait for events that nobody reaches"

    # --- inside ---

    def _put(self, stream: str, item: Task | _Fence | _Silent) -> None:
        self._lanes.setdefault(stream, []).append((self._issued, item))
        self._issued += 1

    def _pass(self, moved: list[str], ready: dict[str, Ready]) -> None:
        """Passes the records and reached waits that come next on these streams, and on those that waited for such a
        record. Streams whose next item is a task then are ``ready``."""
        while moved:
            stream = moved.pop()
            tasks, at = self._lanes[stream], self._at.get(stream, 0)
            while at < len(tasks):
                issued, item = tasks[at]
                if isinstance(item, _Silent):
                    item.fence.reached = True
                    moved += item.fence.waiting
                elif not isinstance(item, _Fence):
                    ready[stream] = Ready(stream, issued)
                    break
                elif not item.reached:
                    item.waiting.append(stream)
                    break
                at += 1
            self._at[stream] = at


class _Silent(NamedTuple):
    """A record, where its stream gets to it."""

    fence: _Fence


# --- orders ---


def in_order(ready: Sequence[Ready]) -> int:
    """The order in which the program issued: what a device with one stream does."""
    return min(range(len(ready)), key=lambda k: ready[k].issued)


def seeded(seed: int) -> Chooser:
    """Any legal order, by chance."""
    rng = random.Random(seed)
    return lambda ready: rng.randrange(len(ready))


def first(*streams: str) -> Chooser:
    """These streams go on whenever they can, the rest in program order."""
    return lambda ready: min(range(len(ready)), key=lambda k: (not _is_one(ready[k].stream, streams), ready[k].issued))


def last(*streams: str) -> Chooser:
    """These streams go on only where nothing else can."""
    return lambda ready: min(range(len(ready)), key=lambda k: (_is_one(ready[k].stream, streams), ready[k].issued))


@cache
def _is_one(stream: str, names: tuple[str, ...]) -> bool:
    """A name that ends in a dot stands for all streams that begin with it."""
    return any(stream == name or (name.endswith(".") and stream.startswith(name)) for name in names)


def worst(streams: Sequence[str]) -> Iterator[Chooser]:
    """Each stream delayed to the last legal moment and run at the first; and each pair of
    one that is early and one that is late."""
    names = tuple(streams)
    yield in_order
    for name in names:
        yield first(name)
        yield last(name)
    for early in names:
        for late in names:
            if early != late:
                yield _first_and_last(early, late)


def _first_and_last(early: str, late: str) -> Chooser:
    def choose(ready: Sequence[Ready]) -> int:
        def rank(k: int) -> tuple[bool, bool, int]:
            return _is_one(ready[k].stream, (late,)), not _is_one(ready[k].stream, (early,)), ready[k].issued

        return min(range(len(ready)), key=rank)

    return choose


def every_order(run: Callable[[Chooser], T]) -> Iterator[T]:
    """``run`` under every legal order, one after the other; for schedules of up to some 12 operations."""
    path: list[list[int]] = []  # at each step: what was chosen, of how many
    while True:
        step = 0

        def choose(ready: Sequence[Ready]) -> int:
            nonlocal step
            if step == len(path):
                path.append([0, len(ready)])
            assert path[step][1] == len(ready), "a run must depend on nothing but its order"
            step += 1
            return path[step - 1][0]

        yield run(choose)
        del path[step:]
        while path and path[-1][0] == path[-1][1] - 1:
            path.pop()
        if not path:
            return
        path[-1][0] += 1
