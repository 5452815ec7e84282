"""Small schedules by chance, right ones and wrong ones, as a hypothesis strategy."""

from __future__ import annotations

import operator

from hypothesis import strategies as st
from schedules import make
from torch import fx

from zc.errors import PassError
from zc.passes import insert_events
from zc.planning.plan import Plan
from zc.schedule.nodes import (
    COMM,
    COPY,
    HOME,
    HOST,
    accumulate,
    copy_to_device,
    copy_to_host,
    flatten_cast,
    gather,
    launch_reduce,
    record_event,
    release,
    segment,
    stage_shard,
    steps,
    stream_of,
    update,
    wait_event,
    wait_reduce,
    wgrad_into,
)

STREAMS = (HOME, COMM, "compute.1")
OFFLOAD_STREAMS = (HOME, COMM, COPY, HOST)
OFFLOAD_EVENTS = ("e0", "e1", "done/staging[0]", "done/host[0]", "done/master[0]", "done/acc[0]")
EVENTS = ("e0", "e1", "e2", "done/flat_grad[0]", "done/flat_grad[1]", "done/acc[0]")


_MOVES = (
    (copy_to_device, ("staging[0]", "host[0]")), (copy_to_host, ("host[0]", "staging[0]")),
    (stage_shard, ("staging[0]", "acc[0]")), (accumulate, ("staging[0]", "recv[0]")),
    (accumulate, ("acc[0]", "flat_grad[0]")), (flatten_cast, ("flat_grad[0]", (0,), [])),
    (update, ("master[0]", "host[0]")), (copy_to_device, ("flat_param[0]", "master[0]")),
    (gather, ("flat_param[0]",)),
)  # fmt: skip


@st.composite
def offloaded_schedules(draw: st.DrawFn) -> tuple[fx.Graph, Plan]:
    """The same with what offload adds, on any streams: copies, updates, buffers with other carriers."""
    plan = make(2, ring=2, stage=draw(st.sampled_from((1, 2))), offload=draw(st.sampled_from(("cpu", "device"))))
    graph = fx.Graph()
    for _ in range(draw(st.integers(1, 6))):
        target, args = draw(st.sampled_from(_MOVES))
        node = graph.call_function(target, (0, *args))
        over_bus = target in (copy_to_host, copy_to_device)
        node.meta["stream"] = (
            COPY if over_bus else HOST if target is update else draw(st.sampled_from((HOME, COMM, COPY)))
        )
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
    graph = _operations(draw, with_release=not by_pass)
    if by_pass:
        try:
            graph = insert_events.run(graph, plan)
        except PassError:  # something stands between a launch and its completion: no wait can help
            return graph, plan
        for _ in range(draw(st.integers(0, 2))):
            _edit(draw, graph)
    else:
        for _ in range(draw(st.integers(0, 6))):
            _insert(draw, graph)
    return graph, plan


def _operations(draw: st.DrawFn, *, with_release: bool) -> fx.Graph:
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    flying: list[fx.Node] = []
    kinds = ["segment", "wgrad", "flatten", "launch", "wait", "accumulate"] + ["release"] * with_release

    def put(target: object, args: tuple[object, ...], stream: str | None = None) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["stream"] = stream or draw(st.sampled_from(STREAMS))
        return node

    def complete(launch: fx.Node) -> None:
        put(wait_reduce, (launch.args[0], launch, *launch.args[1:]))

    for k in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(kinds))
        index = draw(st.integers(0, 1))
        some = draw(st.sampled_from(values)) if values else None
        if kind == "segment":
            inputs = [] if some is None else [some]
            values.append(graph.call_function(operator.getitem, (put(segment, (f"segment_{k}", *inputs)), 0)))
        elif kind == "wgrad":
            slot = draw(st.integers(0, 1))
            inputs = [] if some is None else [some]
            put(wgrad_into, (index, f"flat_grad[{index}]", slot, 2 * slot, 2 * slot + 2, *inputs))
        elif kind == "flatten":
            put(flatten_cast, (index, f"flat_grad[{index}]", (0,), [] if some is None else [some]))
        elif kind == "launch":
            src = draw(st.sampled_from((f"flat_grad[{index}]", "acc[0]")))
            flying.append(put(launch_reduce, (index, "recv[0]", src)))
        elif kind == "wait" and flying:
            complete(flying.pop(0))
        elif kind == "accumulate":
            put(accumulate, (0, "acc[0]", "recv[0]"))
        elif kind == "release" and some is not None:
            put(release, (some,))
            values.remove(some)
    for launch in flying:
        complete(launch)
    graph.output((draw(st.sampled_from(values)),) if values and draw(st.booleans()) else ())
    return graph


def _insert(
    draw: st.DrawFn, graph: fx.Graph, streams: tuple[str, ...] = STREAMS, events: tuple[str, ...] = EVENTS
) -> None:
    """A record or a wait, anywhere."""
    nodes = [*steps(graph), graph.output_node()]
    with graph.inserting_before(nodes[draw(st.integers(0, len(nodes) - 1))]):
        made = graph.call_function(draw(st.sampled_from((record_event, wait_event))), (draw(st.sampled_from(events)),))
    made.meta["stream"] = draw(st.sampled_from(streams))


def _edit(draw: st.DrawFn, graph: fx.Graph) -> None:
    """Takes a wait away, moves a record or a wait by a few places, or adds a wait for what is recorded."""
    nodes = list(steps(graph))
    sync = [n for n in nodes if n.target in (record_event, wait_event)]
    if not sync:
        return
    chosen = draw(st.sampled_from(sync))
    how = draw(st.sampled_from(("delete", "move", "copy")))
    if how == "delete" and chosen.target is wait_event:
        graph.erase_node(chosen)
    elif how == "move":
        nodes[max(0, nodes.index(chosen) - draw(st.integers(1, 3)))].prepend(chosen)
    else:
        with graph.inserting_after(chosen):
            made = graph.call_function(wait_event, chosen.args)
        made.meta["stream"] = draw(
            st.sampled_from([s for s in (*STREAMS, *OFFLOAD_STREAMS) if s != stream_of(chosen)])
        )
