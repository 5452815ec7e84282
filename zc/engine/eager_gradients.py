"""Collects gradients from outside of compiled graphs until their bucket is complete, then writes the bucket.

Hooks bring the gradients of eager code one by one. Each is kept by reference until all slots of its bucket have one. A
slot that gets two keeps their sum. Hooks may run on several streams, since eager branches run their backward on the
stream of their forward. So each gradient keeps a mark of its stream, and its reader waits for that mark first.

Each bucket has a schedule of its own that writes or reduces it. The usual passes make it when it is first needed, and
verify proves it.

A backward ends with autograd's final callback. Autograd owns the callback and drops it if the backward raises, so a
weak reference tells whether it did. Backwards may be nested (reentrant checkpointing)::

            enter                    the outermost one ends
    NONE ----------> RUNNING ------------------------------> NONE
                        |  a backward raises          drop_failed, clear
                        +-------------------> RAISED ----------------------> NONE
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx

from zc import torch_private
from zc.engine.program import Bind, Program, build
from zc.engine.streams import Streams
from zc.passes import offload_gradients, reduce_buckets
from zc.passes.base import Pass
from zc.passes.debt import Debt
from zc.planning.plan import Bucket, Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import AccumulateCast

if TYPE_CHECKING:
    from zc.engine.binding import MayReduce


class Backward(enum.Enum):
    """The state of autograd's backwards through this model."""

    NONE = "none runs"
    RUNNING = "one runs, perhaps with others inside it"
    RAISED = "one has raised, and its gradients here have not been dropped yet"


class _Deposit(NamedTuple):
    grad: Tensor
    mark: object  # `Streams.mark` of the stream that made it


