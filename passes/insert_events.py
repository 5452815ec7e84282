"""Inserts the record/wait pairs that are needed, and no other: from the nodes' accesses alone, with one vector clock
per stream.

Before and after, buffer ``flat_grad[0]`` written on compute and read on comm::

    compute | flatten_cast(0, "flat_grad[0]", ...)            compute | wait_event("done/flat_grad[0]")
       comm | launch_reduce(0, "recv[0]", "flat_grad[0]")     compute | flatten_cast(0, "flat_grad[0]", ...)
                                                       ->     compute | record_event("e0")
                                                                 comm | wait_event("e0")
                                                                 comm | launch_reduce(0, "recv[0]", "flat_grad[0]")
                                                                 ...
                                                                 comm | record_event("done/flat_grad[0]")

The wait in front is for an earlier schedule's reduction out of the same ring buffer; the record at the end is for a
later one's (carried events: zc.schedule.buffer; docs/proof.md has the contract). A value that another stream uses gets
its ``release`` at the first place on its own stream that is ordered after all uses anyway, else at the end. Compute
streams beside the main stream are joined into it at the end. Without plan.overlap all is on one stream, and the pass
inserts nothing.

No wait is redundant. The pass puts one in front of a node only for a conflict that neither the nodes before it nor the
other waits there order. Later waits order later nodes only. Vector clocks: Mattern 1989; FastTrack, PLDI 2009.
"""

from __future__ import annotations

import bisect

from torch import fx

from zc.errors import PassError
from zc.passes._timeline import Point, Timeline
from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import MAIN, Buffer, carried_event
from zc.schedule.nodes import accesses, is_schedule_node, maker, ops, put, results, shared_buffers, stream_of
from zc.schedule.spec import LaunchReduce, Op, RecordEvent, Release, Sync, WaitReduce


def run(graph: fx.Graph, plan: Plan, prefix: str = "e") -> fx.Graph:
    """``prefix``: of the names of all events but the carried ones."""
    new = copy_graph(graph)
    nodes = list(ops(new))
    if any(isinstance(op, Sync) for _, op in nodes):
        return new
    shared = shared_buffers(new, plan)
    timeline = Timeline(new, shared, prefix)
    in_flight: dict[fx.Node, LaunchReduce] = {}
    for node, op in nodes:
        _refuse_in_flight(node, op, in_flight)
        timeline.visit(node)
    sides = sorted({stream_of(node) for node, _ in nodes} - {MAIN})
    lasting = {b.carrier for b in timeline.touches if isinstance(b, Buffer)}
    crossing = _crossing(new)
    values = {s: [v for v in crossing if _owner_of(v) == s] for s in (MAIN, *sides)}
    early: dict[fx.Node, list[fx.Node]] = {}
    late = _release_early(values[MAIN], MAIN, timeline, early)
    _join_main(new, [s for s in sides if s not in lasting], late, _uncovered(timeline, lasting, shared), timeline)
    _release_late(new, late, MAIN, timeline)
    for stream in sides:
        _release_late(new, _release_early(values[stream], stream, timeline, early), stream, timeline)
    _record_carried(new, shared, timeline)
    for place, group in early.items():
        with new.inserting_after(place):
            put(new, Release(tuple(group)), stream=stream_of(place))
    return new


def _refuse_in_flight(node: fx.Node, op: Op, in_flight: dict[fx.Node, LaunchReduce]) -> None:
    """No wait can order a node after a completion that is issued later."""
    if isinstance(op, WaitReduce):
        in_flight.pop(op.work, None)
    for launch, exchange in in_flight.items():
        read, written = ({access.buffer for access in group} for group in accesses(node))
        touched = read & {exchange.dst} or written & {exchange.dst, exchange.src}
        if touched:
            raise PassError(f"{node.name} touches {min(map(str, touched))} while {launch.name} is in flight")
    if isinstance(op, LaunchReduce):
        in_flight[node] = op


def _owner_of(value: fx.Node) -> str:
    """The stream that returned a value, and whose allocations may reuse its storage."""
    return stream_of(maker(value))


def _users(value: fx.Node) -> list[fx.Node]:
    return [user for user in value.users if is_schedule_node(user)]


def _crossing(graph: fx.Graph) -> list[fx.Node]:
    """Values used on another stream than their own, whose allocator would reuse the storage too early. A value that the
    output returns is not among them: the caller frees it on the main stream, after the join."""
    return [
        v
        for node in graph.nodes
        for v in results(node)
        if any(stream_of(u) != _owner_of(v) for u in _users(v)) and not any(u.op == "output" for u in v.users)
    ]


def _release_early(
    values: list[fx.Node], stream: str, timeline: Timeline, early: dict[fx.Node, list[fx.Node]]
) -> list[fx.Node]:
    """Releases each value of a stream after the first node that comes after its uses anyway (into ``early``). Returns
    the values that have no such place."""
    late: list[fx.Node] = []
    nodes = timeline.nodes_on(stream)
    for value in values:
        uses = timeline.uses(value)
        k = bisect.bisect_left(nodes, True, key=lambda n: timeline.is_after(n, uses))
        if k == len(nodes):
            late.append(value)
        else:
            early.setdefault(nodes[k], []).append(value)
    return late


def _release_late(graph: fx.Graph, values: list[fx.Node], stream: str, timeline: Timeline) -> None:
    if values:
        with graph.inserting_before(graph.output_node()):
            node = put(graph, Release(tuple(values)), stream=stream)
        timeline.visit(node)


def _uncovered(timeline: Timeline, lasting: set[str], shared: frozenset[Buffer]) -> list[Point]:
    """Last uses of plan-owned buffers on another buffer's carrier, where their own carried event does not stand for
    them: main must come after these."""
    points: list[Point] = []
    for buffer, stream, point in timeline.last_touches():
        if stream in lasting - {MAIN, buffer.carrier}:
            last = timeline.last_touch(buffer, buffer.carrier) if buffer in shared else None
            if last is None or not timeline.is_after(timeline.nodes[last], [point]):
                points.append(point)
    return points


def _join_main(
    graph: fx.Graph, sides: list[str], late: list[fx.Node], uncovered: list[Point], timeline: Timeline
) -> None:
    """Orders the end of the main stream after the compute streams beside it, all uses of values that are returned or
    released ``late``, and uses that no carried event stands for. All at once, so that no wait implies another."""
    points: dict[str, int] = {side: timeline.length(side) for side in sides}
    for side, position in uncovered:
        points[side] = max(points.get(side, 0), position)
    uses = [timeline.uses(v, with_maker=True) for v in graph.output_node().all_input_nodes]
    uses += [timeline.uses(v) for v in late]
    for stream, position in (point for group in uses for point in group):
        points[stream] = max(points.get(stream, 0), position)
    timeline.order(graph.output_node(), timeline.unknown(MAIN, points))


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
