"""Small schedules by chance, right ones and wrong ones, as a hypothesis strategy."""

from __future__ import annotations

import operator

from hypothesis import strategies as st
from schedules import make
from torch import fx

from zc.passes import insert_events
from zc.planning.plan import Plan
from zc.schedule.buffer import COMM, COMM_HOST, COPY, HOST, MAIN, Buffer
from zc.schedule.nodes import ops, put, steps, stream_of
from zc.schedule.spec import (
    CopyToDevice,
    CopyToHost,
    Finish,
    FlattenCast,
    Gather,
    RecordEvent,
    Reduce,
    Segment,
    StageShard,
    Sync,
    Take,
    Update,
    WaitEvent,
    WgradInto,
)

STREAMS = (MAIN, COMM, COMM_HOST)
OFFLOAD_STREAMS = (MAIN, COMM, COPY, HOST)
OFFLOAD_EVENTS = ("e0", "e1", "done/staging[0]", "done/host[0]", "done/master[0]", "done/acc[0]")
EVENTS = ("e0", "e1", "e2", "done/flat_grad[0]", "done/flat_grad[1]", "done/acc[0]")

ACC, SCRATCH, STAGING, HOST_GRAD, MASTER, FLAT_PARAM, FLAT_GRAD = (
    Buffer(kind, 0) for kind in ("acc", "scratch", "staging", "host", "master", "flat_param", "flat_grad")
)
_MOVES = (
    CopyToDevice(0, STAGING, HOST_GRAD), CopyToHost(0, HOST_GRAD, STAGING), StageShard(0, STAGING, ACC),
    Finish(0, STAGING, SCRATCH), Reduce(0, ACC, FLAT_GRAD), FlattenCast(0, FLAT_GRAD, (0,), ()),
    Update(0, MASTER, HOST_GRAD), CopyToDevice(0, FLAT_PARAM, MASTER), Gather(0, FLAT_PARAM),
)  # fmt: skip


@st.composite
def offloaded_schedules(draw: st.DrawFn) -> tuple[fx.Graph, Plan]:
    """The same with what offload adds, on any streams: copies, updates, buffers with other carriers."""
    plan = make(2, ring=2, stage=draw(st.sampled_from((1, 2))), offload=draw(st.sampled_from(("cpu", "device"))))
    graph = fx.Graph()
    for _ in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from(_MOVES))
        if isinstance(op, CopyToHost | CopyToDevice):
            stream = COPY
        else:
            stream = HOST if isinstance(op, Update) else draw(st.sampled_from((MAIN, COMM, COPY)))
        put(graph, op, stream=stream)
    graph.output(())
    if draw(st.booleans()):
        graph = insert_events.run(graph, plan)
        for _ in range(draw(st.integers(0, 2))):
            _edit(draw, graph)
    else:
        for _ in range(draw(st.integers(0, 6))):
            _insert(draw, graph, OFFLOAD_STREAMS, OFFLOAD_EVENTS)
    return graph, plan


@st.composite
def schedules(draw: st.DrawFn) -> tuple[fx.Graph, Plan]:
    """A graph of up to six operations on three streams, and its plan. Half of them got their events from
    insert_events and up to two edits, half by chance alone."""
    plan = make(2, ring=2, stage=draw(st.sampled_from((1, 2))))
    by_pass = draw(st.booleans())
    graph = _operations(draw)
    if by_pass:
        graph = insert_events.run(graph, plan)
        for _ in range(draw(st.integers(0, 2))):
            _edit(draw, graph)
    else:
        for _ in range(draw(st.integers(0, 6))):
            _insert(draw, graph)
    return graph, plan


def _operations(draw: st.DrawFn) -> fx.Graph:
    graph = fx.Graph()
    values = {stream: list[fx.Node]() for stream in STREAMS}  # a value is used on the stream that made it
    values[MAIN].append(graph.placeholder("x"))
    kinds = ("segment", "wgrad", "flatten", "take", "finish")

    for k in range(draw(st.integers(1, 6))):
        kind, stream = draw(st.sampled_from(kinds)), draw(st.sampled_from(STREAMS))
        index = draw(st.integers(0, 1))
        inputs = (draw(st.sampled_from(values[stream])),) if values[stream] else ()
        ring = Buffer("flat_grad", index)
        if kind == "segment":
            segment = put(graph, Segment(f"segment_{k}", inputs), stream=stream)
            values[stream].append(graph.call_function(operator.getitem, (segment, 0)))
        elif kind == "wgrad":
            slot = draw(st.integers(0, 1))
            put(graph, WgradInto(index, ring, slot, 2 * slot, 2 * slot + 2, inputs), stream=stream)
        elif kind == "flatten":
            put(graph, FlattenCast(index, ring, (0,), inputs), stream=stream)
        elif kind == "take":
            put(graph, Take(index, SCRATCH, draw(st.sampled_from((ring, ACC)))), stream=stream)
        elif kind == "finish":
            put(graph, Finish(0, ACC, SCRATCH), stream=stream)
    graph.output((draw(st.sampled_from(values[MAIN])),) if draw(st.booleans()) else ())
    return graph


def _insert(
    draw: st.DrawFn, graph: fx.Graph, streams: tuple[str, ...] = STREAMS, events: tuple[str, ...] = EVENTS
) -> None:
    """A record or a wait, anywhere."""
    nodes = [*steps(graph), graph.output_node()]
    with graph.inserting_before(nodes[draw(st.integers(0, len(nodes) - 1))]):
        op = draw(st.sampled_from((RecordEvent, WaitEvent)))(draw(st.sampled_from(events)))
        put(graph, op, stream=draw(st.sampled_from(streams)))


def _edit(draw: st.DrawFn, graph: fx.Graph) -> None:
    """Takes a wait away, moves a record or a wait by a few places, or adds a wait for what is recorded."""
    nodes = list(steps(graph))
    sync = [(node, op) for node, op in ops(graph) if isinstance(op, Sync)]
    if not sync:
        return
    chosen, op = draw(st.sampled_from(sync))
    how = draw(st.sampled_from(("delete", "move", "copy")))
    if how == "delete" and isinstance(op, WaitEvent):
        graph.erase_node(chosen)
    elif how == "move":
        nodes[max(0, nodes.index(chosen) - draw(st.integers(1, 3)))].prepend(chosen)
    else:
        streams = [s for s in (*STREAMS, *OFFLOAD_STREAMS) if s != stream_of(chosen)]
        with graph.inserting_after(chosen):
            put(graph, WaitEvent(op.event), stream=draw(st.sampled_from(streams)))
