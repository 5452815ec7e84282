"""A picture of a schedule: one lane a stream, one box a node, an arrow for each wait that an event satisfies.

`simulate` gives every node a start and a stop by the rules of streams: a node starts when its stream is free and what
it waits for is done; an exchange runs beside its stream from launch to completion. Times are estimates in microseconds
(`zc.schedule.cost`), or the caller's own measurements (``costs``). `zc.report.html` draws it, and `exposed` says how
much of the communication no compute covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from zc.planning.plan import Plan
from zc.schedule.cost import estimate
from zc.schedule.nodes import (
    COMM,
    COMPUTE,
    HOME,
    accumulate,
    accumulate_cast,
    flatten_cast,
    launch_reduce,
    record_event,
    segment,
    steps,
    stream_of,
    wait_event,
    wait_reduce,
    wgrad_into,
)


@dataclass(frozen=True)
class Box:
    """One node on its lane, in microseconds from the start of the schedule."""

    node: fx.Node
    lane: str
    start: float
    stop: float


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
        comm = _union([(b.start, b.stop) for b in self.boxes if b.node.target is launch_reduce or b.lane == COMM])
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
    cost, given = estimate(plan), dict(costs or {})
    free: dict[str, float] = {}
    events: dict[str, tuple[str, float]] = {}
    arrival: dict[fx.Node, float] = {}
    boxes: list[Box] = []
    arrows: list[tuple[str, float, str, float, str]] = []
    for node in steps(graph):
        lane = stream_of(node)
        now = free.get(lane, 0.0)
        if node.target is record_event:
            events[str(node.args[0])] = (lane, now)
            continue
        if node.target is wait_event:
            source, time = events.get(str(node.args[0]), (lane, 0.0))
            free[lane] = max(now, time)
            if source != lane:
                arrows.append((source, time, lane, free[lane], str(node.args[0])))
            continue
        took = given.get(node.name, cost(node))
        if node.target is launch_reduce:
            # exchanges of one group follow each other, whoever launched them
            start = max(now, *(b.stop for b in boxes if b.node.target is launch_reduce), 0.0)
            arrival[node] = start + took
            boxes.append(Box(node, "in flight", start, start + took))
            continue
        if node.target is wait_reduce:
            free[lane] = max(now, *(arrival.get(n, 0.0) for n in node.all_input_nodes))
            continue
        boxes.append(Box(node, lane, now, now + took))
        free[lane] = now + took
    return Timeline(tuple(boxes), tuple(arrows))


_COLORS: dict[Any, str] = {
    segment: "#9ecae1",
    flatten_cast: "#fdd0a2",
    accumulate_cast: "#fdd0a2",
    wgrad_into: "#fdd0a2",
    launch_reduce: "#a1d99b",
    accumulate: "#c7e9c0",
}


def color(node: fx.Node) -> str:
    """Of a node's box, as #rrggbb."""
    return _COLORS.get(node.target, "#d9d9d9")


def lanes(timeline: Timeline) -> list[str]:
    used = {box.lane for box in timeline.boxes} | {lane for a in timeline.arrows for lane in (a[0], a[2])}
    return sorted(used, key=lambda lane: (lane != HOME, not lane.startswith(COMPUTE), lane))


def label(node: fx.Node) -> str:
    if node.target is segment:
        return str(node.args[0]).replace("segment_", "seg ")
    return f"{getattr(node.target, '__name__', '')} {node.args[0] if node.args else ''}"
