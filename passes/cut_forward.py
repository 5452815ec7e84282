"""Cuts a forward graph where it first reads another bucket of parameters, so that it waits for that bucket only there.

Before and after, ``%p1`` a parameter in ``gathered[1]`` and ``%p0`` one in ``gathered[0]``::

    %t0 = aten.t(%p0)                         %t1 = aten.t(%p1)
    %t1 = aten.t(%p1)                         %mm = aten.mm(%x, %t1)
    %mm = aten.mm(%x, %t1)              ->    %t0 = aten.t(%p0)            meta["cut"]: a new segment starts here
    %mm_1 = aten.mm(%mm, %t0)                 %mm_1 = aten.mm(%mm, %t0)
    output (%mm_1, %t0)                       publish(0, "gathered[0]")
                                              publish(1, "gathered[1]")
                                              output (%mm_1, %t0)

Nodes that depend only on parameters (views, casts) move down to their first use. The publishes at the end let code
after the graph read every parameter. A graph without such parameters gets nothing else.
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import Publish


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    _sink(new)
    seen: set[str] = set()
    for node in new.nodes:
        read = {n.meta["buffer"] for n in node.all_input_nodes if "buffer" in n.meta} - seen
        if node.op == "call_function" and read:
            node.meta["cut"] = bool(seen)  # the first bucket is waited for at the start in any case
            seen |= read
    with new.inserting_before(new.output_node()):
        for bucket in plan.buckets:
            put(new, Publish(bucket.index, Buffer("gathered", bucket.index)))
    return new


def _sink(graph: fx.Graph) -> None:
    """Moves nodes that read only parameters in front of their first user, those of one user in their old order."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in reversed(_of_params(graph)):
        if not node.users:
            continue
        first = min(node.users, key=order.__getitem__)
        if first.op != "output":
            first.prepend(node)
            order[node] = order[first]


def _of_params(graph: fx.Graph) -> list[fx.Node]:
    """The operations that read parameters, and values made of parameters, alone."""
    found: dict[fx.Node, None] = {}  # in order
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all("buffer" in n.meta or n in found for n in inputs):
            found[node] = None
    return list(found)


PASS = Pass("cut_forward", run)
