"""A picture of a schedule: one lane a stream, one box a node, an arrow for each wait that an event satisfies.

`simulate` gives every node a start and a stop by the rules of streams: a node starts when its stream is free and what
it waits for is done; an exchange runs beside its stream from launch to completion. Times are estimates in microseconds
(`zc.schedule.cost`), or the caller's own measurements (``costs``). The same timeline goes to a PNG or to a Chrome trace
(chrome://tracing, ui.perfetto.dev), and `exposed` says how much of the communication no compute covers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from zc.planning.plan import Plan
from zc.schedule.buffer import COMM, COMPUTE, HOME
from zc.schedule.cost import estimate
from zc.schedule.nodes import kind_of, op_of, ops, stream_of
from zc.schedule.spec import Accumulate, LaunchReduce, Op, RecordEvent, Segment, WaitEvent, WaitReduce, Write


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
    cost, given = estimate(plan), dict(costs or {})
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
        took = given.get(node.name, cost(node))
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


_COLORS: dict[Any, str] = {Segment: "#9ecae1", Write: "#fdd0a2", LaunchReduce: "#a1d99b", Accumulate: "#c7e9c0"}


def color(node: fx.Node) -> str:
    """Of a node's box, as #rrggbb."""
    return next((shade for kind, shade in _COLORS.items() if isinstance(op_of(node), kind)), "#d9d9d9")


def draw(
    graph: fx.Graph, path: str | Path, plan: Plan | None = None, costs: Mapping[str, float] | None = None
) -> Timeline:
    """Writes the picture: a PNG, or a Chrome trace where ``path`` ends in .json. Returns what is drawn."""
    timeline = simulate(graph, plan, costs)
    if str(path).endswith(".json"):
        Path(path).write_text(json.dumps(chrome_trace(timeline)))
    else:
        _png(timeline, plan, Path(path))
    return timeline


def lanes(timeline: Timeline) -> list[str]:
    used = {box.lane for box in timeline.boxes} | {lane for a in timeline.arrows for lane in (a[0], a[2])}
    return sorted(used, key=lambda lane: (lane != HOME, not lane.startswith(COMPUTE), lane))


def _png(timeline: Timeline, plan: Plan | None, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {lane: -k for k, lane in enumerate(lanes(timeline))}
    figure = Figure(figsize=(14, 2.0 + 0.7 * len(rows)))
    FigureCanvasAgg(figure)
    axes: Any
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(2, len(rows)), 1])
    for box in timeline.boxes:
        width = max(box.stop - box.start, timeline.stop / 2000)
        shade = color(box.node)
        axes.barh(rows[box.lane], width, 0.6, box.start, color=shade, edgecolor="#555555", linewidth=0.5)
        if width > timeline.stop / 30:
            axes.text(box.start + width / 2, rows[box.lane], label(box.node), ha="center", va="center", fontsize=6)
    for source, start, target, stop, _ in timeline.arrows:
        passed = stop > start  # it was there before it was asked for: nobody stood still
        axes.annotate(
            "",
            (stop, rows[target]),
            (start, rows[source]),
            arrowprops={"arrowstyle": "->", "color": "#bbbbbb" if passed else "#cb181d", "linewidth": 0.8},
        )
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_title(
        f"{timeline.stop:.0f} µs, of communication {timeline.exposed():.0f} µs exposed; red: a wait that held"
    )
    times, held = in_flight(timeline, plan)
    below.step(times, [h / 2**20 for h in held], where="post", color="#31a354")
    below.set_ylabel("MiB in flight")
    below.set_xlabel("µs")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def in_flight(timeline: Timeline, plan: Plan | None) -> tuple[list[float], list[float]]:
    """Bytes that are being exchanged, as steps: times and what holds from then on."""
    changes: list[tuple[float, float]] = [(0.0, 0.0)]
    for box in timeline.boxes:
        if isinstance(box.op, LaunchReduce):
            bucket = plan.buckets[box.op.bucket] if plan is not None else None
            nbytes = float(bucket.numel * bucket.reduce_dtype.itemsize) if bucket is not None else 1.0
            changes += [(box.start, nbytes), (box.stop, -nbytes)]
    times, held, now = [], [], 0.0
    for time, change in sorted(changes):
        now += change
        times.append(time)
        held.append(now)
    return times, held


def label(node: fx.Node) -> str:
    op = op_of(node)
    if isinstance(op, Segment):
        return op.key.replace("segment_", "seg ")
    return f"{kind_of(node)} {node.args[0] if node.args else ''}"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The Trace Event Format: complete events ("X") by lane, flow arrows ("s", "f") for events."""
    ids = {lane: k for k, lane in enumerate(lanes(timeline))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": k, "name": "thread_name", "args": {"name": lane}} for lane, k in ids.items()
    ]
    for box in timeline.boxes:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": ids[box.lane],
                "ts": box.start,
                "dur": box.stop - box.start,
                "name": label(box.node),
                "args": {"node": box.node.name},
            }
        )
    for k, (source, start, target, stop, name) in enumerate(timeline.arrows):
        events.append({"ph": "s", "pid": 0, "tid": ids[source], "ts": start, "id": k, "name": name, "cat": "event"})
        events.append(
            {"ph": "f", "bp": "e", "pid": 0, "tid": ids[target], "ts": stop, "id": k, "name": name, "cat": "event"}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
