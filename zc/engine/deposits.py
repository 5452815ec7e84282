"""Keeps gradients until all slots of their bucket have one, and then flushes the bucket: writes and reduces it.

A *deposit* is a gradient, kept by reference. Hooks deposit the gradients of eager code one by one. A compiled graph
deposits those of a bucket that it does not fill, and those of a bucket that ranks do not reduce in this backward. A
slot that gets two gradients has their sum. Hooks may run on several streams, since eager branches run their backward on
the stream of their forward. So each deposit has a mark of its stream, and a flush waits for that mark first.

Each bucket has small schedules of its own, which flush it, reduce its partial sum or copy it to host memory. The usual
passes make them when they are first needed, and verify proves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx

from zc.engine.operations import MayReduce, Operations
from zc.engine.program import Program, build
from zc.engine.streams import Streams
from zc.passes import reduce_buckets
from zc.passes.base import Debt, Pass
from zc.planning.plan import Bucket, Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import AccumulateCast

if TYPE_CHECKING:
    from zc.engine.buffers import Accumulators


MakeGraph = Callable[[Plan, int], fx.Graph]  # for the bucket of that number


class _Deposit(NamedTuple):
    grad: Tensor
    mark: object  # `Streams.mark` of the stream that made it


class Deposits:
    """The deposits of one model, and the schedules of single buckets. Only the thread that issues schedules uses it:
    autograd's during a backward, the caller's otherwise.

    A deposit lives until its bucket is flushed, mostly at the end of the backward at the latest. If ranks differ, or it
    came late inside no_sync, it may live until the boundary (zc/engine/announcements.py).
    """

    def __init__(
        self,
        streams: Streams,
        passes: Sequence[Pass],
        accs: Accumulators,
        dump_dir: str | Path | None = None,
        landing: MakeGraph | None = None,
    ) -> None:
        self.streams, self._passes, self._accs, self._dump_dir = streams, passes, accs, dump_dir
        self._graphs = GRAPHS if landing is None else {**GRAPHS, "land": landing}
        self.kept: dict[int, dict[int, _Deposit]] = {}  # by bucket, if it has any, and slot
        self._programs: dict[tuple[str, int, bool], Program] = {}
        # buckets that this backward has reduced, compiled graphs included, or has put back since ranks differ
        self.reduced: set[int] = set()

    # --- deposits ---

    def add(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """Called on the stream that made ``grad``."""
        deposits = self.kept.setdefault(bucket.index, {})
        grad = grad.detach()
        if slot in deposits:  # the sum is in fp32, so that the second gradient is not rounded
            self._wait_for(deposits[slot])
            grad = deposits[slot].grad.to(bucket.acc_dtype) + grad
        deposits[slot] = _Deposit(grad, self.streams.mark())

    def complete(self, plan: Plan) -> list[int]:
        """Complete buckets in plan order, up to the first incomplete one: the same order on all ranks."""
        complete = []
        for bucket in plan.buckets:
            if bucket.index in self.reduced or not bucket.num_params:
                continue
            if len(self.kept.get(bucket.index, ())) < bucket.num_params:
                break
            complete.append(bucket.index)
        return complete

    def clone(self) -> None:
        """Copies deposits that outlive their backward: one may be a tensor of the caller (``backward(gradient=...)``),
        who may write it after."""
        for deposits in self.kept.values():
            self._wait_for(*deposits.values())
            for slot, deposit in deposits.items():
                deposits[slot] = _Deposit(deposit.grad.clone(), self.streams.mark())

    def _wait_for(self, *deposits: _Deposit) -> None:
        """Makes the caller's current stream wait until it may read these."""
        self.streams.hand_to_main([d.grad for d in deposits], [d.mark for d in deposits])

    def clear(self) -> None:
        """Drops what a backward that raised has deposited and reduced so far."""
        self.kept.clear()
        self.reduced.clear()

    def drop(self, bucket: int, slot: int) -> None:
        """Drops the gradient of one slot. The bucket is still reduced, with zeros."""
        self.kept.get(bucket, {}).pop(slot, None)

    def drop_bucket(self, bucket: int, *, set_to_none: bool) -> None:
        """Drops all gradients of a bucket. It is still reduced, with zeros, unless ``set_to_none``."""
        if set_to_none:
            self.kept.pop(bucket, None)
        elif bucket in self.kept:
            self.kept[bucket] = {}

    # --- schedules of single buckets ---

    @property
    def programs(self) -> list[Program]:
        """The schedules needed so far, for explain."""
        return list(self._programs.values())

    def flush(self, plan: Plan, index: int, *, is_boundary: bool, may_reduce: MayReduce | None) -> None:
        """Writes the deposits of one bucket, and reduces it where ``may_reduce`` agrees; where it does not, stage 2
        keeps them again. A slot without a deposit gets zeros. ``is_boundary``: this may be the last microbatch before
        an update."""
        bucket, deposits = plan.buckets[index], self.kept.pop(index, {})
        self._wait_for(*deposits.values())
        grads = [deposits[slot].grad if slot in deposits else None for slot in range(len(bucket.slots))]
        del deposits  # the schedule frees each gradient at its last use
        self._program("flush", plan, index, is_boundary=is_boundary)(grads, self.streams, may_reduce)

    def reduce(self, plan: Plan, index: int, *, may_reduce: MayReduce | None) -> None:
        """Reduces the partial sum in acc_flat (stage 1)."""
        self._program("reduce", plan, index)([], self.streams, may_reduce)

    def land(self, plan: Plan, index: int) -> None:
        """Copies a reduced gradient to host memory."""
        self._program("land", plan, index)([], self.streams)

    def _program(self, kind: str, plan: Plan, index: int, *, is_boundary: bool = True) -> Program:
        """The schedule. ``kind``: one of `GRAPHS`, or with offload "land"."""
        key = (kind, index, is_boundary)
        if key not in self._programs:
            plan = plan if is_boundary else plan.microbatch()
            graph = self._graphs[kind](plan, index)
            passes = [p for p in self._passes if p.name != "outline_segments"]
            if kind != "flush":
                passes = [p for p in passes if p.name not in ("bucket_gradients", "reduce_buckets")]
            relaxed = [p._replace(requires=frozenset()) for p in passes]
            name = f"{kind}_bucket_{index}" if is_boundary else f"{kind}_bucket_{index}_of_a_microbatch"
            operations = Operations(self._accs)
            self._programs[key] = build(graph, plan, relaxed, operations, name=name, dump_dir=self._dump_dir)
        return self._programs[key]


def _gradients(plan: Plan, index: int) -> fx.Graph:
    """A backward graph that computes nothing and returns all gradients of one bucket."""
    graph, bucket = fx.Graph(), plan.buckets[index]
    grads = [graph.placeholder(f"grad_{k}") for k in range(len(bucket.slots))]
    for grad, slot in zip(grads, bucket.slots, strict=True):
        grad.meta["val"] = torch.empty(slot.shape, dtype=bucket.param_dtype, device="meta")
    graph.output(tuple(grads)).meta["grad_of"] = tuple(slot.name for slot in bucket.slots)
    return graph


def _reduction_only(plan: Plan, index: int) -> fx.Graph:
    """The reduction of the partial sum in acc_flat. It first adds no gradient, which makes zeros if this rank has no
    sum, and moves an earlier reduction's result aside (zc/engine/buffers.py)."""
    graph = fx.Graph()
    nothing = put(graph, AccumulateCast(index, Buffer("acc", index), (), ()))
    graph.output(()).meta["debt"] = Debt(sums=frozenset({index}))
    reduce_buckets.insert_reduction(graph, plan, nothing, index, index)
    return graph


GRAPHS: dict[str, MakeGraph] = {"flush": _gradients, "reduce": _reduction_only}
