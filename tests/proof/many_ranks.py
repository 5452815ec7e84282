"""Several ranks that read each other's memory, one schedule each, in any legal order of all their streams together.

A rank's lanes are those of `simulation` with its number in front. A signal is a message under its bucket, and a wait
takes the next one from every other rank, in the order in which they were sent: as zc.ranks.links has it. So a message
that nobody takes is found by a later wait, which then comes too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from adversary import AdversarialStreams, Chooser, _Fence, _Silent
from simulation import MAIN, NAN, Case, Simulation, Values, _enter, _future, _leave, _past, is_lasting, lanes
from torch import Tensor, fx

from zc.engine.streams import Task
from zc.schedule import codegen
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import item_of, ops, results
from zc.schedule.spec import (
    AwaitFree,
    AwaitFull,
    Event,
    Gather,
    Op,
    Segment,
    Signal,
    SignalFree,
    SignalFull,
    WgradInto,
)

Key = tuple[type[Op], str, int, int, int]  # what is signalled, of gradients or weights, bucket, by whom, which one


class RankStreams:
    """One rank's streams among all. ``nodes``: those of the schedule that is being issued, in its order."""

    def __init__(self, rank: int, world_size: int, all_ranks: AdversarialStreams, messages: dict[Key, _Fence]) -> None:
        self.rank, self._others = rank, [r for r in range(world_size) if r != rank]
        self._all, self._messages = all_ranks, messages
        self._counts: dict[tuple[type[Op], str, int], int] = {}
        self.nodes: Iterator[Op | None] = iter(())

    def run_on(self, stream: str, task: Task) -> None:
        op, lane = next(self.nodes, None), self._lane(stream)
        if isinstance(op, SignalFull | SignalFree):
            message = self._message(op, self.rank, self._next(op))
            self._all._put(lane, _Silent(lambda: setattr(message, "reached", True)))
        elif isinstance(op, AwaitFull | AwaitFree):
            number = self._next(op)
            for peer in self._others:
                self._all._put(lane, self._message(op, peer, number))
        self._all.run_on(lane, task)

    def _next(self, op: Signal) -> int:
        key = (type(op), _what(op.buffer), op.bucket)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    def _message(self, op: Signal, rank: int, number: int) -> _Fence:
        kind = SignalFull if isinstance(op, SignalFull | AwaitFull) else SignalFree
        return self._messages.setdefault((kind, _what(op.buffer), op.bucket, rank, number), _Fence())

    def record(self, event: str, stream: str) -> None:
        self._all.record(f"{self.rank}/{event}", self._lane(stream))

    def wait(self, event: str, stream: str) -> None:
        self._all.wait(f"{self.rank}/{event}", self._lane(stream))

    def join_main(self) -> None:
        for lane in sorted(self._all._lanes):
            mine, _, name = lane.partition("/")
            if mine == str(self.rank) and name != MAIN:
                self.record(f"join/{name}", name)
                self.wait(f"join/{name}", MAIN)

    def _lane(self, stream: str) -> str:
        return f"{self.rank}/{stream}"


def _what(buffer: Buffer) -> str:
    return "weights" if buffer.kind in ("flat_param", "gathered") else "gradients"


@dataclass
class Rank(Simulation):
    """``everyone``: the simulations of all ranks, this one among them; ``places``: where a read finds the others' is
    known to it from its wait, and from nothing else."""

    rank: int = 0
    places: set[tuple[int, str]] = field(default_factory=set)
    everyone: list[Rank] = field(default_factory=list)

    def _part_of(self, bucket: int, rank: int) -> slice:
        return slice(*self.plan.buckets[bucket].layout.shard_range(rank))

    def reduce_rows(self, bucket: int, dst: str, src: str) -> None:
        self.places.remove((bucket, src))
        mine = slice(*self.plan.buckets[bucket].layout.host_range(self.rank))
        rows: Tensor = sum((r + 1.5) * each.part(src, bucket)[mine] for r, each in enumerate(self.everyone))  # type: ignore[assignment]
        out = self.part(dst, bucket)
        if Buffer.named(dst).kind == "host_sum":
            out[mine] = rows
        elif self.plan.placement.shards_gradients:
            out[mine] = self.keep * out[mine] + rows + self.shift * bucket
        else:
            before = self.aside.pop(bucket, torch.zeros_like(out))
            out[mine] = rows + 0.25 * before[mine]

    def accumulate(self, bucket: int, acc: str, src: str) -> None:
        """The messages of a second reduction are `Simulation`'s, of a host or replica like this one."""
        mine = self._part_of(bucket, self.rank)
        out, rows = self.part(acc, bucket), self.part(src, bucket)
        if self.plan.placement.shards_gradients:
            out[mine] = self.keep * out[mine] + rows[mine]
        else:
            before = self.aside.pop(bucket, torch.zeros_like(out))
            out[mine] = rows[mine] + 0.25 * before[mine]
        self.part(src, bucket).fill_(NAN)

    def gather_net(self, bucket: int, buffer: str) -> None:
        segment = slice(*self.plan.buckets[bucket].layout.host_range(self.rank))
        own, out = self._part_of(bucket, self.rank), self.part(buffer, bucket)
        own_values = out[own].clone()
        out[segment] = 0.75 * out[segment] + 2.0
        out[own] = own_values

    def gather(self, bucket: int, buffer: str) -> None:
        self.places.remove((bucket, buffer))
        for each in self.everyone:
            if each.rank != self.rank:
                part = slice(*self.plan.buckets[bucket].layout.host_range(each.rank))
                self.part(buffer, bucket)[part] = 1.25 * each.part(buffer, bucket)[part] + bucket

    def publish(self, bucket: int, buffer: str) -> None:
        super().publish(bucket, buffer)
        own = self._part_of(bucket, self.rank)
        self.part(buffer, bucket)[own] -= 3.0  # from here on main does with its own weights what it likes

    def signal_full(self, bucket: int, buffer: str) -> None:
        pass

    def await_full(self, bucket: int, buffer: str) -> None:
        self.places.add((bucket, buffer))

    def signal_free(self, bucket: int, buffer: str) -> None:
        pass

    def await_free(self, bucket: int, buffer: str) -> None:
        if not is_lasting(buffer):  # nobody looks at it any more
            self.buffer(buffer).fill_(NAN)


