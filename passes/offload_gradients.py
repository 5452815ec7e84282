"""With offload: the copies between the reduced gradients on the device and the host memory that the update reads.

Accumulators in host memory visit the device for each backward, through a ring of staging buffers (stage 2, bucket 0)::

    flatten_cast(0, "flat_grad[0]", ...)                  copy_to_device(0, "staging[0]", "host[0]")
    %w = launch_reduce(0, "recv[0]", "flat_grad[0]")      flatten_cast(0, "flat_grad[0]", ...)
    wait_reduce(0, %w, "recv[0]", "flat_grad[0]")         %w = launch_reduce(0, "recv[0]", "flat_grad[0]")
    accumulate(0, "acc[0]", "recv[0]")                ->  wait_reduce(0, %w, "recv[0]", "flat_grad[0]")
                                                          accumulate(0, "staging[0]", "recv[0]")
                                                          copy_to_host(0, "host[0]", "staging[0]")

Each copy to the device stands one bucket ahead, behind the write of the bucket before, where the ring has two buffers;
so the bus works while that bucket is reduced. In stage 1 the whole partial sum visits, and ``accumulate_cast`` and the
launch take the staging buffer in place of ``acc[0]``.

Accumulators on the device are copied at the boundary, out of a snapshot that the next backward does not touch::

    accumulate(0, "acc[0]", "recv[0]")                ->  accumulate(0, "acc[0]", "recv[0]")
                                                          stage_shard(0, "staging[0]", "acc[0]")
                                                          copy_to_host(0, "host[0]", "staging[0]")

Left alone: everything without ``plan.offload``; deposits; a bucket that is written in part, in stage 1 on the device
(it lands at the boundary). The idea of a double-buffered bus: ZeRO-Offload, arXiv:2101.06840, section 4.
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.passes.reduce_buckets import is_complete
from zc.planning.plan import Plan
from zc.schedule.nodes import (
    accumulate,
    accumulate_cast,
    copy_to_device,
    copy_to_host,
    flatten_cast,
    is_schedule_node,
    launch_reduce,
    stage_shard,
    wait_reduce,
    wgrad_into,
)

_WRITES = (flatten_cast, accumulate_cast, wgrad_into)
_REDUCTION = (launch_reduce, wait_reduce, accumulate)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    chains = _chains(new)
    if plan.offload is None or any(n.target is copy_to_host for n in new.nodes):
        return new
    if plan.offload.accumulates_on_host:
        for k, chain in enumerate(chains):
            _visit(new, plan, chain, k, chains[k - 1] if k else None)
    elif plan.is_boundary:
        for k, chain in enumerate(chains):
            last = chain[-1]
            writes = [n for n in chain if n.target in _WRITES]
            if last.target is accumulate or (plan.world_size == 1 and is_complete(writes, plan)):
                insert_landing(new, plan, last, int(str(last.args[0])), k)
    return new


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each bucket that this graph writes or reduces: its writes, launch, completion and accumulation."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_schedule_node(node) and node.target in (*_WRITES, *_REDUCTION):
            found.setdefault(int(str(node.args[0])), []).append(node)
    return sorted(found.values(), key=lambda chain: list(graph.nodes).index(chain[-1]))


def _visit(graph: fx.Graph, plan: Plan, chain: list[fx.Node], k: int, before: list[fx.Node] | None) -> None:
    bucket = int(str(chain[0].args[0]))
    acc, host, staging = f"acc[{bucket}]", f"host[{bucket}]", f"staging[{k % plan.num_staging}]"
    for node in chain:
        node.args = tuple(staging if isinstance(arg, str) and arg == acc else arg for arg in node.args)
    if before is None:  # nothing is made for it: it cuts no segment
        place = graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder"))
    elif plan.num_staging > 1:
        writes = [n for n in before if n.target in _WRITES] or before[:1]
        place = graph.inserting_after(writes[-1])
    else:  # the one staging buffer is in use until the bucket before has landed
        place = graph.inserting_before(chain[0])
    with place:
        graph.call_function(copy_to_device, (bucket, staging, host))
    with graph.inserting_after(chain[-1]):
        graph.call_function(copy_to_host, (bucket, host, staging))


def insert_landing(graph: fx.Graph, plan: Plan, after: fx.Node, bucket: int, k: int) -> None:
    """The reduced gradient of one bucket goes to host memory, behind ``after``."""
    staging = f"staging[{k % plan.num_staging}]"
    with graph.inserting_after(after):
        snapshot = graph.call_function(stage_shard, (bucket, staging, f"acc[{bucket}]"))
    with graph.inserting_after(snapshot):
        graph.call_function(copy_to_host, (bucket, f"host[{bucket}]", staging))


PASS = Pass("offload_gradients", run, requires=frozenset({"reductions"}), provides=frozenset({"copies"}))
