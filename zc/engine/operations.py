"""The function of each kind of node, in one table. `zc.schedule.spec` says what the kinds mean. A feature with kinds of
its own brings their functions (`zc.engine.core.Features`).

Each function runs on the stream of its node, in the order of the schedule, which alone decides what runs when.
``accs`` is this rank's state, ``bucket`` a number, and ``record`` the plan's `Bucket` of that number.
`Operations` binds the table to one rank's accumulators and to the segments of one schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zc.engine.buffers import Acc, Accumulators, Function
from zc.engine.memory_order import in_order
from zc.kernels import accumulate_cast as add_cast
from zc.kernels import flatten_cast as overwrite
from zc.kernels import matmul_into, rows_into, scatter_into
from zc.log import log
from zc.ranks.routes import Sum
from zc.schedule import spec
from zc.schedule.nodes import TARGETS
from zc.schedule.spec import BucketOp, FlattenCast, Op, Reduce, Role, Spans, Take, WgradInto

if TYPE_CHECKING:
    from zc.engine.program import Segment
    from zc.planning.plan import Bucket


Grads = Sequence[Tensor | None]

# --- gradients are written ---


def flatten_cast(
    accs: Accumulators, bucket: int, buffer: str, slots: Sequence[int], grads: Grads, spans: Spans | None = None
) -> None:
    log.debug("bucket %d: slots %s are written into %s", bucket, slots, buffer)
    record = accs.plan.buckets[bucket]
    accs.buffers.allocate(record)
    _overwrite(accs.buffers.named(buffer, record), *_present(accs, record, slots, grads), spans)


def accumulate_cast(
    accs: Accumulators, bucket: int, buffer: str, slots: Sequence[int], grads: Grads, spans: Spans | None = None
) -> None:
    log.debug("bucket %d: slots %s are added to %s (%s)", bucket, slots, buffer, accs.state[bucket].value)
    record = accs.plan.buckets[bucket]
    accs.buffers.allocate(record)
    acc = accs.buffers.named(buffer, record)
    present, offsets = _present(accs, record, slots, grads)
    accs.landed[bucket] = False
    accs.fill_with_zeros(bucket, acc)
    if accs.state[bucket] is Acc.PARTIAL:
        if present:  # none, if the schedule only reduces
            add_cast(acc, present, offsets)
        return
    if accs.state[bucket] is Acc.REDUCED and accs.buffers.acc:
        accs.move_aside(bucket, accs.buffers.shard(acc, record))
    _overwrite(acc, present, offsets, spans)
    if spans is not None:
        slots_in_order = enumerate(record.slots)
        accs.unfilled[bucket] = {
            k for k, s in slots_in_order if not any(a <= s.offset and s.stop <= b for a, b in spans)
        }
    accs.state[bucket] = Acc.PARTIAL


def wgrad_into(
    accs: Accumulators, bucket: int, buffer: str, slot: int, start: int, stop: int, *inputs: Tensor, how: str = "mm"
) -> None:
    accs.buffers.allocate(accs.plan.buckets[bucket])
    out = accs.buffers.named(buffer, accs.plan.buckets[bucket])[start:stop]
    add = not accs.plan.placement.shards_gradients and slot not in accs.unfilled[bucket]
    log.debug("bucket %d: slot %d is computed in %s (%s)", bucket, slot, buffer, "added" if add else "written")
    compute(how, out, inputs, add=add)
    accs.unfilled[bucket].discard(slot)
    accs.touched[bucket][slot] = True


def deposit(accs: Accumulators, bucket: int, slot: int, grad: Tensor) -> None:
    log.debug("bucket %d: the gradient of slot %d is deposited until the bucket is reduced", bucket, slot)
    accs.on_deposit(bucket, slot, grad)


def compute(how: str, out: Tensor, inputs: Sequence[Tensor], *, add: bool) -> None:
    kernels: dict[str, Function] = {"mm": matmul_into, "rows": rows_into, "scatter": scatter_into}
    kernels[how](out, *inputs, add=add)


def _overwrite(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], spans: Spans | None) -> None:
    """Calls the kernel flatten_cast on ``out`` [P], or on its ``spans`` alone."""
    if spans is None:
        overwrite(out, grads, offsets)
        return
    for start, stop in spans:
        inside = [(g, at - start) for g, at in zip(grads, offsets, strict=True) if start <= at < stop]
        overwrite(out[start:stop], [g for g, _ in inside], [at for _, at in inside])


def _present(accs: Accumulators, bucket: Bucket, slots: Sequence[int], grads: Grads) -> tuple[list[Tensor], list[int]]:
    """The gradients that are not None, each in the memory order of its slot, and their offsets."""
    layout, touched = bucket.slots, accs.touched[bucket.index]
    present, offsets = [], []
    for k, grad in zip(slots, grads, strict=True):
        if grad is not None:
            slot = layout[k]
            touched[k] = True
            present.append(grad if slot.order is None else in_order(grad, slot))
            offsets.append(slot.offset)
    return present, offsets


# --- gradients are reduced ---


def reduce(accs: Accumulators, bucket: int, dst: str, src: str, hop: int = 0) -> None:
    sent, total = _sent(accs, bucket, src, hop), _sum_into(accs, bucket, dst, hop)
    accs.routes.to_reduce[hop].reduce(accs.plan.buckets[bucket], sent, total)
    _end_hop(accs, bucket, total, hop)
    log.debug("bucket %d: %s is reduced into %s", bucket, src, dst)


def take(accs: Accumulators, bucket: int, dst: str, src: str, hop: int = 0) -> None:
    sent = _sent(accs, bucket, src, hop)
    accs.routes.to_reduce[hop].take(accs.plan.buckets[bucket], sent, accs.buffers.raw(dst))
    log.debug("bucket %d: %s has been taken into %s", bucket, src, dst)


def finish(accs: Accumulators, bucket: int, dst: str, src: str, hop: int = 0) -> None:
    total = _sum_into(accs, bucket, dst, hop)
    accs.routes.to_reduce[hop].finish(accs.plan.buckets[bucket], accs.buffers.raw(src), total)
    _end_hop(accs, bucket, total, hop)
    log.debug("bucket %d: %s is reduced into %s", bucket, src, dst)


def _sent(accs: Accumulators, bucket: int, src: str, hop: int) -> Tensor:
    """What a hop sends: this rank's gradients [P], or the sum of the hop before."""
    record = accs.plan.buckets[bucket]
    if hop > 0:
        return accs.buffers.inner_sum(src, record, hop - 1)
    accs.num_reductions[bucket] += 1
    log.debug("bucket %d: its reduction %d since the last step starts", bucket, accs.num_reductions[bucket])
    grads = accs.buffers.named(src, record)
    if accs.unfilled[bucket]:
        accs.fill_with_zeros(bucket, grads)
    return grads


