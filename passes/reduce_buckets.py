"""Reduces each complete bucket right after its write, if this backward reduces: in stage 2 always, in stage 1
outside of `zc.no_sync`.

Stage 2, bucket 2 in ring buffer 0, where ranks read each other's memory, and where they exchange messages::

    flatten_cast(2, "flat_grad[0]", ...)    ->    flatten_cast(2, "flat_grad[0]", ...)
                                                  reduce(2, "acc[2]", "flat_grad[0]")

                                            ->    flatten_cast(2, "flat_grad[0]", ...)
                                                  take(2, "scratch[0]", "flat_grad[0]")
                                                  finish(2, "acc[2]", "scratch[0]")

The plan has the hops of a reduction (`zc.planning.plan`), and each starts from what the one before has left. Two hosts
of several ranks, with memory, and with messages, whose sum lies at the start of the buffer that was sent::

    reduce(2, "host_sum[0]", "flat_grad[0]")      or     take(2, "scratch[0]", "flat_grad[0]")
                                                         finish(2, "flat_grad[0]", "scratch[0]")
    take(2, "scratch[0]", "host_sum[0]", hop=1)          take(2, "scratch[0]", "flat_grad[0]", hop=1)
    finish(2, "acc[2]", "scratch[0]", hop=1)             finish(2, "acc[2]", "scratch[0]", hop=1)

Stage 1 sends the accumulator itself. The pass leaves alone a bucket of which this graph writes only some slots: the
boundary reduces it. With one rank nothing is sent: stage 2 reduces from the flat_grad, and stage 1 is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import NUM_HOST_SUMS, Into, Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import by_bucket, put_after
from zc.schedule.spec import Cast, Finish, Reduce, Take, WgradInto, Write


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    if not plan.reduces:
        return new
    writes: dict[int, list[tuple[fx.Node, Write]]] = by_bucket(new, Cast, WgradInto)
    complete = [b for b, own in writes.items() if is_complete([op for _, op in own], plan)]
    for k, bucket in enumerate(complete):
        last, _ = writes[bucket][-1]
        insert_reduction(new, plan, last, bucket, k)
    return new


def is_complete(writes: Sequence[Write], plan: Plan) -> bool:
    """Whether ``writes`` of one bucket bring all its gradients."""
    slots = {k for op in writes for k in op.slots}
    return len(slots) == len(plan.buckets[writes[0].bucket].slots)


def insert_reduction(graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, turn: int) -> None:
    """Reduces one bucket, after the node ``after``. ``turn``: which buffer of each ring it uses."""
    # one scratch is enough: only hops by messages use it, and these follow each other on comm
    acc, scratch = Buffer("acc", bucket), Buffer("scratch", 0)
    src = Buffer("flat_grad", turn % plan.num_buffers) if plan.placement.shards_gradients else acc
    sums = {Into.ACCUMULATOR: acc, Into.HOST_SUM: Buffer("host_sum", turn % NUM_HOST_SUMS)}
    for hop in plan.hops:
        dst = sums.get(hop.into, src)
        if hop.is_direct:
            after = put_after(graph, after, Reduce(bucket, dst, src, hop.number))
        else:
            parts = Take(bucket, scratch, src, hop.number), Finish(bucket, dst, scratch, hop.number)
            after = put_after(graph, after, *parts)
        src = dst


PASS = Pass("reduce_buckets", run, requires=frozenset({"writes"}), provides=frozenset({"reductions"}))