def run(case: Case, choose: Chooser, world_size: int) -> dict[str, Tensor]:
    """What is left on all ranks after all schedules, as `simulation.run`."""
    streams, messages = AdversarialStreams(choose), dict[Key, _Fence]()
    num_results: dict[str, int] = {}
    for graph in case.graphs:
        for node, op in ops(graph):
            if isinstance(op, Segment):
                num_results[op.key] = 1 + max(map(item_of, results(node)), default=-1)
    everyone: list[Rank] = []
    final: dict[str, Tensor] = {}
    for rank in range(world_size):
        mine = RankStreams(rank, world_size, streams, messages)
        everyone.append(Rank(case.plan, mine, num_results, rank=rank, everyone=everyone))  # type: ignore[arg-type]
    for sim in everyone:
        _issue(case, sim, sim.streams, final)  # type: ignore[arg-type]
    streams.synchronize()
    for sim in everyone:
        final.update({f"{sim.rank} {k}": v for k, v in sim.buffers.items() if is_lasting(k)})
        final.update({f"{sim.rank} published {k}": v for k, v in enumerate(sim.published)})
    return final


def _issue(case: Case, sim: Rank, streams: RankStreams, final: dict[str, Tensor]) -> None:
    _past(sim, case)
    expected, mine = 0, dict[str, Tensor]()
    for number, graph in enumerate(case.graphs):
        values = Values()
        expected += sum(isinstance(op, Segment | WgradInto) for _, op in ops(graph))
        gathers = [op for _, op in ops(graph) if isinstance(op, Gather)]
        if gathers:
            streams.join_main()  # an update comes when all gradients are there
            streams.run_on(MAIN, _updated(sim, gathers))
        streams.run_on(MAIN, _entered(values, graph, number, sim))
        streams.nodes = (op for _, op in ops(graph) if not isinstance(op, Event))
        codegen.load(graph)(values, streams, sim.bound(graph))
        streams.nodes = iter(())
        streams.run_on(MAIN, _left(values, graph, number, mine, sim, expected, final))
    _future(sim, case)


def _updated(sim: Rank, gathers: list[Gather]) -> Callable[[], None]:
    def task() -> None:
        for op in gathers:
            own = sim._part_of(op.bucket, sim.rank)
            out = sim.part(str(op.buffer), op.bucket)
            out[own] = 0.5 * out[own] + sim.rank + 1

    return task


def _entered(values: Values, graph: fx.Graph, number: int, sim: Rank) -> Callable[[], None]:
    enter = _enter(values, graph, number, sim)

    def task() -> None:
        enter()
        for name, value in values.items():
            if not any(value is buffer for buffer in sim.buffers.values()):
                values[name] = value * (1 + sim.rank / 4)  # ranks have other data

    return task


def _left(
    values: Values, graph: fx.Graph, number: int, mine: dict[str, Tensor], sim: Rank, expected: int,
    final: dict[str, Tensor],
) -> Callable[[], None]:  # fmt: skip
    leave = _leave(values, graph, number, mine, sim, expected)

    def task() -> None:
        leave()
        final.update({f"{sim.rank} {k}": v for k, v in mine.items()})

    return task


def all_lanes(case: Case, world_size: int) -> list[str]:
    """What a chooser can hurry or delay: every lane of every rank."""
    return [f"{rank}/{lane}" for rank in range(world_size) for lane in lanes(case)]


def outcome(case: Case, choose: Chooser, world_size: int) -> dict[str, Any] | None:
    """None: it can't run to its end."""
    try:
        return run(case, choose, world_size)
    except (RuntimeError, AssertionError, ValueError, IndexError, KeyError, TypeError):
        return None
