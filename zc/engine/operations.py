"""The function of each kind of node, in one table. `zc.schedule.spec` says what the kinds mean.

Each function runs on the stream of its node, in the order of the schedule, which alone decides what runs when.
``accs`` is this rank's state, ``bucket`` a number, and ``record`` the plan's `Bucket` of that number.
`zc.engine.binding` binds the table to one rank's accumulators and to the segments of one schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zc.engine import owners, wire
from zc.engine import weight_operations as weights
from zc.engine.accumulators import Acc, Accumulators
from zc.engine.memory_order import in_order
from zc.engine.sums import sum_over_replicas, sum_rows
from zc.kernels import accumulate_cast as add_cast
from zc.kernels import flatten_cast as overwrite
from zc.kernels import matmul_into, rows_into, scatter_into
from zc.kernels import reduce_rows as add_rows
from zc.log import log
from zc.planning.plan import Level, level_of
from zc.ranks.journal import REDUCE, wait
from zc.schedule import spec
from zc.schedule.buffer import Buffer
from zc.schedule.spec import Op, Spans

Grads = Sequence[Tensor | None]
Function = Callable[..., Any]

# --- gradients are written ---


def flatten_cast(
    accs: Accumulators, bucket: int, buffer: str, slots: Sequence[int], grads: Grads, spans: Spans | None = None
) -> None:
    log.debug("bucket %d: slots %s are written into %s", bucket, slots, buffer)
    accs.buffers.allocate(accs.plan.buckets[bucket])
    out = accs.buffers.named(buffer, accs.plan.buckets[bucket])
    _overwrite(out, *_present(accs, bucket, slots, grads), spans)


def accumulate_cast(
    accs: Accumulators, bucket: int, buffer: str, slots: Sequence[int], grads: Grads, spans: Spans | None = None
) -> None:
    log.debug("bucket %d: slots %s are added to %s (%s)", bucket, slots, buffer, accs.state[bucket].value)
    record = accs.plan.buckets[bucket]
    accs.buffers.allocate(record)
    acc = accs.buffers.named(buffer, record)
    present, offsets = _present(accs, bucket, slots, grads)
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


def _present(accs: Accumulators, bucket: int, slots: Sequence[int], grads: Grads) -> tuple[list[Tensor], list[int]]:
    """The gradients that are not None, each in the memory order of its slot, and their offsets."""
    layout, touched = accs.plan.buckets[bucket].slots, accs.touched[bucket]
    present, offsets = [], []
    for k, grad in zip(slots, grads, strict=True):
        if grad is not None:
            touched[k] = True
            present.append(in_order(grad, layout[k]))
            offsets.append(layout[k].offset)
    return present, offsets


# --- gradients are reduced ---


def exchange(accs: Accumulators, bucket: int, dst: str, src: str, among: str | None = None) -> None:
    if Buffer.named(src).kind == "wire":
        wire.exchange_encoded(accs, bucket, dst, src)
        return
    record = accs.plan.buckets[bucket]
    is_of_sums = Buffer.named(src).kind == "host_sum"
    level = level_of(accs.plan, is_of_sums=is_of_sums, among=among)
    sent, received = accs.buffers.sent(src, record, level), accs.buffers.received(dst, record, level)
    if not is_of_sums and level is not Level.NET:
        accs.start_reduction(bucket, sent)
    if level is Level.REPLICAS:
        assert accs.replicas is not None
        sum_over_replicas(accs.replicas, received, sent, bucket)
    elif accs.plan.reduce == "native":
        wait(accs.sharers.reduce_scatter(received, sent, bucket))
    else:
        wait(accs.sharers.of_level(level).all_to_all(received, sent, bucket))
    log.debug("bucket %d: its reduction has arrived in %s", bucket, dst)


def accumulate(accs: Accumulators, bucket: int, acc: str, src: str, among: str | None = None) -> None:
    record, to_sum = accs.plan.buckets[bucket], Buffer.named(acc).kind == "host_sum"
    log.debug("bucket %d: %s is reduced into %s", bucket, src, acc)
    level = level_of(accs.plan, is_of_sums=accs.plan.reduces_twice and not to_sum, among=among)
    if Buffer.named(src).kind == "recv":
        rows = accs.buffers.received(src, record, level)
    else:
        rows = accs.buffers.named(src, record)
    if level is Level.HOST:
        sum_rows(rows.view(accs.plan.topology.ranks_per_host, -1), accs.buffers.sum_in(acc, record), record.acc_dtype)
        return
    rows = rows.view(-1, record.layout.numel_shard)
    if to_sum:
        sum_rows(rows, accs.buffers.named(acc, record), record.acc_dtype)
        return
    out = accs.buffers.shard(accs.buffers.named(acc, record), record)
    add_rows(rows, out, scale=1.0 / accs.plan.num_ranks, add=accs.is_added_to(bucket))
    accs.end_reduction(bucket, out)


def reduce_rows(accs: Accumulators, bucket: int, dst: str, src: str) -> None:
    record, group = accs.plan.buckets[bucket], accs.sharers
    sent, out = accs.buffers.named(src, record), accs.buffers.named(dst, record)
    accs.start_reduction(bucket, sent)
    is_first, add = accs.plan.reduces_twice, accs.is_added_to(bucket)
    if not is_first:
        out = accs.buffers.shard(out, record)

    def use(rows: Tensor, start: int, stop: int) -> None:
        if is_first:
            sum_rows(rows, out[start:stop], record.acc_dtype)
        else:
            add_rows(rows, out[start:stop], scale=1.0 / accs.plan.num_ranks, add=add)

    with group.offering(REDUCE, bucket, sent) as places:
        group.neighbours.rows(sent, *record.layout.host_range(group.rank), places, use)  # one host: the shard
    log.debug("bucket %d: all ranks' %s are reduced into %s", bucket, src, dst)
    if not is_first:
        accs.end_reduction(bucket, out)


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


TABLE: dict[type[Op], Function] = {
    spec.FlattenCast: flatten_cast, spec.AccumulateCast: accumulate_cast, spec.WgradInto: wgrad_into,
    spec.Deposit: deposit,
    spec.Exchange: exchange, spec.Accumulate: accumulate, spec.ReduceRows: reduce_rows,
    spec.Quantise: wire.quantise, spec.AccumulateQuantised: wire.accumulate_quantised,
    spec.StageShard: stage_shard, spec.CopyToHost: copy_to_host, spec.CopyToDevice: copy_to_device,
    spec.Spread: owners.spread, spec.SpreadShards: owners.spread_shards,
    spec.Gather: weights.gather, spec.Publish: weights.publish,
    spec.TakeWeights: weights.take_weights, spec.GatherWeights: weights.gather_weights,
    spec.ReadWeights: weights.read_weights, spec.FreeWeights: weights.free_weights,
}  # fmt: skip
