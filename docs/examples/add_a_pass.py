"""A pass that clamps each gradient before it is sent: CONTRIBUTING.md, "Add a pass".

Before and after, for a gradient %mm in slot 0 of bucket 2:

    %mm = aten.mm(%x, %g)            %mm = aten.mm(%x, %g)
    deposit(2, 0, %mm)        ->     %clamp = aten.clamp(%mm, -0.01, 0.01)
                                     deposit(2, 0, %clamp)
"""

from dataclasses import replace

import torch
from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.nodes import change, ops
from zc.schedule.spec import Deposit

CLAMP, LIMIT = torch.ops.aten.clamp.default, 0.01


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    for node, op in list(ops(new)):
        if not isinstance(op, Deposit) or op.grad.target is CLAMP:  # a second run changes nothing
            continue
        with new.inserting_before(node):
            clamped = new.call_function(CLAMP, (op.grad, -LIMIT, LIMIT))
        clamped.meta["val"] = op.grad.meta["val"]  # shape and dtype, which later passes read
        # Says which slot the value is for. Without it the proof refuses the schedule.
        clamped.meta["gradient_of"] = op.grad.meta["gradient_of"]
        change(node, replace(op, grad=clamped))
    return new


PASS = Pass("clamp_gradients", run, requires=frozenset({"deposits"}))
