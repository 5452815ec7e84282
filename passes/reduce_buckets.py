"""Each complete bucket is reduced right after its write, if this backward reduces (stage 2, or the boundary in stage
1).

Stage 2, bucket 2 in ring buffer 0::

    flatten_cast(2, "flat_grad[0]", ...)    ->    flatten_cast(2, "flat_grad[0]", ...)
                                                  %w = launch_reduce(2, "recv[0]", "flat_grad[0]")
                                                  wait_reduce(2, %w, "recv[0]", "flat_grad[0]")
                                                  accumulate(2, "acc[2]", "recv[0]")

Where ranks read each other's memory, ``reduce_rows(2, "acc[2]", "flat_grad[0]")`` is all of it.

With two levels the sum of a host's ranks is made so, and that is what is sent, to the ranks of the same number::

    sum_rows(2, "part[0]", "flat_grad[0]")
    %w = launch_reduce(2, "recv[0]", "part[0]")
    wait_reduce(2, %w, "recv[0]", "part[0]")
    accumulate(2, "acc[2]", "recv[0]")

With replicas (a mesh of two dimensions) the sum over the ranks of ``shard`` is made so, or of rows in messages, and
goes on to the replicas::

    %w = launch_reduce(2, "recv[0]", "flat_grad[0]")            sum_rows(2, "part[0]", "flat_grad[0]")
    wait_reduce(2, %w, "recv[0]", "flat_grad[0]")         or
    sum_received(2, "part[0]", "recv[0]")
    reduce_replicas(2, "acc[2]", "part[0]", "recv[0]")          reduce_replicas(2, "acc[2]", "part[0]", "recv[0]")

Stage 1 sends acc_flat itself. A write that fills only a part of its bucket is left alone: it is reduced at the
boundary. With one rank there is nothing to send: stage 2 accumulates from the flat_grad, stage 1 is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import NUM_PARTS, Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import op_of, ops, put
from zc.schedule.spec import (
    Accumulate,
    LaunchReduce,
    Op,
    ReduceReplicas,
    ReduceRows,
    SumReceived,
    SumRows,
    WaitReduce,
    Write,
)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    if not plan.reduces:
        return new
    last: dict[int, fx.Node] = {}  # bucket -> its last write; buckets in the order of these
    writes: dict[int, list[Write]] = {}
    for node, op in ops(new):
        if isinstance(op, Write):
            last.pop(op.bucket, None)
            last[op.bucket] = node
            writes.setdefault(op.bucket, []).append(op)
    complete = [b for b in last if is_complete(writes[b], plan) and not _is_reduced(last[b])]
    for k, bucket in enumerate(complete):
        insert_reduction(new, plan, last[bucket], bucket, k)
    return new


def is_complete(writes: Sequence[Write], plan: Plan) -> bool:
    """Whether ``writes`` of one bucket bring all its gradients."""
    slots = {k for op in writes for k in op.slots}
    return len(slots) == len(plan.buckets[writes[0].bucket].slots)


def insert_reduction(graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, turn: int) -> None:
    """Launch, completion and accumulation of one bucket, behind ``after``. ``turn``: whose of the rings it is."""
    # one receive buffer is enough: launch, completion and accumulation of a bucket follow each other on one stream
    acc, src, dst = Buffer("acc", bucket), Buffer("flat_grad", turn % plan.num_buffers), Buffer("recv", 0)
    if not plan.placement.shards_gradients:
        src = acc
    if plan.num_ranks == 1:
        if src != acc:
            _behind(graph, after, Accumulate(bucket, acc, src))
        return
    if plan.reads_rows and not plan.has_parts:
        _behind(graph, after, ReduceRows(bucket, acc, src))
        return
    part = Buffer("part", turn % NUM_PARTS)
    if plan.has_parts and plan.reads_rows:
        after, src = _behind(graph, after, SumRows(bucket, part, src)), part
    elif plan.has_parts:
        after = _exchange(graph, after, bucket, dst, src)
        after, src = _behind(graph, after, SumReceived(bucket, part, dst)), part
    if plan.num_replicas > 1:
        _behind(graph, after, ReduceReplicas(bucket, acc, src, dst))
        return
    _behind(graph, _exchange(graph, after, bucket, dst, src), Accumulate(bucket, acc, dst))


def _exchange(graph: fx.Graph, after: fx.Node, bucket: int, dst: Buffer, src: Buffer) -> fx.Node:
    work = _behind(graph, after, LaunchReduce(bucket, dst, src))
    return _behind(graph, work, WaitReduce(bucket, work, dst, src))


def _behind(graph: fx.Graph, after: fx.Node, op: Op) -> fx.Node:
    with graph.inserting_after(after):
        return put(graph, op)


def _is_reduced(write: fx.Node) -> bool:
    """Whether a reduction follows already: a second run of the pass then changes nothing."""
    return isinstance(op_of(write.next), LaunchReduce | Accumulate | ReduceRows | SumRows | ReduceReplicas)


PASS = Pass("reduce_buckets", run, requires=frozenset({"writes"}), provides=frozenset({"reductions"}))
