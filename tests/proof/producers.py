"""Several compute streams that fill one bucket (deepspeed#8061). zc itself has one; the proof is about any number."""

from __future__ import annotations

from itertools import count

from torch import fx

from zc.passes import place_on_streams
from zc.passes.base import Pass
from zc.planning.plan import Plan
from zc.schedule import spec
from zc.schedule.buffer import COMPUTE
from zc.schedule.nodes import op_of, ops, results
from zc.schedule.spec import Op


def spread_producers(num: int) -> Pass:
    """`place_on_streams` with the producers dealt in turn over ``num`` compute streams: compute, compute.1, ...

    segment("segment_0", %x)                                  compute | segment("segment_0", %x)
    segment("segment_1", %y)                           ->   compute.1 | segment("segment_1", %y)
    """

    def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
        new, turn = place_on_streams.run(graph, plan), count()
        for node, op in ops(new):
            if plan.overlap and _may_move(node, op):
                k = next(turn) % num
                node.meta["stream"] = f"{COMPUTE}.{k}" if k else COMPUTE
        return new

    return place_on_streams.PASS._replace(run=run)


def _may_move(node: fx.Node, op: Op) -> bool:
    """Two kinds of segments stay on compute: those whose results leave the schedule (returned or deposited), because no
    later schedule waits for the stream that owns the storage; and those that share storage with their inputs (donated
    inputs, views)."""
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
