"""Writes all the gradients of a bucket at once, after the last of them.

A bucket is complete if this graph deposits every slot of it once. Stage 2, bucket 2 complete, ring of two::

    deposit(2, 0, %mm)                     %mm, %sum ...
    %sum = aten.sum(...)            ->     flatten_cast(2, "flat_grad[0]", (0, 1), [%mm, %sum])
    deposit(2, 1, %sum)

The k-th complete bucket of a graph uses ring buffer k mod num_buffers. In stage 2 the pass leaves an incomplete bucket
alone, but moves its deposits down to the next bucket's write (or the output), where they cut no further segment. Stage
1 adds gradients to the accumulator, so an incomplete bucket is written in the same way::

    deposit(2, 0, %mm)              ->     accumulate_cast(2, "acc[2]", (0,), [%mm])
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import by_bucket, op_of, put_after
from zc.schedule.spec import AccumulateCast, Cast, Deposit, FlattenCast


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    writes: list[fx.Node] = []
    for bucket, deposits in by_bucket(new, Deposit).items():
        by_slot = sorted((op for _, op in deposits), key=lambda op: op.slot)
        slots, grads = tuple(op.slot for op in by_slot), tuple(op.grad for op in by_slot)
        write: Cast = AccumulateCast(bucket, Buffer("acc", bucket), slots, grads)
        if plan.placement.shards_gradients:
            if slots != tuple(range(len(plan.buckets[bucket].slots))):
                continue
            write = FlattenCast(bucket, Buffer("flat_grad", len(writes) % plan.num_buffers), slots, grads)
        writes.append(put_after(new, deposits[-1][0], write))
        for node, _ in deposits:
            new.erase_node(node)
    _sink_deposits(new, set(writes))
    return new


def _sink_deposits(graph: fx.Graph, writes: set[fx.Node]) -> None:
    waiting: list[fx.Node] = []
    for node in list(graph.nodes):
        if isinstance(op_of(node), Deposit):
            waiting.append(node)
        elif node in writes or node.op == "output":
            for moved in waiting:
                node.prepend(moved)
            waiting = []


PASS = Pass("bucket_gradients", run, requires=frozenset({"deposits"}), provides=frozenset({"writes"}))
