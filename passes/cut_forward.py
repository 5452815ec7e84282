"""Cuts a forward graph where it first reads another bucket of parameters, so that it waits for that bucket only there.

Before and after, ``%p1`` a parameter in ``gathered[1]`` and ``%p0`` one in ``gathered[0]``::

    %t0 = aten.t(%p0)                         %t1 = aten.t(%p1)
    %t1 = aten.t(%p1)                         %mm = aten.mm(%x, %t1)
    %mm = aten.mm(%x, %t1)              ->    %t0 = aten.t(%p0)            meta["cut"]: a new segment starts here
    %mm_1 = aten.mm(%mm, %t0)                 %mm_1 = aten.mm(%mm, %t0)
    output (%mm_1, %t0)                       publish(0, "gathered[0]")
                                              publish(1, "gathered[1]")
                                              output (%mm_1, %t0)

Nodes that depend only on parameters (views, casts) move down to where something else first needs them. Random ones
stay, since a generator gives its numbers in the order of the calls. The publishes at the end let code after the graph
read every parameter. A graph without such parameters gets nothing else.
"""

from __future__ import annotations

from torch import fx

from zc.passes.base import Pass, copy_graph, is_random
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
    """Moves nodes that read only parameters in front of the first other node that needs them, in their old order."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    waiting = _of_params(graph)
    for node in [node for node in graph.nodes if node not in waiting]:
        needed: set[fx.Node] = set()
        ahead = list(node.all_input_nodes)
        while ahead:
            if (value := ahead.pop()) in waiting:
                waiting.discard(value)
                needed.add(value)
                ahead += value.all_input_nodes
        for value in sorted(needed, key=order.__getitem__):
            node.prepend(value)


def _of_params(graph: fx.Graph) -> set[fx.Node]:
    """The operations that read parameters alone, or values made of them, and that something reads."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or not node.users or not inputs or is_random(node):
            continue
        if all("buffer" in n.meta or n in found for n in inputs):
            found.add(node)
    return found


PASS = Pass("cut_forward", run)
