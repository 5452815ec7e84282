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
"""

from __future__ import annotations

from torch import fx

from zc.passes._timeline import Timeline
from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import MAIN, Buffer, carried_event
from zc.schedule.nodes import ops, put, shared_buffers, stream_of
from zc.schedule.spec import RecordEvent


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
            if last is None or not timeline.is_after(timeline.nodes[last], point):
                points[stream] = max(points.get(stream, 0), point[1])
    return points


def _record_carried(graph: fx.Graph, shared: frozenset[Buffer], timeline: Timeline) -> None:
    """After a shared buffer's last use on its carrier: the event that later schedules wait for."""
    last = {b: p for b in shared if (p := timeline.last_touch(b, b.carrier)) is not None}
    for buffer in sorted(last, key=str, reverse=True):  # after one node, the last one inserted comes first
        with graph.inserting_after(timeline.nodes[last[buffer]]):
            put(graph, RecordEvent(carried_event(buffer)), stream=buffer.carrier)


def with_prefix(prefix: str) -> Pass:
    """`PASS` for a schedule that runs piece by piece between others of its streams, whose events have other names."""
    return PASS._replace(run=lambda graph, plan: run(graph, plan, prefix))


PASS = Pass("insert_events", run, requires=frozenset({"streams"}), provides=frozenset({"events"}))
