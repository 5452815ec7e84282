"""Schedules of single buckets: for what came in through hooks, and for what a boundary has left to do.

They are made when first needed, by the passes that make every schedule, and proved by the same verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from zc.engine.program import Program, build
from zc.passes import offload_gradients, reduce_buckets
from zc.passes.base import Pass
from zc.passes.debt import Debt
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import AccumulateCast

if TYPE_CHECKING:
    from zc.engine.bound_ops import ProgramOps


class Flushes:
    """The schedules of one model: ``flush`` writes deposited gradients (an input a slot), ``reduce`` reduces the
    partial sum that acc_flat holds, ``land`` copies a reduced gradient to host memory."""

    def __init__(self, passes: Sequence[Pass], ops: ProgramOps) -> None:
        self._passes, self._ops = passes, ops
        self._programs: dict[tuple[str, int, bool], Program] = {}

    @property
    def programs(self) -> list[Program]:
        """Those that have been made so far, for explain."""
        return list(self._programs.values())

    def get(self, kind: str, index: int, is_final: bool, plan: Plan) -> Program:
        """Of bucket ``index`` of ``plan``; where it is not ``is_final``, of a microbatch that others follow."""
        key = (kind, index, is_final)
        if key not in self._programs:
            plan = plan if is_final else plan.microbatch()
            graph = _GRAPHS[kind](plan, index)
            passes = [p for p in self._passes if p.name != "outline_segments"]
            if kind != "flush":
                passes = [p for p in passes if p.name not in ("bucket_gradients", "reduce_buckets")]
            relaxed = [p._replace(requires=frozenset()) for p in passes]
            self._programs[key] = build(graph, plan, relaxed, self._ops, name=f"{kind}_bucket_{index}")
        return self._programs[key]


def _gradients(plan: Plan, index: int) -> fx.Graph:
    """All gradients of one bucket, as they came in: a backward graph that computes nothing, taken through the same
    passes."""
    graph, bucket = fx.Graph(), plan.buckets[index]
    grads = [graph.placeholder(f"grad_{k}") for k in range(len(bucket.slots))]
    for grad, slot in zip(grads, bucket.slots, strict=True):
        grad.meta["val"] = torch.empty(slot.shape, dtype=bucket.param_dtype, device="meta")
    graph.output(tuple(grads)).meta["grad_of"] = tuple(slot.name for slot in bucket.slots)
    return graph


def _reduction_only(plan: Plan, index: int) -> fx.Graph:
    """The reduction of the partial sum in acc_flat. Adding no gradient makes it zeros where this rank has no sum; what
    a reduction has left there moves aside (zc/engine/ops.py)."""
    graph = fx.Graph()
    nothing = put(graph, AccumulateCast(index, Buffer("acc", index), (), ()))
    graph.output(()).meta["debt"] = Debt(sums=frozenset({index}))
    reduce_buckets.insert_reduction(graph, plan, nothing, index, index)
    return graph


def _landing_only(plan: Plan, index: int) -> fx.Graph:
    """The way to host memory of what is reduced already."""
    graph = fx.Graph()
    last = graph.output(())
    last.meta["debt"] = Debt(totals=frozenset({index}))
    offload_gradients.insert_landing(graph, plan, last.prev, index, index)
    return graph


_GRAPHS = {"flush": _gradients, "reduce": _reduction_only, "land": _landing_only}
