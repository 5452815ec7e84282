"""Inserts the record/wait pairs that are needed, and no other: from the nodes' accesses alone, with one vector clock
per stream.

Before and after, buffer ``flat_grad[0]`` written on compute and read on comm::

    compute | flatten_cast(0, "flat_grad[0]", ...)       compute | wait_event("done/flat_grad[0]")
       comm | reduce(0, "acc[0]", "flat_grad[0]")     compute | flatten_cast(0, "flat_grad[0]", ...)
                                                  ->     compute | record_event("e0")
                                                            comm | wait_event("e0")
                                                            comm | reduce(0, "acc[0]", "flat_grad[0]")
                                                            ...
                                                            comm | record_event("done/flat_grad[0]")

The wait in front is for an earlier schedule's reduction out of the same ring buffer; the record at the end is for a
later one's (carried events: zc.schedule.buffer; docs/proof.md has the contract). A stream that carries no buffer is
joined into the main stream at the end. Without plan.overlap all is on one stream, and the pass inserts nothing.

No wait is redundant. The pass puts one in front of a node only for a conflict that neither the nodes before it nor the
other waits there order. Later waits order later nodes only. Vector clocks: Mattern 1989; FastTrack, PLDI 2009.

`Timeline` is happens-before of an unfinished schedule, walked once in program order. A *point* is a stream and a
position on it, counted from 1; (MAIN, 0) is the main stream's past at entry, and ("done/flat_grad[0]", 0) the carrier's
past uses of one buffer. A clock says, for each stream, up to which position everything is ordered before the stream's
next node.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import HOST, MAIN, Access, Buffer, Place, carried_by, carried_event, overlap
from zc.schedule.nodes import accesses, ops, put, shared_buffers, stream_of, value
from zc.schedule.spec import RecordEvent, WaitEvent


def run(graph: fx.Graph, plan: Plan, prefix: str = "e") -> fx.Graph:
    """``prefix``: of the names of all events but the carried ones."""
    new = copy_graph(graph)
    nodes = list(ops(new))
    shared = shared_buffers(new, plan)
    timeline = Timeline(new, shared, prefix)
    for node, _ in nodes:
        timeline.visit(node)
    lasting = {b.carrier for b in timeline.touches if isinstance(b, Buffer)}
    ends = {side: timeline.length(side) for side in {stream_of(node) for node, _ in nodes} - {MAIN} - lasting}
    timeline.order(new.output_node(), timeline.unknown(MAIN, ends | _uncovered(timeline, lasting, shared)))
    _record_carried(new, shared, timeline)
    return new


def _uncovered(timeline: Timeline, lasting: set[str], shared: frozenset[Buffer]) -> dict[str, int]:
    """By stream, the last use there of plan-owned buffers on another buffer's carrier, where their own carried event
    does not stand for it: main must come after these."""
    points: dict[str, int] = {}
    for buffer, stream, point in timeline.last_touches():
        if stream in lasting - {MAIN, buffer.carrier}:
            last = timeline.last_touch(buffer, buffer.carrier) if buffer in shared else None
            if last is None or not timeline.is_after(last, point):
                points[stream] = max(points.get(stream, 0), point[1])
    return points


def _record_carried(graph: fx.Graph, shared: frozenset[Buffer], timeline: Timeline) -> None:
    """After a shared buffer's last use on its carrier: the event that later schedules wait for."""
    last = {b: p for b in shared if (p := timeline.last_touch(b, b.carrier)) is not None}
    for buffer in sorted(last, key=str, reverse=True):  # after one node, the last one inserted comes first
        with graph.inserting_after(timeline.nodes[last[buffer]]):
            put(graph, RecordEvent(carried_event(buffer)), stream=buffer.carrier)


PASS = Pass("insert_events", run, requires=frozenset({"streams"}), provides=frozenset({"events"}))


Point = tuple[str, int]
_ISSUED = "the issuing thread"  # its own accesses to host memory; main comes after them
Clock = dict[str, int]


@dataclass
class _Touch:
    """An access, and the point of its node."""

    access: Access
    point: Point
    writes: bool


