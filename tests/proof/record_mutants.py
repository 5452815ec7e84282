"""Ways to break a schedule by one edit, made from the records of its nodes: a node gone, done twice, at another place
or on another stream; each field as another node of its kind has it, or off by an item or some bytes; another value read
or returned. Some do no harm: who knows nothing of the proof has to agree with it on which."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from mutants import Edit, edited
from torch import fx

from zc.errors import PassError
from zc.schedule.buffer import COMM, MAIN
from zc.schedule.nodes import change, op_of, ops, put, stream_of
from zc.schedule.spec import BucketOp, Op, Sync

IN_BYTES = ("start", "stop", "extent", "spans")
PAIRS = (("slots", "grads"), ("buckets", "spans"))  # which belong together item by item
STEP = 128  # bytes, to which extents are aligned


def of(graph: fx.Graph, every: int, seen: collections.Counter[str]) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the broken schedule), of each kind one in ``every`` edits, and the first, second, fourth
    and so on: ``seen`` counts them over several graphs. One after which it is no graph is left out."""
    for kind, name, edit in itertools.chain(_of_nodes(graph), _of_fields(graph), _of_values(graph)):
        seen[kind] += 1
        number = seen[kind]
        if number % every == 0 or number & (number - 1) == 0:
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
        rest = [n for n, other in nodes[k:] if isinstance(op, BucketOp) and getattr(other, "bucket", None) == op.bucket]
        if len(rest) > 1 and not any(n.users for n in rest):
            name = ", ".join(n.name for n in rest)
            yield f"{what} and the rest of its bucket erased", name, lambda g, w, r=rest: _erase(g, [w[n] for n in r])
            yield f"{what} and the rest of its bucket doubled", name, lambda g, w, r=rest: _again(g, [w[n] for n in r])
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


def _erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        graph.erase_node(node)


def _again(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        with graph.inserting_before(graph.output_node()):
            put(graph, op_of(node), stream=stream_of(node))


def _of_fields(graph: fx.Graph) -> Iterator[tuple[str, str, Edit]]:
    seen: dict[tuple[type[Op], str], list[Any]] = collections.defaultdict(list)
    for _, op in ops(graph):
        for field in fields(op):
            if (value := getattr(op, field.name)) not in seen[type(op), field.name]:
                seen[type(op), field.name].append(value)
    for node, op in ops(graph):
        own_fields = {field.name for field in fields(op)}
        for pair in (pair for pair in PAIRS if own_fields.issuperset(pair)):
            items = [getattr(op, name) for name in pair]
            for k in range(len(items[0])):
                shorter = {name: (*own[:k], *own[k + 1 :]) for name, own in zip(pair, items, strict=True)}
                yield f"{type(op).__name__} of one item less", f"{node.name} with {shorter}", _with(node, **shorter)
        for field in fields(op):
            own = getattr(op, field.name)
            others = [value for value in seen[type(op), field.name] if value != own]
            off = _off(own, field.name in IN_BYTES)
            for how, value in (*(("", value) for value in others[:3]), *off):
                if field.name not in ("places", "inputs") or len(value) == len(own):  # else others count wrongly
                    edit = _with(node, **{field.name: value})
                    yield f"{type(op).__name__}.{field.name}{how}", f"{node.name} with {value}", edit


def _off(value: Any, in_bytes: bool) -> Iterator[tuple[str, Any]]:
    """How, and the value: one item less; and what counts bytes or elements, by some more or less."""
    if isinstance(value, tuple) and value:
        if not in_bytes or isinstance(value[0], tuple):
            yield " of one less", value[1:]
        for k in range(len(value)) if in_bytes else ():
            for how, other in _off(value[k], in_bytes):
                yield how, (*value[:k], other, *value[k + 1 :])
    elif in_bytes and isinstance(value, int):
        yield from ((f" {by:+}", value + by) for by in (-STEP, -1, 1, STEP))


def _with(node: fx.Node, **values: Any) -> Edit:
    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        changed = {name: fx.map_arg(value, lambda n: where[n]) for name, value in values.items()}
        change(where[node], replace(op_of(where[node]), **changed))

    return edit


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
