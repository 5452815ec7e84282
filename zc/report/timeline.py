"""A picture of a schedule: one lane a stream, one box a node, an arrow for each wait that an event satisfies.

`simulate` gives every node a start and a stop by the rules of streams: a node starts when its stream is free and what
it waits for is done; an exchange runs beside its stream from launch to completion. Times are estimates in microseconds
(`zc.schedule.cost`), or the caller's own measurements (``costs``). `zc.report.html` draws it, and `exposed` says how
much of the communication no compute covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from zc.planning.plan import Plan
from zc.schedule.buffer import COMM, COMPUTE, MAIN
from zc.schedule.cost import estimate
from zc.schedule.nodes import kind_of, op_of, ops, stream_of
from zc.schedule.spec import LaunchReduce, Op, RecordEvent, Role, Segment, WaitEvent, WaitReduce


@dataclass(frozen=True)
class Box:
    """One node on its lane, in microseconds from the start of the schedule."""

    node: fx.Node
    lane: str
    start: float
    stop: float

    @property
    def op(self) -> Op | None:
        return op_of(self.node)


@dataclass(frozen=True)
class Timeline:
    """``arrows``: from a recorded event to the wait that it held up or let pass, (lane, time) twice and its name."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[str, float, str, float, str], ...]

    @property
    def stop(self) -> float:
        return max((box.stop for box in self.boxes), default=0.0)

    def exposed(self) -> float:
        """Microseconds of communication during which no compute stream works."""
        compute = _union([(b.start, b.stop) for b in self.boxes if b.lane.startswith(COMPUTE)])
        comm = _union([(b.start, b.stop) for b in self.boxes if isinstance(b.op, LaunchReduce) or b.lane == COMM])
        covered = sum(max(0.0, min(s, t) - max(a, b)) for a, s in comm for b, t in compute)
        return sum(stop - start for start, stop in comm) - covered


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged


def simulate(graph: fx.Graph, plan: Plan | None = None, costs: Mapping[str, float] | None = None) -> Timeline:
    """The schedule run by the rules of streams. ``costs``: microseconds by node name, in place of the estimate."""
    cost, measured = estimate(plan), dict(costs or {})
    free: dict[str, float] = {}
    events: dict[str, tuple[str, float]] = {}
    arrival: dict[fx.Node, float] = {}
    boxes: list[Box] = []
    arrows: list[tuple[str, float, str, float, str]] = []
    for node, op in ops(graph):
        lane = stream_of(node)
        now = free.get(lane, 0.0)
        if isinstance(op, RecordEvent):
            events[op.event] = (lane, now)
            continue
        if isinstance(op, WaitEvent):
            source, time = events.get(op.event, (lane, 0.0))
            free[lane] = max(now, time)
            if source != lane:
                arrows.append((source, time, lane, free[lane], op.event))
            continue
        took = measured.get(node.name, cost(node))
        if isinstance(op, LaunchReduce):
            # exchanges of one group follow each other, whoever launched them
            start = max(now, *(b.stop for b in boxes if isinstance(b.op, LaunchReduce)), 0.0)
            arrival[node] = start + took
            boxes.append(Box(node, "in flight", start, start + took))
            continue
        if isinstance(op, WaitReduce):
            free[lane] = max(now, arrival.get(op.work, 0.0))
            continue
        boxes.append(Box(node, lane, now, now + took))
        free[lane] = now + took
    return Timeline(tuple(boxes), tuple(arrows))


_COLORS = {Role.COMPUTE: "#9ecae1", Role.WRITE: "#fdd0a2", Role.REDUCTION: "#a1d99b"}


def color(node: fx.Node) -> str:
    """The color of a node's box, as #rrggbb."""
    op = op_of(node)
    return _COLORS.get(op.role, "#d9d9d9") if op is not None else "#d9d9d9"


def lanes(timeline: Timeline) -> list[str]:
    used = {box.lane for box in timeline.boxes} | {lane for a in timeline.arrows for lane in (a[0], a[2])}
    return sorted(used, key=lambda lane: (lane != MAIN, not lane.startswith(COMPUTE), lane))


def label(node: fx.Node) -> str:
    op = op_of(node)
    if isinstance(op, Segment):
        return op.key.replace("segment_", "seg ")
    return f"{kind_of(node)} {node.args[0] if node.args else ''}"