def _sum_into(accs: Accumulators, bucket: int, dst: str, hop: int) -> Sum:
    """The last hop adds the mean over all ranks to what this rank's shard of an accumulator holds; in stage 1 the sum
    that was there has been sent. Others leave the sum of some ranks' gradients at the start of ``dst``, in float16
    their mean."""
    plan, record = accs.plan, accs.plan.buckets[bucket]
    this = plan.hops[hop]
    if not this.is_last:
        return Sum(accs.buffers.inner_sum(dst, record, hop), this.scale)
    out = accs.buffers.shard(accs.buffers.named(dst, record), record)
    return Sum(out, this.scale, plan.placement.shards_gradients and accs.state[bucket] is not Acc.EMPTY)


def _end_hop(accs: Accumulators, bucket: int, total: Sum, hop: int) -> None:
    """After the last hop this rank's shard of the accumulator has the mean over ranks, and what was moved aside."""
    if not accs.plan.hops[hop].is_last:
        return
    accs.landed[bucket] = False
    if bucket in accs.spilled:
        accs.spilled.discard(bucket)
        total.out.add_(accs.buffers.spill[bucket])
    accs.state[bucket] = Acc.REDUCED


# --- host memory ---


def stage_shard(accs: Accumulators, bucket: int, dst: str, src: str) -> None:
    record = accs.plan.buckets[bucket]
    accs.buffers.named(dst, record).copy_(accs.buffers.shard(accs.buffers.named(src, record), record))


def copy_to_host(accs: Accumulators, bucket: int, dst: str, src: str) -> None:
    record = accs.plan.buckets[bucket]
    out, tensor = accs.buffers.named(dst, record), accs.buffers.named(src, record)
    if accs.state[bucket] is Acc.REDUCED:  # the rest of a partial sum is spent
        out, tensor = accs.buffers.shard(out, record), accs.buffers.shard(tensor, record)
    accs.move(out, tensor, "to_host")
    accs.landed[bucket] = True


