"""The needed record/wait pairs, and no other: from the nodes' read and write sets alone, with a vector clock a stream.

Before and after, buffer ``flat_grad[0]`` written on compute and read on comm::

    compute | flatten_cast(0, "flat_grad[0]", ...)            compute | wait_event("done/flat_grad[0]")
       comm | launch_reduce(0, "recv[0]", "flat_grad[0]")     compute | flatten_cast(0, "flat_grad[0]", ...)
                                                       ->     compute | record_event("e0")
                                                                 comm | wait_event("e0")
                                                                 comm | launch_reduce(0, "recv[0]", "flat_grad[0]")
                                                                 ...
                                                                 comm | record_event("done/flat_grad[0]")

The wait in front is for an earlier schedule's reduction out of the same ring buffer; the record at the end is for a
later one's (the carried events of zc.schedule). A graph on one stream is left alone. Vector clocks: Mattern 1989;
FastTrack, PLDI 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.plan import Plan
from zc.schedule import (
    HOME,
    Access,
    accesses,
    carried_event,
    is_plan_buffer,
    is_schedule_node,
    overlap,
    record_event,
    stream_of,
    wait_event,
)

Point = tuple[str, int]  # a stream, or a carried event, and a position on it
Clock = dict[str, int]


@dataclass
class _Touch:
    access: Access
    point: Point
    writes: bool


@dataclass
class _State:
    """What is known while the program is walked once, in order."""

    clocks: dict[str, Clock] = field(default_factory=dict)  # stream -> what its next node is ordered after
    snapshots: dict[Point, Clock] = field(default_factory=dict)
    touches: dict[str, list[_Touch]] = field(default_factory=dict)  # buffer -> touches that may still conflict
    nodes: dict[Point, fx.Node] = field(default_factory=dict)
    events: dict[Point, str] = field(default_factory=dict)

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    streams = {stream_of(n) for n in new.nodes if is_schedule_node(n)}
    if len(streams) < 2 or any(n.target is record_event for n in new.nodes if n.op == "call_function"):
        return new
    state = _State()
    sides = sorted(streams - {HOME})
    for node in list(new.nodes):
        if is_schedule_node(node):
            _visit(new, node, state, sides)
    _record_carried(new, plan, state)
    return new


def _visit(graph: fx.Graph, node: fx.Node, state: _State, sides: list[str]) -> None:
    stream = stream_of(node)
    clock = state.clock(stream)
    reads, writes = accesses(node)
    touched = [(a, False) for a in reads] + [(a, True) for a in writes]
    for access, _ in touched:
        state.touches.setdefault(access.buffer, _prologue(access.buffer, sides))
    for point in _needed(touched, stream, clock, state):
        _order(graph, node, point, state)
    position = clock.get(stream, 0) + 1
    clock[stream] = position
    point = (stream, position)
    state.snapshots[point], state.nodes[point] = dict(clock), node
    for access, is_write in touched:
        kept = state.touches[access.buffer]
        if is_write:  # what it covers and is ordered after can't conflict with anything that is not ordered after it
            kept = [t for t in kept if not (access.start <= t.access.start and t.access.stop <= access.stop)]
        state.touches[access.buffer] = [*kept, _Touch(access, point, is_write)]


def _prologue(buffer: str, sides: list[str]) -> list[_Touch]:
    """Who may have touched a buffer before the schedule starts: see the entry contract in docs/proof.md."""
    whole = Access(buffer)
    before = [_Touch(whole, (HOME, 0), True)]
    if is_plan_buffer(buffer):
        before += [_Touch(whole, (f"{side} {carried_event(buffer)}", 0), True) for side in sides]
    return before


def _needed(touched: list[tuple[Access, bool]], stream: str, clock: Clock, state: _State) -> list[Point]:
    """Points that the node must wait for: the latest a stream, without those that another one implies."""
    latest: dict[str, int] = {}
    for access, is_write in touched:
        for touch in state.touches[access.buffer]:
            source, position = touch.point
            if source == stream or source.startswith(f"{stream} ") or not (is_write or touch.writes):
                continue
            if overlap(access, touch.access) and clock.get(source, -1) < position:
                latest[source] = max(latest.get(source, -1), position)
    points = sorted(latest.items())
    return [
        point
        for point in points
        if not any(other != point and state.snapshots.get(other, {}).get(point[0], -1) >= point[1] for other in points)
    ]


def _order(graph: fx.Graph, node: fx.Node, point: Point, state: _State) -> None:
    """A wait before ``node``, and the record that it waits for, unless that is there already."""
    clock = state.clock(stream_of(node))
    source, position = point
    if " " in source:
        event = source.split(" ", 1)[1]
    else:
        event = state.events.get(point, "")
        if not event:
            event = state.events[point] = f"e{len(state.events)}"
            if point in state.nodes:
                with graph.inserting_after(state.nodes[point]):
                    made = graph.call_function(record_event, (event,))
            else:  # the home stream's position at entry
                first = next(n for n in graph.nodes if n.op != "placeholder")
                with graph.inserting_before(first):
                    made = graph.call_function(record_event, (event,))
            made.meta["stream"] = source
    with graph.inserting_before(node):
        made = graph.call_function(wait_event, (event,))
    made.meta["stream"] = stream_of(node)
    for key, known in {**state.snapshots.get(point, {}), source: position}.items():
        clock[key] = max(clock.get(key, -1), known)


def _record_carried(graph: fx.Graph, plan: Plan, state: _State) -> None:
    """After the last side use of a buffer that the home stream writes in this plan's schedules: its carried event."""
    home_writes = "flat_grad[" if plan.placement.gradient_in_ring else "acc["
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if is_schedule_node(node) and stream_of(node) != HOME:
            for access in (a for group in accesses(node) for a in group):
                if access.buffer.startswith(home_writes):
                    last[access.buffer] = node
    for buffer in sorted(last, reverse=True):
        with graph.inserting_after(last[buffer]):
            made = graph.call_function(record_event, (carried_event(buffer),))
        made.meta["stream"] = stream_of(last[buffer])


PASS = Pass("insert_events", run, requires=frozenset({"streams"}), provides=frozenset({"events"}))
