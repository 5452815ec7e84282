"""With offload: copies gradients between the device and the host memory that the update reads.

Accumulators in host memory visit the device for each backward, through a ring of staging buffers (stage 2, bucket 0)::

    flatten_cast(0, "flat_grad[0]", ...)                  copy_to_device(0, "staging[0]", "host[0]")
    reduce(0, "acc[0]", "flat_grad[0]")               ->  flatten_cast(0, "flat_grad[0]", ...)
                                                          reduce(0, "staging[0]", "flat_grad[0]")
                                                          copy_to_host(0, "host[0]", "staging[0]")

If the ring has two buffers, each copy to the device comes one bucket early, after the write of the bucket before. So
the bus works while that bucket is reduced. In stage 1 the whole partial sum visits the device, and ``accumulate_cast``
and the reduction use the staging buffer instead of ``acc[0]``.

Accumulators on the device are copied before an update, from a snapshot that the next backward does not touch::

    reduce(0, "acc[0]", "flat_grad[0]")               ->  reduce(0, "acc[0]", "flat_grad[0]")
                                                          stage_shard(0, "staging[0]", "acc[0]")
                                                          copy_to_host(0, "host[0]", "staging[0]")

The pass leaves deposits alone, and in stage 1 on the device a bucket of which only some slots are written. Without
``plan.offload`` it does nothing. The idea of a double-buffered bus: ZeRO-Offload, arXiv:2101.06840, section 4.
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Debt, Pass, copy_graph
from zc.passes.reduce_buckets import is_complete
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import by_bucket, change, put, put_after
from zc.schedule.spec import (
    BucketOp,
    Cast,
    CopyToDevice,
    CopyToHost,
    Reduction,
    StageShard,
    WgradInto,
    Write,
    renamed,
)

_Chain = list[tuple[fx.Node, BucketOp]]


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    if plan.offload is None:
        return new
    # for each bucket that this graph writes or reduces: its writes and its reduction
    chains: list[_Chain] = list(by_bucket(new, Cast, WgradInto, Reduction).values())
    if plan.offload.accumulates_on_host:
        for k, chain in enumerate(chains):
            _visit(new, plan, chain, k, chains[k - 1] if k else None)
    elif plan.is_boundary:
        for k, chain in enumerate(chains):
            last, op = chain[-1]
            writes = [op for _, op in chain if isinstance(op, Write)]
            is_reduced = isinstance(op, Reduction) and op.brings_mean(plan)
            if is_reduced or (plan.world_size == 1 and is_complete(writes, plan)):
                _insert_landing(new, plan, last, op.bucket, k)
    return new


def _visit(graph: fx.Graph, plan: Plan, chain: _Chain, k: int, before: _Chain | None) -> None:
    bucket = chain[0][1].bucket
    host, staging = Buffer("host", bucket), Buffer("staging", k % plan.num_staging)
    for node, op in chain:
        change(node, renamed(op, Buffer("acc", bucket), staging))
    if before is None:  # at the start, where it cuts no segment
        place = graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder"))
    elif plan.num_staging > 1:
        writes = [node for node, op in before if isinstance(op, Write)] or [before[0][0]]
        place = graph.inserting_after(writes[-1])
    else:  # the one staging buffer is in use until the bucket before has landed
        place = graph.inserting_before(chain[0][0])
    with place:
        put(graph, CopyToDevice(bucket, staging, host))
    put_after(graph, chain[-1][0], CopyToHost(bucket, host, staging))


def landing_graph(plan: Plan, index: int) -> fx.Graph:
    """The copy of one bucket's reduced gradient to host memory, where no schedule of a backward has copied it."""
    graph = fx.Graph()
    last = graph.output(())
    last.meta["debt"] = Debt(totals=frozenset({index}))
    _insert_landing(graph, plan, last.prev, index, index)
    return graph


def _insert_landing(graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, k: int) -> None:
    """Copies the reduced gradient of one bucket to host memory, after the node ``after``."""
    staging = Buffer("staging", k % plan.num_staging)
    snapshot = StageShard(bucket, staging, Buffer("acc", bucket))
    put_after(graph, after, snapshot, CopyToHost(bucket, Buffer("host", bucket), staging))


PASS = Pass("offload_gradients", run, requires=frozenset({"reductions"}))
