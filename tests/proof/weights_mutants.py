"""Every way to break a pass of stage 3, or a graph with windows, by one edit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mutants import Mutant, edited
from torch import fx

from zc.schedule.buffer import COMM, Buffer, carried_by
from zc.schedule.nodes import change, item_of, op_of, ops, put, results, steps, stream_of
from zc.schedule.spec import (
    Deposit,
    FreeWeights,
    Gather,
    Op,
    ReadWeights,
    RecordEvent,
    Segment,
    Sync,
    TakeWeights,
    WaitEvent,
)

Made = Iterator[tuple[str, Mutant]]


def of(graph: fx.Graph, num_buckets: int, unit: int = 128) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the broken schedule)"""
    for kind, (name, edit) in (*_places(graph, num_buckets, unit), *_order(graph), *_missing(graph), *_events(graph)):
        yield kind, name, edited(graph, edit)


def _changed(node: fx.Node, op: Op) -> Mutant:
    return f"{node.name}: {op}", lambda g, where: change(where[node], op)


def _at(op: Gather | FreeWeights, start: int, stop: int) -> Op:
    """The same at other bytes."""
    if isinstance(op, FreeWeights):
        return replace(op, start=op.start + start, stop=op.stop + stop)
    assert op.extent is not None
    return replace(op, extent=(op.extent[0] + start, op.extent[1] + stop))


def _places(graph: fx.Graph, num_buckets: int, unit: int) -> Made:
    """Extents and buckets."""
    for node, op in ops(graph):
        if isinstance(op, Gather | FreeWeights):
            what = "gather" if isinstance(op, Gather) else "free"
            other = (op.bucket + 1) % num_buckets
            yield f"{what} too short", _changed(node, _at(op, 0, -unit))
            yield f"{what} too long", _changed(node, _at(op, 0, unit))
            yield f"{what} shifted", _changed(node, _at(op, unit, unit))
            if num_buckets > 1:
                yield f"{what} of another bucket", _changed(node, replace(op, bucket=other))
        if isinstance(op, Gather) and num_buckets > 1:
            yield "gather from another shard", _changed(node, replace(op, src=Buffer("weight", other)))
            yield "gather half aligned", _changed(node, _at(op, 64, 64))
            yield "gather into all of the arena", _changed(node, replace(op, extent=None))
        if isinstance(op, ReadWeights) and op.buckets:
            moved = tuple((start + unit, stop + unit) for start, stop in op.spans)
            yield "read shifted", _changed(node, replace(op, spans=moved))
            (start, stop), *rest = op.spans
            yield "read too short", _changed(node, replace(op, spans=((start, stop - unit), *rest)))
            if num_buckets > 1:
                others = tuple((bucket + 1) % num_buckets for bucket in op.buckets)
                yield "read of another bucket", _changed(node, replace(op, buckets=others))
            yield "read of one bucket less", _changed(node, replace(op, buckets=op.buckets[1:], spans=op.spans[1:]))
            yield "use number", _changed(node, replace(op, use=op.use + 1))


def _order(graph: fx.Graph) -> Made:
    """Nodes at other places, and on other streams."""
    nodes = [node for node in steps(graph) if not isinstance(op_of(node), Sync)]
    for k, node in enumerate(nodes):
        op = op_of(node)
        if isinstance(op, FreeWeights):
            reads = [n for n in nodes[:k] if isinstance(op_of(n), ReadWeights)]
            for read in reads[-2:]:
                name = f"{node.name} before {read.name}"
                yield "free moved up", (name, lambda g, w, n=node, r=read: w[r].prepend(w[n]))
            after = next((n for n in nodes[k:] if isinstance(op_of(n), Gather)), None)
            if after is not None:
                name = f"{node.name} after {after.name}"
                yield "free moved down", (name, lambda g, w, n=node, a=after: w[a].append(w[n]))
            yield "free on comm", (node.name, lambda g, w, n=node: w[n].meta.update(stream=COMM))
        if isinstance(op, Gather):
            reads = [(n, read) for n in nodes[k:] if isinstance(read := op_of(n), ReadWeights)]
            read = next((n for n, of in reads if op.bucket in of.buckets), None)
            if read is not None:
                name = f"{node.name} after {read.name}"
                yield "gather moved down", (name, lambda g, w, n=node, r=read: w[r].append(w[n]))
            frees = [n for n in nodes[:k] if isinstance(op_of(n), FreeWeights)]
            if frees:
                name = f"{node.name} before {frees[-1].name}"
                yield "gather moved up", (name, lambda g, w, n=node, f=frees[-1]: w[f].prepend(w[n]))
        if isinstance(op, ReadWeights):
            yield "read on comm", (node.name, lambda g, w, n=node: w[n].meta.update(stream=COMM))
            before = [n for n in nodes[:k] if isinstance(op_of(n), Gather)]
            if before:
                name = f"{node.name} before {before[-1].name}"
                yield "read moved up", (name, lambda g, w, n=node, b=before[-1]: w[b].prepend(w[n]))


