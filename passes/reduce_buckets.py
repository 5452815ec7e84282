"""Reduces each complete bucket right after its write, if this backward reduces: in stage 2 always, in stage 1 before an
update.

Stage 2, bucket 2 in ring buffer 0::

    flatten_cast(2, "flat_grad[0]", ...)    ->    flatten_cast(2, "flat_grad[0]", ...)
                                                  exchange(2, "recv[0]", "flat_grad[0]")
                                                  accumulate(2, "acc[2]", "recv[0]")

Ranks that read each other's memory have one node instead, ``reduce_rows(2, "acc[2]", "flat_grad[0]")``.

Where a host or a replica (a mesh of two dimensions) has several ranks, a second reduction follows the first. The first
one, by either way, sums over these ranks into a ``host_sum``; the second one sends that sum, between the ranks of one
number on all hosts or between the replicas of one shard::

    reduce_rows(2, "host_sum[0]", "flat_grad[0]")     or     exchange(2, "recv[0]", "flat_grad[0]")
                                                             accumulate(2, "host_sum[0]", "recv[0]")
    exchange(2, "recv[0]", "host_sum[0]")
    accumulate(2, "acc[2]", "recv[0]")

Where the ranks of a host exchange messages instead (GPUs, say), the first level sums in place: the start of the buffer
that was sent holds the sum, and the second level sends that. So two levels need no buffer that one does not::

    exchange(2, "recv[0]", "flat_grad[0]", among="host")
    accumulate(2, "flat_grad[0]", "recv[0]", among="host")
    exchange(2, "recv[0]", "flat_grad[0]")
    accumulate(2, "acc[2]", "recv[0]")

Where gradients leave a host in 8 bits (`zc.planning.wire`), each rank encodes them before the launch, and decodes the
rows that it sums::

    flatten_cast(2, "flat_grad[0]", ...)    ->    flatten_cast(2, "flat_grad[0]", ...)
                                                  quantise(2, "wire[0]", "flat_grad[0]")
                                                  exchange(2, "recv[0]", "wire[0]")
                                                  accumulate_quantised(2, "acc[2]", "recv[0]")

Stage 1 sends the accumulator itself. The pass leaves alone a bucket of which this graph writes only some slots: the
boundary reduces it. With one rank nothing is sent: stage 2 accumulates from the flat_grad, and stage 1 is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import NUM_HOST_SUMS, Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import ops, put_after
from zc.schedule.spec import (
    WITHIN_HOST,
    Accumulate,
    AccumulateQuantised,
    Exchange,
    Quantise,
    ReduceRows,
    Write,
)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    if not plan.reduces:
        return new
    last: dict[int, fx.Node] = {}  # bucket -> its last write; buckets in the order of these
    writes: dict[int, list[Write]] = {}
    for node, op in ops(new):
        if isinstance(op, Write):
            last.pop(op.bucket, None)
            last[op.bucket] = node
            writes.setdefault(op.bucket, []).append(op)
    complete = [b for b in last if is_complete(writes[b], plan)]
    for k, bucket in enumerate(complete):
        insert_reduction(new, plan, last[bucket], bucket, k)
    return new


def is_complete(writes: Sequence[Write], plan: Plan) -> bool:
    """Whether ``writes`` of one bucket bring all its gradients."""
    slots = {k for op in writes for k in op.slots}
    return len(slots) == len(plan.buckets[writes[0].bucket].slots)


def insert_reduction(graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, turn: int) -> None:
    """Reduces one bucket, after the node ``after``. ``turn``: which buffer of each ring it uses."""
    acc, host_sum = Buffer("acc", bucket), Buffer("host_sum", turn % NUM_HOST_SUMS)
    src = Buffer("flat_grad", turn % plan.num_buffers) if plan.placement.shards_gradients else acc
    if plan.num_ranks == 1:
        if src != acc:
            put_after(graph, after, Accumulate(bucket, acc, src))
        return
    if plan.sums_in_place:
        after = _exchange(graph, plan, after, bucket, src, src, WITHIN_HOST)
    first = host_sum if plan.reduces_twice else acc
    if plan.reads_rows:
        after = put_after(graph, after, ReduceRows(bucket, first, src))
    else:
        after = _exchange(graph, plan, after, bucket, first, src)
    if plan.reduces_twice:
        _exchange(graph, plan, after, bucket, acc, host_sum)


def _exchange(
    graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, dst: Buffer, src: Buffer, among: str | None = None
) -> fx.Node:
    """dst <- src of all ranks, or of those of this host, by messages. Inside a host nothing is encoded."""
    # one receive buffer is enough: launch, completion and accumulation follow each other on one stream
    recv, is_encoded = Buffer("recv", 0), plan.reduce_bits > 0 and among is None
    if is_encoded:
        wire = Buffer("wire", 0)
        after, src = put_after(graph, after, Quantise(bucket, wire, src)), wire
    add = AccumulateQuantised(bucket, dst, recv) if is_encoded else Accumulate(bucket, dst, recv, among)
    return put_after(graph, after, Exchange(bucket, recv, src, among), add)


PASS = Pass("reduce_buckets", run, requires=frozenset({"writes"}), provides=frozenset({"reductions"}))