class EagerGradients:
    """The eager gradients of one model. Only the thread that issues schedules uses it: autograd's during a backward,
    the caller's otherwise.

    A gradient lives until its bucket is reduced, or written into a partial sum, at the end of the backward. If ranks
    differ, it lives until the boundary at the latest (zc/engine/announcements.py).
    """

    def __init__(self, streams: Streams, passes: Sequence[Pass], bind: Bind) -> None:
        self.streams, self._passes, self._bind = streams, passes, bind
        self._open: dict[int, weakref.ref[Callable[[], None]]] = {}  # by autograd's number of the graph task
        self._waiting: dict[int, dict[int, _Deposit]] = {}  # by bucket and slot
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self.done: set[int] = set()  # buckets that this backward has written and reduced

    # --- backwards ---

    @property
    def backward(self) -> Backward:
        if not self._open:
            return Backward.NONE
        callbacks = list(self._open.values())  # the watch's thread asks, too
        return Backward.RAISED if any(callback() is None for callback in callbacks) else Backward.RUNNING

    def is_entered(self) -> bool:
        """Whether the backward that runs in this thread was entered before."""
        callback = self._open.get(torch_private.current_graph_task())
        return callback is not None and callback() is not None

    def enter(self, end: Callable[[], None]) -> None:
        """Called when a backward begins. Calls ``end`` when the outermost one has ended."""
        task = torch_private.current_graph_task()
        callback = partial(self._leave, task, end)
        self._open[task] = weakref.ref(callback)
        torch_private.queue_callback(callback)

    def _leave(self, task: int, end: Callable[[], None]) -> None:
        self._open.pop(task, None)
        if not self._open:
            end()

    def drop_failed(self) -> Backward:
        """Forgets backwards that have raised. If no other one runs, drops all gradients that wait."""
        self._open = {task: callback for task, callback in self._open.items() if callback() is not None}
        if not self._open:
            self._waiting.clear()
            self.done.clear()
        return self.backward

    def forget_backwards(self) -> None:
        self._open.clear()
        self.done.clear()

    # --- gradients ---

    @property
    def buckets(self) -> set[int]:
        """The buckets that have a gradient here."""
        return set(self._waiting)

    def add(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        """Called on the stream that made ``grad``."""
        deposits = self._waiting.setdefault(bucket.index, {})
        grad = grad.detach()
        if slot in deposits:  # the sum is in fp32, so that the second gradient is not rounded
            first = deposits[slot]
            self._order([first])
            grad = first.grad.to(bucket.acc_dtype) + grad
        deposits[slot] = _Deposit(grad, self.streams.mark())

    def ready(self, plan: Plan) -> list[int]:
        """Complete buckets in plan order, up to the first incomplete one: the same order on all ranks."""
        ready = []
        for bucket in plan.buckets:
            if bucket.index in self.done:
                continue
            if len(self._waiting.get(bucket.index, ())) < len(bucket.slots):
                break
            ready.append(bucket.index)
        return ready

    def own(self) -> None:
        """Copies gradients that outlive their backward: one may be the caller's own (``backward(gradient=...)``)."""
        for deposits in self._waiting.values():
            self._order(deposits.values())
            for slot, deposit in deposits.items():
                deposits[slot] = _Deposit(deposit.grad.clone(), self.streams.mark())

    def _order(self, deposits: Iterable[_Deposit]) -> None:
        """Makes the caller's current stream wait until it may read these."""
        deposits = list(deposits)
        self.streams.take([d.grad for d in deposits], [d.mark for d in deposits])

    def drop(self, bucket: int, slot: int | None = None, *, set_to_none: bool = False) -> None:
        """Drops the gradient of one slot, or of a whole bucket. The bucket is still reduced, with zeros, unless
        ``set_to_none``."""
        if slot is not None:
            self._waiting.get(bucket, {}).pop(slot, None)
        elif set_to_none:
            self._waiting.pop(bucket, None)
        elif bucket in self._waiting:
            self._waiting[bucket] = {}

    # --- schedules of one bucket ---

    @property
    def programs(self) -> list[Program]:
        """The schedules needed so far, for explain."""
        return list(self._programs.values())

    def write(self, plan: Plan, index: int, *, is_final: bool, may_reduce: MayReduce | None) -> None:
        """Runs the schedule of one bucket with its gradients, one per slot; None for a slot without one."""
        bucket, deposits = plan.buckets[index], self._waiting.pop(index, {})
        self._order(deposits.values())
        grads = [deposits[slot].grad if slot in deposits else None for slot in range(len(bucket.slots))]
        del deposits  # the schedule frees each gradient at its last use
        self._program("flush", plan, index, is_final)(grads, self.streams, may_reduce)

    def reduce(self, plan: Plan, index: int, *, may_reduce: MayReduce | None) -> None:
        """Reduces the partial sum in acc_flat."""
        self._program("reduce", plan, index, True)([], self.streams, may_reduce)

    def land(self, plan: Plan, index: int) -> None:
        """Copies a reduced gradient to host memory."""
        self._program("land", plan, index, True)([], self.streams)

    def _program(self, kind: str, plan: Plan, index: int, is_final: bool) -> Program:
        """The schedule. ``is_final`` is False for a microbatch that is not the last."""
        key = (kind, index, is_final)
        if key not in self._programs:
            plan = plan if is_final else plan.microbatch()
            graph = GRAPHS[kind](plan, index)
            passes = [p for p in self._passes if p.name != "outline_segments"]
            if kind != "flush":
                passes = [p for p in passes if p.name not in ("bucket_gradients", "reduce_buckets")]
            relaxed = [p._replace(requires=frozenset()) for p in passes]
            self._programs[key] = build(graph, plan, relaxed, self._bind, name=f"{kind}_bucket_{index}")
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
    sum, and moves an earlier reduction's result aside (zc/engine/accumulators.py)."""
    graph = fx.Graph()
    nothing = put(graph, AccumulateCast(index, Buffer("acc", index), (), ()))
    graph.output(()).meta["debt"] = Debt(sums=frozenset({index}))
    reduce_buckets.insert_reduction(graph, plan, nothing, index, index)
    return graph


def _landing_only(plan: Plan, index: int) -> fx.Graph:
    """The copy of a reduced gradient to host memory."""
    graph = fx.Graph()
    last = graph.output(())
    last.meta["debt"] = Debt(totals=frozenset({index}))
    offload_gradients.insert_landing(graph, plan, last.prev, index, index)
    return graph


GRAPHS = {"flush": _gradients, "reduce": _reduction_only, "land": _landing_only}
