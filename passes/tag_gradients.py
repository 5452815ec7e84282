"""Which output is which parameter's gradient; that output becomes None, and the gradient a deposit.

The backend has written the names into the output node: ``output.meta["grad_of"][i]`` is the fully qualified name of the
parameter whose gradient output i is, or None. Before and after, ``w`` in slot 0 of bucket 2::

    %mm : bf16[64, 32] = aten.mm(...)              %mm : bf16[64, 32] = aten.mm(...)  gradient_of=((2, 0),)
    %relu : bf16[8, 64] = aten.relu(...)           deposit(2, 0, %mm)
    output (%mm, %relu)  grad_of=("w", None)       %relu : bf16[8, 64] = aten.relu(...)
                                                   output (None, %relu)

``meta["gradient_of"]`` stays with the value through all passes (one value may be the gradient of several parameters):
verify compares it with the slot in which the value ends.

An output that is no parameter's gradient (here ``%relu``) is left alone, as is a gradient output that AOTAutograd has
already made None. With None autograd's AccumulateGrad keeps nothing, so ``param.grad`` holds no full gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from zc.errors import PassError
from zc.passes.base import Pass, copy_graph, returned_by
from zc.schedule.nodes import put
from zc.schedule.spec import Deposit

if TYPE_CHECKING:
    from zc.planning.plan import Plan


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    output = new.output_node()
    where = plan.slot_of()
    returned = returned_by(new)
    names = output.meta.get("grad_of", ())
    for i, name in enumerate(names):
        grad = returned[i]
        if name is None or not isinstance(grad, fx.Node):
            continue
        bucket, slot = where[name]
        expected, got = plan.buckets[bucket].slots[slot].shape, tuple(grad.meta["val"].shape)
        if expected != got:
            raise PassError(f"gradient of {name}: the plan has shape {expected}, the graph {got}")
        with new.inserting_after(_last_placeholder(new) if grad.op == "placeholder" else grad):
            put(new, Deposit(bucket, slot, grad))
        grad.meta["gradient_of"] = (*grad.meta.get("gradient_of", ()), (bucket, slot))
        returned[i] = None
    output.args = (tuple(returned),)
    output.meta = {key: item for key, item in output.meta.items() if key != "grad_of"}
    return new


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    placeholders: list[fx.Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders[-1]


PASS = Pass("tag_gradients", run, provides=frozenset({"deposits"}))