def _missing(graph: fx.Graph) -> Made:
    gathered = set[int]()
    for node, op in ops(graph):
        if isinstance(op, Gather):
            kind = "second gather forgotten" if op.bucket in gathered else "gather forgotten"
            gathered.add(op.bucket)
        elif isinstance(op, FreeWeights | ReadWeights):
            kind = "free forgotten" if isinstance(op, FreeWeights) else "read forgotten"
        elif isinstance(op, WaitEvent):
            kind = "no wait"
        elif isinstance(op, RecordEvent) and carried_by(op.event) is not None:
            kind = "no carried event"
        else:
            continue
        yield kind, (node.name, lambda g, w, n=node: g.erase_node(w[n]))
        if not isinstance(op, RecordEvent | WaitEvent):
            name = "gather" if isinstance(op, Gather) else {FreeWeights: "free", ReadWeights: "read"}[type(op)]
            yield f"{name} doubled", (node.name, lambda g, w, n=node, op=op: _double(g, w[n], op))


def _double(graph: fx.Graph, node: fx.Node, op: Op) -> None:
    with graph.inserting_after(node):
        put(graph, op, stream=stream_of(node))


def _events(graph: fx.Graph) -> Made:
    """Records before what they stand for, and waits after what they are for."""
    lanes: dict[str, list[fx.Node]] = {}
    for node in steps(graph):
        lanes.setdefault(stream_of(node), []).append(node)
    for lane in lanes.values():
        for k, node in enumerate(lane):
            op = op_of(node)
            before = next((n for n in reversed(lane[:k]) if not isinstance(op_of(n), Sync)), None)
            after = next((n for n in lane[k:] if not isinstance(op_of(n), Sync)), None)
            if isinstance(op, RecordEvent) and before is not None:
                name = f"{op.event} before {before.name}"
                yield "record too early", (name, lambda g, w, n=node, b=before: w[b].prepend(w[n]))
            if isinstance(op, WaitEvent) and after is not None:
                name = f"{op.event} after {after.name}"
                yield "wait too late", (name, lambda g, w, n=node, a=after: w[a].append(w[n]))


# --- graphs with windows ---


def of_windows(graph: fx.Graph) -> Iterator[tuple[str, str, fx.Graph]]:
    for kind, (name, edit) in _windows(graph):
        yield kind, name, edited(graph, edit)


def _windows(graph: fx.Graph) -> Made:
    takes = [node for node, op in ops(graph) if isinstance(op, TakeWeights)]
    output = graph.output_node()
    params = {n.meta["weight"]: n for n in graph.nodes if "weight" in n.meta}
    for k, take in enumerate(takes):
        op = op_of(take)
        assert isinstance(op, TakeWeights)
        items = results(take)
        users = [n for n in steps(graph) if set(n.all_input_nodes) & set(items)]
        nodes = list(steps(graph))
        outside = [n for n in nodes if takes[k + 1 :] and nodes.index(n) > nodes.index(takes[k + 1])]
        outside = [n for n in outside if isinstance(op_of(n), Segment)]
        yield "take on another stream", (take.name, lambda g, w, n=take: w[n].meta.update(stream=COMM))
        if not op.places:
            yield "window left open", (take.name, lambda g, w, n=take: g.erase_node(w[n]))
            continue
        if users:
            name = f"{takes[k + 1].name} before {users[-1].name}"
            yield "window ended early", (name, lambda g, w, n=takes[k + 1], u=users[-1]: w[u].prepend(w[n]))
        wrong = ((op.places[0][0], 99), *op.places[1:])
        yield "no such parameter", (take.name, lambda g, w, n=take, p=wrong: change(w[n], TakeWeights(p)))
        for item in items:
            place = op.places[item_of(item)]
            yield "returned", (item.name, lambda g, w, v=item: _return(g, w[output], w[v]))
            for user in outside:
                name = f"%{item.name} in {user.name}"
                yield "read after its window", (name, lambda g, w, v=item, u=user: _read_also(w[u], w[v]))
            for user in users:
                name = f"%{params[place].name} in {user.name}"
                edit = lambda g, w, v=item, u=user, p=params[place]: w[u].replace_input_with(w[v], w[p])  # noqa: E731
                yield "parameter without bytes read", (name, edit)
                name = f"%{item.name} by {user.name}"
                yield "overwritten", (name, lambda g, w, v=item, u=user: _donate(w[u], w[v]))
                yield "read on another stream", (name, lambda g, w, u=user: w[u].meta.update(stream="compute.1"))
        for user in users:
            for view in (n for n in results(user) if "storage" in n.meta):
                yield "view returned", (view.name, lambda g, w, v=view: _return(g, w[output], w[v]))
                for after in outside:
                    name = f"%{view.name} in {after.name}"
                    yield "view read after its window", (name, lambda g, w, v=view, u=after: _read_also(w[u], w[v]))
                yield "view kept as a gradient", (view.name, lambda g, w, v=view, u=user: _deposit(g, w[u], w[v]))


def _return(graph: fx.Graph, output: fx.Node, value: fx.Node) -> None:
    output.args = ((*output.args[0], value),)  # type: ignore[misc]


def _read_also(user: fx.Node, value: fx.Node) -> None:
    op = op_of(user)
    assert isinstance(op, Segment)
    change(user, replace(op, inputs=(*op.inputs, value)))


def _donate(user: fx.Node, value: fx.Node) -> None:
    op = op_of(user)
    assert isinstance(op, Segment)
    body = fx.GraphModule({}, fx.Graph())
    body.meta["donated"] = (op.inputs.index(value),)
    user.meta["segment"] = body


def _deposit(graph: fx.Graph, user: fx.Node, value: fx.Node) -> None:
    last = max([user, value], key=list(graph.nodes).index)
    with graph.inserting_after(last):
        put(graph, Deposit(0, 0, value), stream=stream_of(user))
