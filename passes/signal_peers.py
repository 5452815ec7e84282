"""Puts a signal and a wait before each read of another rank's memory, and after it.

Before and after (stage 2, bucket 2 in ring buffer 0)::

                                                  signal_full(2, "flat_grad[0]")
                                                  await_full(2, "flat_grad[0]")
    reduce_rows(2, "acc[2]", "flat_grad[0]")  ->  reduce_rows(2, "acc[2]", "flat_grad[0]")
                                                  signal_free(2, "flat_grad[0]")
                                                  await_free(2, "flat_grad[0]")

They run on the stream of the read. So a node that waits until that stream has finished with the buffer, in this
schedule or a later one, also comes after the other ranks. The pass leaves exchanges by messages alone.
`zc.passes.across_ranks` has the proof.

Nobody writes a shard of the weights (stage 3) between two updates, so its gathers need no signals in a schedule
(`zc.engine.shard_reads`).
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.nodes import op_of, ops, put, put_after, read_of_peers
from zc.schedule.spec import AwaitFree, AwaitFull, BucketOp, SignalFree, SignalFull


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    for node, op in list(ops(new)):
        buffer = read_of_peers(op, plan)
        if buffer is None or isinstance(op_of(node.next), SignalFree):
            continue
        assert isinstance(op, BucketOp)
        bucket = op.bucket
        with new.inserting_before(node):
            put(new, SignalFull(bucket, buffer))
            put(new, AwaitFull(bucket, buffer))
        put_after(new, node, SignalFree(bucket, buffer), AwaitFree(bucket, buffer))
    return new


PASS = Pass("signal_peers", run, provides=frozenset({"signals"}))
