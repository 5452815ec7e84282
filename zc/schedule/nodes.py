"""The schedule: what a backward pass becomes.

A schedule is an ``fx.Graph`` whose call_function nodes have one of the targets below. Nothing runs these functions:
they are names. `zc.schedule.spec` has a record for each, with what it does; `op_of` reads a node's, `put` makes a node
of one. `zc.schedule.codegen` prints a schedule as Python that runs it, and `zc.verify` proves it; both look at the same
graph.

    placeholder    a value that exists on the main stream at entry; a parameter of a forward names the buffer that it is
                   a view of, meta["buffer"]
    output         what it returns is on the main stream at the end

Every node but placeholder, getitem and output has ``meta["stream"]``. The host stream is the processor. Only it, copies
on the copy stream, and the thread that issues schedules access host memory; that thread's own accesses are done when a
schedule begins (docs/proof.md).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import fx

from zc.errors import PassError
from zc.schedule import spec
from zc.schedule.buffer import MAIN, Access, Buffer, carried_by
from zc.schedule.spec import BucketOp, Op

if TYPE_CHECKING:
    from zc.planning.plan import Plan

OfBucket = TypeVar("OfBucket", bound=BucketOp)


def _target(kind: type[Op]) -> Callable[..., Any]:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a schedule's nodes are names; zc.schedule.codegen runs them")

    never.__name__ = never.__qualname__ = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    return never


def _kinds(of: type[Op]) -> Iterator[type[Op]]:
    """The kinds of nodes: the records that no other record extends."""
    narrower = of.__subclasses__()
    yield from (kind for each in narrower for kind in _kinds(each)) if narrower else (of,)


TARGETS = {kind: _target(kind) for kind in _kinds(Op)}  # ``flatten_cast`` for FlattenCast
_KINDS: dict[object, type[Op]] = {target: kind for kind, target in TARGETS.items()}


def is_schedule_node(node: fx.Node) -> bool:
    """True for nodes of the kinds above: what runs on a stream."""
    return node.op == "call_function" and node.target in _KINDS


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def op_of(node: fx.Node) -> Op | None:
    """The record of a node; None: it does not run on a stream. PassError: it does not look like its kind."""
    if not is_schedule_node(node):
        return None
    cached = node.meta.get("record")
    if cached is not None and cached[0] is node.args and cached[1] is node.kwargs:  # a change replaces these
        op: Op = cached[2]
        return op
    kind = _KINDS[node.target]
    try:
        op = read(kind, node.args, node.kwargs)
    except (TypeError, ValueError) as error:
        raise PassError(f"{node.name} is no {kind.__name__}: {error}") from error
    node.meta["record"] = (node.args, node.kwargs, op)
    return op


def put(graph: fx.Graph, op: Op, *, name: str | None = None, stream: str | None = None) -> fx.Node:
    """A new node, where the graph inserts."""
    node = graph.create_node("call_function", TARGETS[type(op)], *written(op), name=name)
    if stream is not None:
        node.meta["stream"] = stream
    op_of(node)
    return node


def put_after(graph: fx.Graph, node: fx.Node, *new: Op) -> fx.Node:
    """Puts one new node or more behind ``node``, in this order. Returns the last one."""
    for op in new:
        with graph.inserting_after(node):
            node = put(graph, op)
    return node


def change(node: fx.Node, op: Op) -> None:
    """The node becomes ``op``, of the same kind."""
    assert TARGETS[type(op)] is node.target
    node.args, node.kwargs = written(op)
    op_of(node)


def steps(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that run on a stream, in program order."""
    return (node for node in graph.nodes if is_schedule_node(node))


def ops(graph: fx.Graph) -> Iterator[tuple[fx.Node, Op]]:
    """The same with their records."""
    return ((node, op) for node in graph.nodes if (op := op_of(node)) is not None)


def by_bucket(graph: fx.Graph, *kinds: type[OfBucket]) -> dict[int, list[tuple[fx.Node, OfBucket]]]:
    """The nodes of these kinds for each bucket, with their records; buckets in the order of their last nodes."""
    result: dict[int, list[tuple[fx.Node, OfBucket]]] = {}
    for node, op in ops(graph):
        if isinstance(op, kinds):
            result[op.bucket] = [*result.pop(op.bucket, []), (node, op)]
    return result


def stream_of(node: fx.Node) -> str:
    """The node's stream; values at entry and outputs are on the main stream."""
    return MAIN if node.op in ("placeholder", "output") else str(node.meta["stream"])


def maker(value: fx.Node) -> fx.Node:
    """The node that made a value: a getitem's segment."""
    node: Any = value.args[0] if is_getitem(value) else value
    assert isinstance(node, fx.Node)
    return node


def item_of(value: fx.Node) -> int:
    """Which of a segment's results a getitem takes."""
    index: Any = value.args[1]
    assert isinstance(index, int)
    return index


def value(node: fx.Node) -> Access:
    """The access to all of the value that a node returns."""
    return Access(f"%{node.name}")


def results(node: fx.Node) -> tuple[fx.Node, ...]:
    """The values that a node returns: a segment's getitems."""
    op = op_of(node)
    if op is not None and op.returns_items:
        return tuple(user for user in node.users if is_getitem(user))
    return (node,) if node.op == "placeholder" else ()


def accesses(node: fx.Node) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """(reads, writes) of one node, from its record alone: its inputs and what its kind reads; what its kind writes and
    its results. A parameter as an input is a read of the buffer in which it lies."""
    inputs = tuple(value(n) for n in node.all_input_nodes)
    op = op_of(node)
    inputs += tuple(Access(Buffer.named(n.meta["buffer"])) for n in node.all_input_nodes if "buffer" in n.meta)
    returned = tuple(value(n) for n in results(node))
    if op is None:  # a placeholder, the output
        return inputs, returned
    return (
        inputs + tuple(access for field in op.read_fields for access in _accesses_of(op, field)),
        tuple(access for field in op.writes for access in _accesses_of(op, field)) + returned,
    )


