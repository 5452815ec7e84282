"""Gives every node the stream of its kind (`zc.schedule.spec`).

Before and after (the stream in front, as `zc.schedule.nodes.text` prints it)::

    segment("segment_0", %x)                                  compute | segment("segment_0", %x)
    flatten_cast(0, "flat_grad[0]", (0,), [%g])        ->     compute | flatten_cast(0, "flat_grad[0]", (0,), [%g])
    launch_reduce(0, "recv[0]", "flat_grad[0]")                  comm | launch_reduce(0, "recv[0]", "flat_grad[0]")

Placeholders, getitems and the output get none. Without ``plan.overlap`` communication runs on compute. Copies and the
processor's work keep their streams, since the processor must be able to wait for a single copy.

`spread_producers(n)` is the same pass with the producers dealt in turn over n compute streams, so that several streams
fill one bucket (deepspeed#8061)::

    segment("segment_0", %x)                                  compute | segment("segment_0", %x)
    segment("segment_1", %y)                           ->   compute.1 | segment("segment_1", %y)

It leaves two kinds of segments on compute: those whose results leave the schedule (returned or deposited), because no
later schedule waits for the stream that owns the storage; and those that share storage with their inputs (donated
inputs, views).
"""

from __future__ import annotations

from itertools import count

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule import spec
from zc.schedule.buffer import COMM, COMM_HOST, COMPUTE
from zc.schedule.nodes import op_of, ops, results
from zc.schedule.spec import Op


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    return _place(graph, plan, num_producers=1)


def _place(graph: fx.Graph, plan: Plan, num_producers: int) -> fx.Graph:
    new = copy_graph(graph)
    turn = count()
    for node, op in ops(new):
        node.meta["stream"] = _stream(op, plan)
        if num_producers > 1 and plan.overlap and _may_move(node, op):
            k = next(turn) % num_producers
            node.meta["stream"] = f"{COMPUTE}.{k}" if k else COMPUTE
    return new


def _stream(op: Op, plan: Plan) -> str:
    if op.stream != COMM:
        return op.stream
    if not plan.overlap:
        return COMPUTE
    in_memory = isinstance(op, spec.ReduceRows) or (isinstance(op, spec.Signal) and not op.buffer.holds_weights)
    return COMM_HOST if in_memory and plan.reduces_twice else COMM


def _may_move(node: fx.Node, op: Op) -> bool:
    if isinstance(op, spec.WgradInto):
        return True
    if not isinstance(op, spec.Segment):
        return False
    body = node.meta.get("segment")
    if body is not None and body.meta.get("donated"):
        return False
    values = results(node)
    storages = {n.meta.get("storage") for n in values} - {None}
    if storages & {n.meta.get("storage") for n in op.inputs}:
        return False
    return not any(user.op == "output" or isinstance(op_of(user), spec.Deposit) for n in values for user in n.users)


def spread_producers(num: int) -> Pass:
    """`PASS` over ``num`` compute streams: compute, compute.1, ..."""
    if num < 1:
        raise ValueError(f"producers need at least 1 stream, got {num}")
    return PASS._replace(run=lambda graph, plan: _place(graph, plan, num))


PASS = Pass("place_on_streams", run, provides=frozenset({"streams"}))