def copy_to_device(accs: Accumulators, bucket: int, dst: str, src: str) -> None:
    """Copies an accumulator in host memory to the device, for the writes of one backward. An empty one is not copied:
    the first write of an update overwrites."""
    record = accs.plan.buckets[bucket]
    out, tensor = accs.buffers.named(dst, record), accs.buffers.named(src, record)
    if accs.plan.placement.shards_gradients or accs.state[bucket] is Acc.PARTIAL:
        if accs.state[bucket] is not Acc.EMPTY:
            accs.move(out, tensor, "to_device")
    elif accs.state[bucket] is Acc.REDUCED:
        accs.nbytes_moved["to_device"] += accs.move_aside(bucket, accs.buffers.shard(tensor, record)).nbytes


# --- weights ---


def take_weights(accs: Accumulators, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    return accs.on_take(places)


def gather(
    accs: Accumulators,
    bucket: int,
    dst: str,
    src: str | None = None,
    extent: tuple[int, int] | None = None,
    scratch: str | None = None,
) -> None:
    buffers, record = accs.buffers, accs.plan.bucket(bucket)
    log.debug("bucket %d: its weights are gathered", bucket)
    room = None if scratch is None else buffers.raw(scratch)
    if src is not None:  # stage 3
        whole = buffers.gathered(dst, record, 0 if extent is None else extent[0])
        accs.routes.gather(record, whole, buffers.weight_shard(bucket), room)
        return
    flat = buffers.flat_param[bucket]
    if room is None:
        accs.routes.gather(record, flat, buffers.shard(flat, record))
        return
    masters, own = buffers.master_shard[bucket].detach(), buffers.owned(flat, record)
    accs.routes.gather(record, flat, masters, room, base=own)
    buffers.remember_shard(record)


def publish(accs: Accumulators, bucket: int, buffer: str) -> None:
    """Nothing to do: the node stands for the main stream's right to read, and its waits give it that."""
    log.debug("bucket %d: its new weights may be read", bucket)


TABLE: dict[type[Op], Function] = {
    spec.FlattenCast: flatten_cast, spec.AccumulateCast: accumulate_cast, spec.WgradInto: wgrad_into,
    spec.Deposit: deposit,
    spec.Reduce: reduce, spec.Take: take, spec.Finish: finish,
    spec.StageShard: stage_shard, spec.CopyToHost: copy_to_host, spec.CopyToDevice: copy_to_device,
    spec.TakeWeights: take_weights, spec.Gather: gather, spec.Publish: publish,
}  # fmt: skip


class MayReduce(Protocol):
    """Whether all ranks agree to reduce: asked before an operation that depends on it. `Agreement.permission` gives it,
    with several ranks `zc.engine.announcements.Announcement.may_reduce`. ``starts``: the operation is the first one of
    a bucket's reduction."""

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
        """These operations for one run, in which ranks reduce if they agree. In stage 1 the stream of a reduction asks
        before it. In stage 2 gradients pass through the ring, so the host asks before the first write: everything
        before it is issued by then, and keeps a GPU busy while the host waits."""
        if self._replaced is None:
            instead = instead_of_reducing(self._accs)
            self._replaced = [(TARGETS[kind].__name__, kind in (Reduce, Take), do) for kind, do in instead.items()]
        run = copy.copy(self)
        for name, starts, other in self._replaced:
            setattr(run, name, _if_agreed(may_reduce, starts, getattr(self, name), other))
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
    out = torch.empty(stop - start, dtype=record.grad_dtype, device=record.device)
    compute(how, out, inputs, add=False)
    accs.on_deposit(bucket, slot, out.view(record.slots[slot].shape))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _if_among(buckets: Collection[int], operation: Function, bucket: int, *args: Any, **kwargs: Any) -> Any:
    return operation(bucket, *args, **kwargs) if bucket in buckets else None


def _if_agreed(may_reduce: MayReduce, starts: bool, operation: Function, other: Function) -> Function:
    """``starts``: its first hop, which schedules do not name, is the start of a reduction."""

    def run(*args: Any, **kwargs: Any) -> Any:
        agreed = may_reduce(starts=starts and not kwargs.get("hop"))
        return (operation if agreed else other)(*args, **kwargs)

    return run
