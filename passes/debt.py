"""What a schedule owes: the gradients that leave the graph before a pass has seen it. `verify` proves that they arrive.

A backward graph, with ``w`` and ``b`` in slots 0 and 1 of bucket 2::

    output (%mm, %sum, %relu, None)  grad_of=("w", "b", None, "frozen")      gradients {(2, 0), (2, 1)}

An output that is None owes nothing: AOTAutograd had no gradient for it. A schedule that no gradient leaves says itself
what it was made for, in ``output.meta["debt"]`` (zc/engine/flushes.py), or owes nothing (forwards, gathers, updates).
The runner works it out before the first pass and puts it on the output of what each pass returns, so that none can lose
it.

What follows from it: a bucket of which all slots are owed is *whole*. It is written here, and reduced here where the
plan's backward reduces. Of any other bucket the rest comes from elsewhere (other graphs, hooks): its gradients are
deposited, or in stage 1 added to the partial sum, and its reduction is owed by the flush or by the boundary.
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
    """``gradients``: (bucket, slot), each to be written or deposited once. ``sums``: buckets whose partial sum is there
    already and is to be reduced. ``totals``: buckets whose reduced sum is there already, for host memory (offload)."""

    gradients: frozenset[tuple[int, int]] = frozenset()
    sums: frozenset[int] = frozenset()
    totals: frozenset[int] = frozenset()

    def whole(self, plan: Plan) -> frozenset[int]:
        """Buckets of which every gradient is owed here."""
        found: dict[int, int] = {}
        for bucket, _ in self.gradients:
            found[bucket] = found.get(bucket, 0) + 1
        return frozenset(b for b, num_slots in found.items() if num_slots == len(plan.buckets[b].slots))

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
    """Of a graph that no pass has changed yet; of one that some have, what it was."""
    meta = graph.output_node().meta
    if "debt" in meta:
        found: Debt = meta["debt"]
        return found
    where = plan.slot_of()
    pairs = zip(returned_by(graph), meta.get("grad_of", ()), strict=False)
    return Debt(frozenset(where[name] for grad, name in pairs if name is not None and isinstance(grad, fx.Node)))
