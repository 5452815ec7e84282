"""Turns outputs that are parameters' gradients into deposits, and returns None in their place.

The backend has put the names on the output node: if output i is a gradient, ``output.meta["grad_of"][i]`` is the fully
qualified name of its parameter, else None. Before and after, ``w`` in slot 0 of bucket 2::

    %mm : bf16[64, 32] = aten.mm(...)              %mm : bf16[64, 32] = aten.mm(...)  gradient_of=((2, 0),)
    %relu : bf16[8, 64] = aten.relu(...)           deposit(2, 0, %mm)
    output (%mm, %relu)  grad_of=("w", None)       %relu : bf16[8, 64] = aten.relu(...)
                                                   output (None, %relu)

``meta["gradient_of"]`` stays with the value through all passes; verify compares it with the slot that the value is
written to. One value may be the gradient of several parameters.

The pass leaves alone an output that is no parameter's gradient (here ``%relu``), and one that AOTAutograd has already
made None. For None autograd's AccumulateGrad stores nothing, so ``param.grad`` has no full gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from zc.errors import PassError
from zc.passes.base import Pass, copy_graph, returned_by
from zc.schedule.nodes import put_after
from zc.schedule.spec import Deposit

if TYPE_CHECKING:
    from zc.planning.plan import Plan


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    output = new.output_node()
    where = plan.slot_of
    returned = returned_by(new)
    names = output.meta.get("grad_of", ())
    placeholders = new.find_nodes(op="placeholder")
    for i, name in enumerate(names):
        grad = returned[i]
        if name is None or not isinstance(grad, fx.Node):
            continue
        bucket, slot = where[name]
        expected, shape = plan.buckets[bucket].slots[slot].shape, tuple(grad.meta["val"].shape)
        if expected != shape:
            raise PassError(f"gradient of {name}: the plan has shape {expected}, the graph {shape}")
        put_after(new, placeholders[-1] if grad.op == "placeholder" else grad, Deposit(bucket, slot, grad))
        grad.meta["gradient_of"] = (*grad.meta.get("gradient_of", ()), (bucket, slot))
        returned[i] = None
    output.args = (tuple(returned),)
    output.meta = {key: item for key, item in output.meta.items() if key != "grad_of"}
    return new


PASS = Pass("tag_gradients", run, provides=frozenset({"deposits"}))
