"""Ways to break a pass of stage 3, or a graph with windows, by one edit. They are made from the records of its nodes: a
node gone, done twice, at another place or on another stream; and each field as another node of its kind has it, or by
some bytes off. Some do no harm: two that know nothing of each other have to agree on which."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from mutants import Edit, edited
from torch import fx

from zc.errors import PassError
from zc.schedule.buffer import COMM, MAIN
from zc.schedule.nodes import change, op_of, ops, put, stream_of
from zc.schedule.spec import Op, Sync

STEP = 64  # bytes: half of what extents are aligned to


def of(graph: fx.Graph) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the broken schedule). An edit after which it is no graph is left out."""
    for kind, name, edit in (*_of_nodes(graph), *_of_fields(graph), *_of_values(graph)):
        with contextlib.suppress(PassError, RuntimeError):
            yield kind, name, edited(graph, edit)


def _of_nodes(graph: fx.Graph) -> Iterator[tuple[str, str, Edit]]:
    nodes = list(ops(graph))
    for k, (node, op) in enumerate(nodes):
        what = type(op).__name__
        if not node.users:
            yield f"{what} erased", node.name, lambda g, w, n=node: g.erase_node(w[n])
            if not isinstance(op, Sync):
                yield f"{what} doubled", node.name, lambda g, w, n=node: _double(g, w[n])
        before = next((n for n, other in reversed(nodes[:k]) if not isinstance(other, Sync)), None)
        after = next((n for n, other in nodes[k + 1 :] if not isinstance(other, Sync)), None)
        if before is not None:
            yield f"{what} earlier", node.name, lambda g, w, n=node, b=before: w[b].prepend(w[n])
        if after is not None:
            yield f"{what} later", node.name, lambda g, w, n=node, a=after: w[a].append(w[n])
        if not isinstance(op, Sync):
            other = MAIN if stream_of(node) == COMM else COMM
            yield f"{what} on {other}", node.name, lambda g, w, n=node, s=other: w[n].meta.update(stream=s)


def _double(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        put(graph, op_of(node), stream=stream_of(node))


def _of_fields(graph: fx.Graph) -> Iterator[tuple[str, str, Edit]]:
    seen: dict[tuple[type[Op], str], list[Any]] = collections.defaultdict(list)
    for _, op in ops(graph):
        for field in fields(op):
            if (value := getattr(op, field.name)) not in seen[type(op), field.name]:
                seen[type(op), field.name].append(value)
    for node, op in ops(graph):
        for field in fields(op):
            own = getattr(op, field.name)
            others = [value for value in seen[type(op), field.name] if value != own]
            for value in (*others[:3], *_off(own if field.name not in ("bucket", "use") else None)):
                if field.name == "places" and len(value) != len(own):
                    continue  # its results would not be there
                yield f"{type(op).__name__}.{field.name}", f"{node.name} with {value}", _with(node, field.name, value)


def _off(value: Any) -> Iterator[Any]:
    """Extents and ends of extents, by some bytes; and one item less."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (value + STEP, value + 2 * STEP, value - 2 * STEP)
    elif isinstance(value, tuple) and value and isinstance(value[0], tuple):
        yield value[1:]
        yield from ((new, *value[1:]) for new in _off(value[0]))
    elif isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, int) for each in value):
        yield from ((value[0], value[1] - 2 * STEP), (value[0] + 2 * STEP, value[1] + 2 * STEP))
    elif isinstance(value, tuple) and value:
        yield value[1:]


def _with(node: fx.Node, name: str, value: Any) -> Edit:
    return lambda g, w: change(w[node], replace(op_of(w[node]), **{name: fx.map_arg(value, lambda n: w[n])}))


def _of_values(graph: fx.Graph) -> Iterator[tuple[str, str, Edit]]:
    """Each value read where another one was, and returned."""
    output = graph.output_node()
    for value in (n for n in graph.nodes if n is not output and op_of(n) is None):
        yield "returned", value.name, lambda g, w, v=value: _return(w[output], w[v])
        for node, op in ops(graph):
            for used in node.all_input_nodes:
                if used is not value and not isinstance(op, Sync):
                    name = f"%{value.name} for %{used.name} in {node.name}"
                    edit = lambda g, w, n=node, u=used, v=value: w[n].replace_input_with(w[u], w[v])  # noqa: E731
                    yield "another value", name, edit


def _return(output: fx.Node, value: fx.Node) -> None:
    output.args = ((*output.args[0], value),)  # type: ignore[misc]
