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
from zc.schedule.nodes import accumulate_cast, deposit, flatten_cast


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    found: dict[int, list[fx.Node]] = {}  # bucket -> deposits in program order
    for node in new.nodes:
        if node.op == "call_function" and node.target is deposit:
            found.setdefault(int(node.args[0]), []).append(node)
    writes: list[fx.Node] = []
    by_readiness = sorted(found.items(), key=lambda item: _position(new, item[1][-1]))
    for bucket, deposits in by_readiness:
        if not plan.placement.gradient_in_ring:
            writes.append(_merge(new, accumulate_cast, bucket, f"acc[{bucket}]", deposits))
        elif sorted(_slot(d) for d in deposits) == list(range(len(plan.buckets[bucket].slots))):
            ring = len(writes) % plan.num_buffers
            writes.append(_merge(new, flatten_cast, bucket, f"flat_grad[{ring}]", deposits))
    _sink_deposits(new, set(writes))
    return new


def _slot(node: fx.Node) -> int:
    return int(str(node.args[1]))


def _position(graph: fx.Graph, node: fx.Node) -> int:
    return list(graph.nodes).index(node)


def _merge(graph: fx.Graph, target: object, bucket: int, buffer: str, deposits: list[fx.Node]) -> fx.Node:
    by_slot = sorted(deposits, key=_slot)
    slots, grads = tuple(_slot(d) for d in by_slot), [d.args[2] for d in by_slot]
    with graph.inserting_after(deposits[-1]):
        write = graph.call_function(target, (bucket, buffer, slots, grads))  # type: ignore[arg-type]
    for node in deposits:
        graph.erase_node(node)
    return write


def _sink_deposits(graph: fx.Graph, writes: set[fx.Node]) -> None:
    waiting: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is deposit:
            waiting.append(node)
        elif node in writes or node.op == "output":
            for moved in waiting:
                node.prepend(moved)
            waiting = []


PASS = Pass("bucket_gradients", run, requires=frozenset({"deposits"}), provides=frozenset({"writes"}))
