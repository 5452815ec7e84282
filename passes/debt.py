"""A schedule's debt: the gradients that its graph returned before the first pass. `verify` proves that they arrive.

A backward graph, with ``w`` and ``b`` in slots 0 and 1 of bucket 2::

    output (%mm, %sum, %relu, None)  grad_of=("w", "b", None, "frozen")      gradients {(2, 0), (2, 1)}

An output that is None owes nothing: AOTAutograd had no gradient for it. A schedule that returns no gradient says in
``output.meta["debt"]`` what it is for (zc/engine/deposits.py), or owes nothing (forwards, gathers, updates). The
runner computes the debt before the first pass and puts it on the output of each pass, so that no pass can lose it.

A bucket is *whole* if the graph owes all its slots. This schedule writes it, and reduces it if the plan's backward
reduces. Of any other bucket the graph owes only some slots, and other graphs or hooks bring the rest. This schedule
deposits its gradients, or in stage 1 adds them to the partial sum. The flush or the boundary then owes the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from zc.passes.base import returned_by

if TYPE_CHECKING:
    from zc.planning.plan import Plan


@dataclass(frozen=True)
class Debt:
    """``gradients``: (bucket, slot), each to be written or deposited once. ``sums``: buckets to reduce, whose partial
    sum exists. ``totals``: buckets to copy to host memory, whose reduced sum exists (offload)."""

    gradients: frozenset[tuple[int, int]] = frozenset()
    sums: frozenset[int] = frozenset()
    totals: frozenset[int] = frozenset()

    def whole(self, plan: Plan) -> frozenset[int]:
        """Buckets of which every gradient is owed here."""
        num_owed: dict[int, int] = {}
        for bucket, _ in self.gradients:
            num_owed[bucket] = num_owed.get(bucket, 0) + 1
        return frozenset(b for b, num_slots in num_owed.items() if num_slots == len(plan.buckets[b].slots))

    def reductions(self, plan: Plan) -> frozenset[int]:
        """Buckets whose mean over ranks has to be accumulated here, once."""
        sends = plan.num_ranks > 1 or plan.placement.shards_gradients  # else the partial sum is the total
        return self.sums | (self.whole(plan) if plan.reduces and sends else frozenset())

    def landings(self, plan: Plan) -> frozenset[int]:
        """Buckets of which something has to be copied to host memory here, once."""
        if plan.offload is None:
            return frozenset()
        if not plan.offload.accumulates_on_host:
            return self.totals | self.sums | (self.whole(plan) if plan.is_boundary else frozenset())
        written = self.whole(plan) if plan.placement.shards_gradients else frozenset(b for b, _ in self.gradients)
        return self.sums | written


def debt_of(graph: fx.Graph, plan: Plan) -> Debt:
    """The debt of a graph, as it was before the first pass."""
    meta = graph.output_node().meta
    if "debt" in meta:
        debt: Debt = meta["debt"]
        return debt
    where = plan.slot_of()
    pairs = zip(returned_by(graph), meta.get("grad_of", ()), strict=False)
    return Debt(frozenset(where[name] for grad, name in pairs if name is not None and isinstance(grad, fx.Node)))
