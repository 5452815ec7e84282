"""Every node gets its stream: compute for segments and writes, comm for reductions.

Before and after (the stream in front, as `zc.schedule.text` prints it)::

    segment("segment_0", %x)                                  compute | segment("segment_0", %x)
    flatten_cast(0, "flat_grad[0]", (0,), [%g])        ->     compute | flatten_cast(0, "flat_grad[0]", (0,), [%g])
    launch_reduce(0, "recv[0]", "flat_grad[0]")                  comm | launch_reduce(0, "recv[0]", "flat_grad[0]")

Placeholders, getitems and the output have no stream and are left alone. Without ``plan.overlap`` all is on compute.
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.plan import Plan
from zc.schedule import COMM, COMPUTE, accumulate, is_schedule_node, launch_reduce, wait_reduce

_ON_COMM = (launch_reduce, wait_reduce, accumulate)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    for node in new.nodes:
        if is_schedule_node(node):
            node.meta["stream"] = COMM if plan.overlap and node.target in _ON_COMM else COMPUTE
    return new


PASS = Pass("place_on_streams", run, provides=frozenset({"streams"}))
