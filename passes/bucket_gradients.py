"""One write for all the gradients of a bucket, as soon as the last of them is there.

A bucket of which every slot is deposited once in this graph is complete. Stage 2, bucket 2 complete, ring of two::

    deposit(2, 0, %mm)                     %mm, %sum ...
    %sum = aten.sum(...)            ->     flatten_cast(2, "flat_grad[0]", (0, 1), [%mm, %sum])
    deposit(2, 1, %sum)

The k-th complete bucket of a graph takes ring buffer k mod num_buffers. An incomplete bucket of stage 2 is left alone,
but its deposits move down to the next bucket's write (or the output), so that they cut no segment of their own. In
stage 1 gradients are added to acc_flat, which always exists, so an incomplete bucket is written the same way::

    deposit(2, 0, %mm)              ->     accumulate_cast(2, "acc[2]", (0,), [%mm])
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import op_of, ops, put
from zc.schedule.spec import AccumulateCast, Cast, Deposit, FlattenCast


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    found: dict[int, list[tuple[fx.Node, Deposit]]] = {}  # bucket -> deposits in program order
    for node, op in ops(new):
        if isinstance(op, Deposit):
            found[op.bucket] = [*found.pop(op.bucket, []), (node, op)]  # buckets in the order of their last ones
    writes: list[fx.Node] = []
    for bucket, deposits in found.items():
        by_slot = sorted((op for _, op in deposits), key=lambda op: op.slot)
        slots, grads = tuple(op.slot for op in by_slot), tuple(op.grad for op in by_slot)
        write: Cast = AccumulateCast(bucket, Buffer("acc", bucket), slots, grads)
        if plan.placement.shards_gradients:
            if slots != tuple(range(len(plan.buckets[bucket].slots))):
                continue
            write = FlattenCast(bucket, Buffer("flat_grad", len(writes) % plan.num_buffers), slots, grads)
        with new.inserting_after(deposits[-1][0]):
            writes.append(put(new, write))
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
