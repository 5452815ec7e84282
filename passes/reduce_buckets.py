"""Each complete bucket is reduced right after its write, if this backward reduces (stage 2, or the boundary in stage
1).

Stage 2, bucket 2 in ring buffer 0::

    flatten_cast(2, "flat_grad[0]", ...)    ->    flatten_cast(2, "flat_grad[0]", ...)
                                                  %w = launch_reduce(2, "recv[0]", "flat_grad[0]")
                                                  wait_reduce(2, %w, "recv[0]", "flat_grad[0]")
                                                  accumulate(2, "acc[2]", "recv[0]")

Stage 1 sends acc_flat itself. A write that fills only a part of its bucket is left alone: it is reduced at the
boundary. With one rank there is nothing to send: stage 2 accumulates from the flat_grad, stage 1 is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.nodes import (
    accumulate,
    accumulate_cast,
    flatten_cast,
    launch_reduce,
    slots_of,
    wait_reduce,
    wgrad_into,
)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    if not plan.reduces:
        return new
    complete = {b: nodes for b, nodes in writes_of(new).items() if is_complete(nodes, plan) and not _reduced(nodes[-1])}
    for k, (bucket, nodes) in enumerate(complete.items()):
        insert_reduction(new, plan, nodes[-1], bucket, k % plan.num_buffers)
    return new


def writes_of(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Bucket -> the nodes that write it; buckets in the order of their last ones."""
    writes: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (flatten_cast, accumulate_cast, wgrad_into):
            bucket = int(str(node.args[0]))
            writes[bucket] = [*writes.pop(bucket, []), node]
    return writes


def is_complete(writes: Sequence[fx.Node], plan: Plan) -> bool:
    """Whether ``writes`` of one bucket bring all its gradients."""
    slots = {k for node in writes for k in slots_of(node)}
    return len(slots) == len(plan.buckets[int(str(writes[0].args[0]))].slots)


def insert_reduction(graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, ring: int) -> None:
    """Launch, completion and accumulation of one bucket, behind ``after``."""
    # one receive buffer is enough: launch, completion and accumulation of a bucket follow each other on one stream
    acc, src, dst = f"acc[{bucket}]", f"flat_grad[{ring}]", "recv[0]"
    if not plan.placement.gradient_in_ring:
        src = acc
    if plan.world_size == 1:
        if src != acc:
            with graph.inserting_after(after):
                graph.call_function(accumulate, (bucket, acc, src))
        return
    with graph.inserting_after(after):
        work = graph.call_function(launch_reduce, (bucket, dst, src))
    with graph.inserting_after(work):
        done = graph.call_function(wait_reduce, (bucket, work, dst, src))
    with graph.inserting_after(done):
        graph.call_function(accumulate, (bucket, acc, dst))


def _reduced(write: fx.Node) -> bool:
    """Whether a reduction follows already: a second run of the pass then changes nothing."""
    return write.next.op == "call_function" and write.next.target in (launch_reduce, accumulate)


PASS = Pass("reduce_buckets", run, requires=frozenset({"writes"}), provides=frozenset({"reductions"}))
