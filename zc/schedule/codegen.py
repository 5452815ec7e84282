"""Prints a schedule as the Python that runs it: one statement per node, in program order.

    def schedule(v, streams, ops):
        on, record, wait = streams.run_on, streams.record, streams.wait
        on('compute', lambda: v.update(zip(('getitem',), ops.segment('segment_0', [v.pop('primals_1')]), strict=True)))
        on('compute', lambda: ops.flatten_cast(0, 'flat_grad[0]', (0,), [v.pop('getitem')]))
        record('e0', 'compute')
        wait('e0', 'comm')
        on('comm', lambda: ops.reduce(0, 'acc[0]', 'flat_grad[0]'))

``ops`` is `zc.engine.operations.Operations`, whose attributes are the functions of its table, and ``streams`` a
`zc.engine.streams.Streams`. ``v`` holds the values by name. A value leaves it at its last use in program order, in the
list that the segment gets, so that the segment can free it. Values that the output returns stay. `ReadWeights` and
`FreeWeights` are no statements: they stand for the reads of the graphs around them, so that the proof sees these.

With ``plan``, each statement that is no event goes through ``named``, with its node, its stream, and its name in traces
and NVTX: stream, kind, bucket; so does the moment at which weights are read or free. `zc.engine.ledger` has such a
function::

        on('comm', named('gather', 'comm', 'zc comm | gather bucket 1 (2.bias, ...)', lambda: ops.gather(1, ...)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from zc.schedule.nodes import is_getitem, item_of, kind_of, maker, ops, results, stream_of
from zc.schedule.spec import BucketOp, FreeWeights, Op, ReadWeights, RecordEvent, Segment, WaitEvent

if TYPE_CHECKING:
    from zc.planning.plan import Plan

Run = Callable[[dict[str, Any], Any, Any], None]  # of the values by name, the streams, and the operations
Named = Callable[[str, str, str, Callable[[], object]], Callable[[], object]]
RunNamed = Callable[[dict[str, Any], Any, Any, Named], None]  # of ``named``, too
LastUses = dict[fx.Node, fx.Node | None]  # where each value leaves ``v``; None: it stays


def generate(graph: fx.Graph) -> str:
    """The schedule's source."""
    return _function(list(ops(graph)), _last_uses(graph))


def load(graph: fx.Graph, plan: Plan | None = None) -> list[Any]:
    """A function for each of the `pieces`, a `Run` or with ``plan`` a `RunNamed`: called in order, they are the
    schedule."""
    last, functions = _last_uses(graph), []
    for piece in pieces(graph):
        namespace: dict[str, Any] = {}
        exec(compile(_function(piece, last, plan), "<zc schedule>", "exec"), namespace)
        functions.append(namespace["schedule"])
    return functions


def _function(nodes: Sequence[tuple[fx.Node, Op]], last: LastUses, plan: Plan | None = None) -> str:
    named = ", named" if plan is not None else ""
    lines = [
        f"def schedule(v, streams, ops{named}):",
        "    on, record, wait = streams.run_on, streams.record, streams.wait",
    ]
    for node, op in nodes:
        stream = stream_of(node)
        match op:
            case RecordEvent(event):
                lines.append(f"    record({event!r}, {stream!r})")
            case WaitEvent(event):
                lines.append(f"    wait({event!r}, {stream!r})")
            case ReadWeights() | FreeWeights() if plan is None:
                pass
            case _:
                task = f"lambda: {_call(node, op, last)}"
                if plan is not None:
                    task = f"named({node.name!r}, {stream!r}, {_trace_name(node, op, plan)!r}, {task})"
                lines.append(f"    on({stream!r}, {task})")
    return "\n".join(lines) + "\n"


def pieces(graph: fx.Graph) -> list[list[tuple[fx.Node, Op]]]:
    """The nodes of a schedule. Those of a pass of stage 3 for each use up to its read_weights, and the rest after the
    last use; those of any other one together."""
    parts: list[list[tuple[fx.Node, Op]]] = [[]]
    for node, op in ops(graph):
        parts[-1].append((node, op))
        if isinstance(op, ReadWeights):
            parts.append([])
    return parts


def _trace_name(node: fx.Node, op: Op, plan: Plan) -> str:
    """The name of a statement in traces: its stream, its kind, and its segment or bucket."""
    name = f"zc {stream_of(node)} | {kind_of(node)}"
    if isinstance(op, Segment):
        return f"{name} {op.key}"
    if isinstance(op, BucketOp):
        return f"{name} bucket {op.bucket} ({plan.bucket(op.bucket).slots[0].name}, ...)"
    return name


def _call(node: fx.Node, op: Op, last: LastUses) -> str:
    if isinstance(op, ReadWeights | FreeWeights):
        return "None"
    if isinstance(op, Segment):
        args = [repr(op.key), f"[{', '.join(_show(n, node, last) for n in op.inputs)}]"]
    else:
        args = [_show(arg, node, last) for arg in node.args] + [f"{key}={item!r}" for key, item in node.kwargs.items()]
    call = f"ops.{kind_of(node)}({', '.join(args)})"
    if op.returns_items:
        returned = results(node)
        names: list[str | None] = [None] * (1 + max(map(item_of, returned), default=-1))
        for item in returned:
            if item.users:
                names[item_of(item)] = item.name
        update = f"v.update(zip({tuple(names)!r}, {call}, strict=True))"
        return f"({update}, v.pop(None))" if None in names else update  # else it would stay there
    return call


def _show(arg: Any, node: fx.Node, last: LastUses) -> str:
    if isinstance(arg, fx.Node):
        is_taken = last.get(arg) is node and _times(node.args, arg) == 1
        return f"v.pop({arg.name!r})" if is_taken else f"v[{arg.name!r}]"
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(_show(item, node, last) for item in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
    return repr(arg)


def _times(args: Any, node: fx.Node) -> int:
    if isinstance(args, (list, tuple)):
        return sum(_times(item, node) for item in args)
    return int(args is node)


def _last_uses(graph: fx.Graph) -> LastUses:
    """The node at which each value leaves; None for a value that the output returns."""
    last: LastUses = {}
    for node in graph.nodes:
        for used in () if is_getitem(node) else node.all_input_nodes:
            assert stream_of(node) == stream_of(maker(used)), f"%{used.name} crosses streams"
            last[used] = node
    returned = graph.output_node().all_input_nodes
    return {node: None if node in returned else user for node, user in last.items()}