class Timeline:
    """State of one walk. `visit` puts the records and waits that a node needs into the graph, and moves past it."""

    def __init__(self, graph: fx.Graph, shared: frozenset[Buffer], prefix: str) -> None:
        self.graph, self.shared, self.prefix = graph, shared, prefix
        # the thread that issues the schedule is the host: its own accesses to host memory are done
        self.clocks: dict[str, Clock] = {MAIN: {MAIN: 0, _ISSUED: 0}, HOST: {_ISSUED: 0}}
        self.nodes: dict[Point, fx.Node] = {}
        self.touches: dict[Place, list[_Touch]] = {}  # buffer -> touches that a later one may still conflict with
        self._placeholders = {value(n).buffer for n in graph.nodes if n.op == "placeholder"}
        self._snapshots: dict[Point, Clock] = {}  # the clock at a node, itself included
        self._events: dict[Point, str] = {}  # recorded already
        self._last: dict[tuple[Place, str], Point] = {}  # buffer, stream -> last touch

    def visit(self, node: fx.Node) -> None:
        reads, writes = accesses(node)
        touched = [(access, False) for access in reads] + [(access, True) for access in writes]
        self.order(node, self._needed(node, touched))
        self._advance(node, touched)

    def _needed(self, node: fx.Node, touched: list[tuple[Access, bool]]) -> list[Point]:
        """Points that ``node`` conflicts with and is not ordered after, without those that another one implies."""
        stream, latest, points = stream_of(node), dict[str, int](), list[tuple[Place, Point]]()
        for access, is_write in touched:
            for touch in self.touches.setdefault(access.buffer, self._entry(access.buffer)):
                conflict = (is_write or touch.writes) and overlap(access, touch.access)
                if conflict and not self._knows(self.clocks.setdefault(stream, {}), stream, touch.point):
                    points.append((access.buffer, touch.point))
        for buffer, (source, position) in sorted(points, key=lambda item: carried_by(item[1][0]) is not None):
            carried = carried_by(source)
            if carried is None or carried.carrier not in latest:  # else that use is after the carrier's past
                source, position = self._resolved(buffer, (source, position))
                latest[source] = max(latest.get(source, -1), position)
        return self.unknown(stream, latest)

    def unknown(self, stream: str, latest: dict[str, int]) -> list[Point]:
        """The points, one a stream, that the next node on ``stream`` is not ordered after, without those that another
        one implies."""
        clock = self.clocks.setdefault(stream, {})
        points = [p for p in sorted(latest.items()) if not self._knows(clock, stream, p)]
        implied = {p for p in points for q in points if q != p and self._knows(self._snapshots.get(q, {}), q[0], p)}
        return [p for p in points if p not in implied]

    def order(self, node: fx.Node, points: list[Point]) -> None:
        """Puts waits for ``points`` in front of ``node``, and the records that they wait for if there are none yet."""
        stream = stream_of(node)
        clock = self.clocks.setdefault(stream, {})
        for point in points:
            event = self._event(point)
            with self.graph.inserting_before(node):
                put(self.graph, WaitEvent(event), stream=stream)
            source, position = point
            for key, reached in {**self._snapshots.get(point, {}), source: position}.items():
                clock[key] = max(clock.get(key, -1), reached)

    def _advance(self, node: fx.Node, touched: list[tuple[Access, bool]]) -> None:
        stream = stream_of(node)
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        point = (stream, clock[stream])
        self.nodes[point], self._snapshots[point] = node, dict(clock)
        for access, is_write in touched:
            touches = self.touches[access.buffer]
            if is_write:  # an access that conflicts with a covered touch conflicts with this later one, too
                touches = [t for t in touches if not _covers(access, t.access)]
            else:
                touches = [t for t in touches if t.writes or t.point[0] != stream or not _covers(access, t.access)]
            self.touches[access.buffer] = [*touches, _Touch(access, point, is_write)]
            self._last[access.buffer, stream] = point

    def length(self, stream: str) -> int:
        """How many nodes stand on the stream so far."""
        return self.clocks.get(stream, {}).get(stream, 0)

    def last_touch(self, buffer: Place, stream: str) -> Point | None:
        return self._last.get((buffer, stream))

    def last_touches(self) -> list[tuple[Buffer, str, Point]]:
        """(buffer, stream, its last touch there)"""
        return [(b, s, point) for (b, s), point in self._last.items() if isinstance(b, Buffer)]

    def is_after(self, later: Point, point: Point) -> bool:
        """Whether the node at ``later``, which has been visited, is ordered after ``point``."""
        return self._snapshots[later].get(point[0], -1) >= point[1]

    def _entry(self, buffer: Place) -> list[_Touch]:
        """The touches of a buffer before the schedule starts; none is ordered after another."""
        if not isinstance(buffer, Buffer) and buffer not in self._placeholders:
            return []  # a value of this schedule does not exist before
        on_host = isinstance(buffer, Buffer) and buffer.on_host
        before = [_Touch(Access(buffer), (_ISSUED if on_host else MAIN, 0), True)]
        if isinstance(buffer, Buffer) and buffer in self.shared:
            before.append(_Touch(Access(buffer), (carried_event(buffer), 0), True))
        return before

    def _resolved(self, buffer: Place, point: Point) -> Point:
        """The carrier's past; or the carrier's use of the buffer in this schedule, which the carried event may stand
        for by then."""
        if point[0] == _ISSUED:
            return MAIN, 0
        if isinstance(buffer, Buffer) and point[0] == carried_event(buffer):
            return self.last_touch(buffer, buffer.carrier) or point
        return point

    def _knows(self, clock: Clock, stream: str, point: Point) -> bool:
        """Whether a node with this clock on ``stream`` is ordered after ``point``. Everything on the carrier in this
        schedule comes after its past."""
        source, position = point
        buffer = carried_by(source)
        if buffer is not None:
            side = buffer.carrier
            return stream == side or clock.get(side, 0) > 0 or clock.get(source, -1) >= position
        return clock.get(source, -1) >= position

    def _event(self, point: Point) -> str:
        source = point[0]
        if carried_by(source) is not None:
            return source
        if point not in self._events:
            self._events[point] = f"{self.prefix}{len(self._events)}"
            if point in self.nodes:
                place = self.graph.inserting_after(self.nodes[point])
            else:  # the main stream at entry
                place = self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder"))
            with place:
                put(self.graph, RecordEvent(self._events[point]), stream=source)
        return self._events[point]


def _covers(a: Access, b: Access) -> bool:
    return a.start <= b.start and b.stop <= a.stop