def _accesses_of(op: Op, field: str) -> Iterator[Access]:
    buffer, extents = getattr(op, field), op.extents(field)
    if buffer is None:  # scratch that this one does without
        return
    if extents is None:
        yield Access(buffer)
    else:
        yield from (Access(buffer, *extent) for extent in extents)


def shared_buffers(graph: fx.Graph, plan: Plan) -> frozenset[Buffer]:
    """The plan-owned buffers that need a carried event: used on their carrier and on other streams, by this schedule
    or by others under the plan."""
    users: dict[Buffer, set[bool]] = {}
    for node, _ in ops(graph):
        for group in accesses(node):
            for buffer in (access.buffer for access in group):
                if isinstance(buffer, Buffer):
                    users.setdefault(buffer, set()).add(stream_of(node) == buffer.carrier)
    return frozenset(b for b, sides in users.items() if b.carrier != MAIN and (len(sides) == 2 or b.is_shared(plan)))


def summary(graph: fx.Graph) -> dict[str, int]:
    """Counts for explain: nodes, streams, events, waits."""
    nodes = list(ops(graph))
    return {
        "nodes": len(nodes),
        "streams": len({stream_of(node) for node, _ in nodes}),
        "events": len({op.event for _, op in nodes if isinstance(op, spec.RecordEvent)}),
        "waits": sum(isinstance(op, spec.WaitEvent) for _, op in nodes),
    }


def text(graph: fx.Graph) -> str:
    """The schedule, one line per node: stream, kind, arguments."""
    lines = []
    for node in steps(graph):
        returned = f"{', '.join(f'%{n.name}' for n in results(node))} = " if results(node) else ""
        args = ", ".join([*(str(a) for a in node.args), *(f"{key}={a}" for key, a in node.kwargs.items())])
        lines.append(f"{node.meta.get('stream', '-'):>10} | {returned}{kind_of(node)}({args})")
    return "\n".join(lines)


def kind_of(node: fx.Node) -> str:
    """The node's kind in words, ``flatten_cast``."""
    return "the output" if node.op == "output" else getattr(node.target, "__name__", str(node.target))


def _of(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:  # a bool is no number
            raise TypeError(f"no {kind.__name__}")
        return value

    return check


def _all(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check_all(values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            raise TypeError("no tuple")
        return tuple(check(value) for value in values)

    return check_all


def _span(value: Any) -> Any:
    start, stop = _all(_of(int))(value)
    return start, stop


def _event(name: Any) -> Any:
    carried_by(_of(str)(name))
    return name


class _Type(NamedTuple):
    """How a field of one type is read from an argument, and written as one."""

    read: Callable[[Any], Any]  # TypeError, ValueError: the argument does not look like that
    write: Callable[[Any], Any] = lambda value: value


_TYPES = {
    "int": _Type(_of(int)),
    "str": _Type(_of(str)),
    "tuple[int, ...]": _Type(_all(_of(int))),
    "Extent": _Type(_span),
    "Spans": _Type(_all(_span)),
    "EventName": _Type(_event),
    "Buffer": _Type(lambda name: Buffer.named(_of(str)(name)), str),
    "fx.Node": _Type(_of(fx.Node)),
    "Nodes": _Type(_all(_of(fx.Node)), list),
    "Operands": _Type(_all(_of(fx.Node))),  # one argument each
}


class _Layout(NamedTuple):
    """Fields by name. Keywords are left out where they have their default."""

    positional: dict[str, _Type]
    keywords: dict[str, _Type]
    defaults: dict[str, Any]  # of keywords; those that lack one are None
    has_operands: bool  # in the last positional field


_LAYOUTS: dict[type[Op], _Layout] = {}  # made when a kind is first used


def _layout(kind: type[Op]) -> _Layout:
    if kind not in _LAYOUTS:
        types = {f.name: str(f.type) for f in fields(kind)}
        positional = [f.name for f in fields(kind) if f.default is MISSING and not f.kw_only]
        _LAYOUTS[kind] = _Layout(
            {name: _TYPES[types[name]] for name in positional},
            {name: _TYPES[text.removesuffix(" | None")] for name, text in types.items() if name not in positional},
            {f.name: f.default for f in fields(kind) if f.default is not MISSING},
            types[positional[-1]] == "Operands",
        )
    return _LAYOUTS[kind]


def read(kind: type[Op], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Op:
    """The record of a node with these arguments. TypeError, ValueError: no node of this kind has them."""
    layout = _layout(kind)
    names = list(layout.positional)
    if layout.has_operands:
        args = (*args[: len(names) - 1], args[len(names) - 1 :])
    elif len(args) != len(names):
        raise ValueError(f"{len(args)} arguments, for {', '.join(names)}")
    types = layout.positional | layout.keywords
    items: dict[str, Any] = {}
    for name, item in (*zip(names, args, strict=False), *kwargs.items()):
        try:
            items[name] = types[name].read(item)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}={item!r}: {error}") from None
    return kind(**items)


def written(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node with this record."""
    layout = _layout(type(op))
    args = [type_.write(getattr(op, name)) for name, type_ in layout.positional.items()]
    if layout.has_operands:
        args += args.pop()
    items = ((name, type_, getattr(op, name)) for name, type_ in layout.keywords.items())
    return tuple(args), {name: t.write(item) for name, t, item in items if item != layout.defaults.get(name)}
