"""The operations of one schedule: the functions of the table, bound to one rank's accumulators, and its segments."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zc.engine.accumulators import Accumulators, Function
from zc.engine.operations import TABLE, Grads, compute
from zc.schedule.nodes import TARGETS
from zc.schedule.spec import BucketOp, FlattenCast, Op, Reduce, Role, Spans, Take, WgradInto

if TYPE_CHECKING:
    from zc.engine.program import Segment


class MayReduce(Protocol):
    """Whether all ranks agree to reduce: asked before an operation that depends on it. ``starts``: the operation is the
    first one of a bucket's reduction."""

    def __call__(self, *, starts: bool = False) -> bool: ...


class Operations:
    """The object ``ops`` of generated code: one attribute for each kind of node, and `segment`.

    ``overrides`` are further kinds, or replace those of the table; these functions take no accumulators.
    """

    def __init__(self, accs: Accumulators, overrides: Mapping[type[Op], Function] | None = None) -> None:
        self._accs = accs
        self.segments: dict[str, Segment] = {}  # by key; `zc.engine.program.build` compiles them
        table = {**TABLE, **accs.operations}
        functions = {kind: MethodType(function, accs) for kind, function in table.items()} | dict(overrides or {})
        for kind, function in functions.items():
            setattr(self, TARGETS[kind].__name__, function)
        self._of_one_bucket = [TARGETS[kind].__name__ for kind in functions if issubclass(kind, BucketOp)]
        # what `reducing_if` replaces: the name, whether it starts a reduction, and the function without agreement
        self._replaced: list[tuple[str, bool, Function]] | None = None

    def segment(self, key: str, args: list[Any]) -> Sequence[Any]:
        return self.segments[key](args)

    def reducing_if(self, may_reduce: MayReduce) -> Operations:
        """These operations for one run, in which ranks reduce if they agree. In stage 1 the comm stream asks before
        each reduction. In stage 2 gradients pass through the ring, so the host asks before the first write: everything
        before it is issued by then, and keeps a GPU busy while the host waits."""
        if self._replaced is None:
            instead = instead_of_reducing(self._accs)
            self._replaced = [(TARGETS[kind].__name__, kind in (Reduce, Take), do) for kind, do in instead.items()]
        run = copy.copy(self)
        for name, starts, other in self._replaced:
            choose = _start_if_agreed if starts else _if_agreed
            setattr(run, name, choose(may_reduce, getattr(self, name), other))
        return run

    def on_buckets(self, buckets: Collection[int]) -> Operations:
        """These operations for one run, in which those on other buckets do nothing. The proof of a schedule holds for
        such a run: what is left has the same order, and fewer nodes touch a buffer."""
        run = copy.copy(self)
        for name in self._of_one_bucket:
            setattr(run, name, partial(_if_among, buckets, getattr(self, name)))
        return run


def instead_of_reducing(accs: Accumulators) -> dict[type[Op], Function]:
    """By kind of node: what it does if ranks do not agree to reduce. Reductions do nothing.

    In stage 1 the gradients stay in the accumulator as a partial sum, which the boundary reduces. Nothing is copied to
    host memory, unless it has the accumulators. Stage 2 writes nothing into the ring, which must be free for the next
    bucket: it deposits each gradient.
    """
    others: dict[type[Op], Function] = {}
    roles = {Role.REDUCTION}
    if accs.plan.placement.shards_gradients:
        others = {FlattenCast: MethodType(_deposit_all, accs), WgradInto: MethodType(_compute_and_deposit, accs)}
    if accs.plan.placement.shards_gradients or accs.buffers.acc:
        roles.add(Role.OFFLOAD)
    return others | {kind: _do_nothing for kind in TABLE if kind.role in roles}


def _deposit_all(
    accs: Accumulators, bucket: int, buffer: str, slots: Sequence[int], grads: Grads, spans: Spans | None = None
) -> None:
    for slot, grad in zip(slots, grads, strict=True):
        if grad is not None:
            accs.on_deposit(bucket, slot, grad)


def _compute_and_deposit(
    accs: Accumulators, bucket: int, buffer: str, slot: int, start: int, stop: int, *inputs: Tensor, how: str = "mm"
) -> None:
    record = accs.plan.buckets[bucket]
    out = torch.empty(stop - start, dtype=record.reduce_dtype, device=record.device)
    compute(how, out, inputs, add=False)
    accs.on_deposit(bucket, slot, out.view(record.slots[slot].shape))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _if_among(buckets: Collection[int], operation: Function, bucket: int, *args: Any, **kwargs: Any) -> Any:
    return operation(bucket, *args, **kwargs) if bucket in buckets else None


def _if_agreed(may_reduce: MayReduce, operation: Function, other: Function) -> Function:
    return lambda *args, **kwargs: (operation if may_reduce() else other)(*args, **kwargs)


def _start_if_agreed(may_reduce: MayReduce, operation: Function, other: Function) -> Function:
    def start(bucket: int, dst: str, src: str, hop: int = 0) -> Any:
        return (operation if may_reduce(starts=hop == 0) else other)(bucket, dst, src, hop=hop)

    return start
