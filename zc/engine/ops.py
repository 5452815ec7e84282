"""What the gradient operations of a schedule do: plain functions on the plan's buffers. No schedule, no hooks here.

Accumulators know whether they are empty: the first write after zero_grad overwrites, it does not add, so that nothing
has to be zeroed. In stage 1 an accumulator goes EMPTY -> PARTIAL (this rank's own sum) -> REDUCED (this rank's slice
holds the mean over ranks; the rest is spent). A further backward before zero_grad, which nobody has declared with
`zc.no_sync`, moves the reduced slice aside first, and the next reduction adds it: reduction is linear.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zc.engine.buffers import Buffers
from zc.engine.memory_order import in_order
from zc.engine.peer_ops import PeerOps, sum_over_replicas, sum_rows
from zc.kernels import accumulate_cast, flatten_cast, matmul_into, reduce_rows, rows_into, scatter_into
from zc.log import log
from zc.planning.plan import Bucket, Plan
from zc.schedule.buffer import Buffer

if TYPE_CHECKING:
    from zc.ranks.comm import Group
    from zc.ranks.work import Work


class Acc(enum.Enum):
    """What an accumulator holds."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


Spans = Sequence[tuple[int, int]]  # elements [start, stop)


def _overwrite(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], spans: Spans | None) -> None:
    """`flatten_cast` of ``out`` [P], or of its ``spans`` alone: nothing else of it is touched."""
    if spans is None:
        flatten_cast(out, grads, offsets)
        return
    for start, stop in spans:
        inside = [(g, at - start) for g, at in zip(grads, offsets, strict=True) if start <= at < stop]
        flatten_cast(out[start:stop], [g for g, _ in inside], [at for _, at in inside])


class GradientOps(PeerOps):
    """The operations, over one rank's buffers and group."""

    def __init__(self, plan: Plan, buffers: Buffers, group: Group) -> None:
        super().__init__(plan, buffers, group)
        self.state = [Acc.EMPTY] * len(plan.buckets)
        self._spill: dict[int, Tensor] = {}  # bucket -> [S], allocated when microbatches were not declared (stage 1)
        self._spilled: set[int] = set()  # buckets whose reduced gradient was moved aside
        # slots of a partial sum that hold nothing yet: the schedule that emptied it fills them in place (stage 1)
        self._fresh: list[set[int]] = [set() for _ in plan.buckets]
        self.touched = [[False] * len(b.slots) for b in plan.buckets]  # since zero_grad, on this rank
        self.num_reductions = [0] * len(plan.buckets)  # since the last update, for explain
        self.reductions_of_last_step = self.num_reductions
        self.num_started = 0  # reductions, ever
        self.landed = [False] * len(plan.buckets)  # whether host memory has the reduced gradient (offload)
        self.nbytes_moved = {"to_host": 0, "to_device": 0}  # over the bus, by this rank, since the last update
        self.nbytes_of_last_step = self.nbytes_moved
        self.on_deposit: Callable[[int, int, Tensor], None] = lambda bucket, slot, grad: None

    def grow(self, plan: Plan) -> None:
        """Takes in ``plan``, whose first buckets are the present ones."""
        added = plan.buckets[len(self.plan.buckets) :]
        self.plan = plan
        self.state += [Acc.EMPTY] * len(added)
        self.touched += [[False] * len(b.slots) for b in added]
        self.num_reductions = [*self.num_reductions, *(0 for _ in added)]
        self.reductions_of_last_step = [*self.reductions_of_last_step, *(0 for _ in added)]
        self.landed += [False] * len(added)
        self._fresh += [set() for _ in added]

    def flatten_cast(
        self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor | None], spans: Spans | None = None
    ) -> None:
        log.debug("bucket %d: slots %s are written into %s", bucket, slots, buffer)
        self.buffers.hold(self.plan.buckets[bucket])
        out = self.buffers.named(buffer, self.plan.buckets[bucket])
        _overwrite(out, *self._present(bucket, slots, grads), spans)

    def accumulate_cast(
        self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor | None], spans: Spans | None = None
    ) -> None:
        log.debug("bucket %d: slots %s are added to %s (%s)", bucket, slots, buffer, self.state[bucket].value)
        self.buffers.hold(self.plan.buckets[bucket])
        acc = self.buffers.named(buffer, self.plan.buckets[bucket])
        present, offsets = self._present(bucket, slots, grads)
        self.landed[bucket] = False
        self.fill_fresh(bucket, acc)
        if self.state[bucket] is Acc.PARTIAL:
            if present:  # a reduction alone adds nothing
                accumulate_cast(acc, present, offsets)
            return
        if self.state[bucket] is Acc.REDUCED and self.buffers.acc:
            self._move_aside(bucket, self.buffers.shard(acc, self.plan.buckets[bucket]))
        _overwrite(acc, present, offsets, spans)
        if spans is not None:
            at = enumerate(self.plan.buckets[bucket].slots)
            self._fresh[bucket] = {k for k, s in at if not any(a <= s.offset and s.stop <= b for a, b in spans)}
        self.state[bucket] = Acc.PARTIAL

    def wgrad_into(
        self, bucket: int, buffer: str, slot: int, start: int, stop: int, *inputs: Tensor, how: str = "mm"
    ) -> None:
        self.buffers.hold(self.plan.buckets[bucket])
        out = self.buffers.named(buffer, self.plan.buckets[bucket])[start:stop]
        add = not self.plan.placement.shards_gradients and slot not in self._fresh[bucket]
        log.debug("bucket %d: slot %d is made in %s (%s)", bucket, slot, buffer, "added" if add else "written")
        make: Any = {"mm": matmul_into, "rows": rows_into, "scatter": scatter_into}[how]
        make(out, *inputs, add=add)
        self._fresh[bucket].discard(slot)
        self.touched[bucket][slot] = True

    def fill_fresh(self, bucket: int, acc: Tensor) -> None:
        """Zeros where a backward that raised has opened slots of a partial sum and not come to fill them."""
        for slot in self._fresh[bucket]:
            acc[self.plan.buckets[bucket].slots[slot].offset : self.plan.buckets[bucket].slots[slot].stop] = 0
        self._fresh[bucket].clear()

    def _move_aside(self, bucket: int, reduced: Tensor) -> None:
        # kept for the plan's life: the comm stream still reads it when the next backward has begun
        if bucket not in self._spill:
            self._spill[bucket] = torch.empty_like(reduced, device=self.plan.buckets[bucket].device)
        self._spill[bucket].copy_(reduced, non_blocking=True)
        self._spilled.add(bucket)

    def _present(
        self, bucket: int, slots: Sequence[int], grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[int]]:
        layout = self.plan.buckets[bucket].slots
        found = ((layout[k], g) for k, g in zip(slots, grads, strict=True))
        pairs = [(in_order(g, slot), slot.offset) for slot, g in found if g is not None]
        for k, grad in zip(slots, grads, strict=True):
            if grad is not None:
                self.touched[bucket][k] = True
        return [g for g, _ in pairs], [offset for _, offset in pairs]

    def deposit(self, bucket: int, slot: int, grad: Tensor) -> None:
        log.debug("bucket %d: the gradient of slot %d is kept until the bucket is reduced", bucket, slot)
        self.on_deposit(bucket, slot, grad)

    def launch_reduce(self, bucket: int, dst: str, src: str) -> Work | None:
        record = self.plan.buckets[bucket]
        is_second = Buffer.named(src).kind == "host_sum"
        sent, received = self.buffers.named(src, record), self.buffers.received(dst, record, is_second=is_second)
        if not is_second:
            self._start_reduction(bucket, sent)
        if self.replicas is not None and (is_second or self.plan.world_size == 1):
            sum_over_replicas(self.replicas, received, sent, bucket)
            return None
        if is_second:
            size = record.layout.numel_shard
            return self.group.reduce_net(received.view(-1, size), sent.view(-1, size), bucket)
        exchange = self.group.all_to_all if self.plan.reduce == "exact" else self.group.reduce_scatter
        return exchange(received, sent, bucket)

    def _start_reduction(self, bucket: int, sent: Tensor) -> None:
        log.debug("bucket %d: its reduction %d since the last step starts", bucket, self.num_reductions[bucket] + 1)
        self.num_reductions[bucket] += 1
        self.num_started += 1
        self.fill_fresh(bucket, sent)

    def wait_reduce(self, bucket: int, work: Work | None, dst: str, src: str) -> None:
        if work is not None:
            work.wait()
            log.debug("bucket %d: its reduction has arrived in %s", bucket, dst)

    def accumulate(self, bucket: int, acc: str, src: str) -> None:
        record, is_first = self.plan.buckets[bucket], Buffer.named(acc).kind == "host_sum"
        log.debug("bucket %d: %s is reduced into %s", bucket, src, acc)
        if Buffer.named(src).kind == "recv":
            rows = self.buffers.received(src, record, is_second=self.plan.reduces_twice and not is_first)
        else:
            rows = self.buffers.named(src, record)
        rows = rows.view(-1, record.layout.numel_shard)
        if is_first:
            sum_rows(rows, self.buffers.named(acc, record), record.acc_dtype)
            return
        out = self.buffers.shard(self.buffers.named(acc, record), record)
        reduce_rows(rows, out, scale=1.0 / self.plan.num_ranks, add=self._adds(bucket))
        self._is_reduced(bucket, out)

    def _adds(self, bucket: int) -> bool:
        """Whether a mean is added to what the accumulator holds; in stage 1 the sum that was there has been sent."""
        return self.plan.placement.shards_gradients and self.state[bucket] is not Acc.EMPTY

    def _is_reduced(self, bucket: int, out: Tensor) -> None:
        self.landed[bucket] = False
        if bucket in self._spilled:
            self._spilled.discard(bucket)
            out.add_(self._spill[bucket])
        self.state[bucket] = Acc.REDUCED

    # --- host memory ---

    def stage_shard(self, bucket: int, dst: str, src: str) -> None:
        record = self.plan.buckets[bucket]
        self.buffers.named(dst, record).copy_(self.buffers.shard(self.buffers.named(src, record), record))

    def copy_to_host(self, bucket: int, dst: str, src: str) -> None:
        record = self.plan.buckets[bucket]
        out, given = self.buffers.named(dst, record), self.buffers.named(src, record)
        if self.state[bucket] is Acc.REDUCED:  # the rest of a partial sum is spent
            out, given = self.buffers.shard(out, record), self.buffers.shard(given, record)
        self.move(out, given, "to_host")
        self.landed[bucket] = True

    def copy_to_device(self, bucket: int, dst: str, src: str) -> None:
        """An accumulator visits the device, unless it is empty: the first write of an update overwrites."""
        record = self.plan.buckets[bucket]
        out, given = self.buffers.named(dst, record), self.buffers.named(src, record)
        if self.plan.placement.shards_gradients or self.state[bucket] is Acc.PARTIAL:
            if self.state[bucket] is not Acc.EMPTY:
                self.move(out, given, "to_device")
        elif self.state[bucket] is Acc.REDUCED:
            self._move_aside(bucket, self.buffers.shard(given, record))
            self.nbytes_moved["to_device"] += self._spill[bucket].nbytes

    def move(self, out: Tensor, given: Tensor, way: str) -> None:
        """Over the bus, on the current stream; the host does not wait, both ends are there for the plan's life."""
        out.copy_(given, non_blocking=True)
        self.nbytes_moved[way] += out.nbytes

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        """zero_grad. With ``set_to_none`` False the gradients become zeros, which still count as gradients."""
        for bucket in buckets:
            if set_to_none:
                self.state[bucket.index] = Acc.EMPTY
                self.touched[bucket.index] = [False] * len(bucket.slots)
            elif self.state[bucket.index] is not Acc.EMPTY:
                for tensors in (self.buffers.host, self.buffers.acc):
                    if tensors:
                        tensors[bucket.index].zero_()
            self._spilled.discard(bucket.index)
        if set_to_none:
            self.buffers.release(buckets)

    def drop(self, bucket: int, slot: int, *, set_to_none: bool) -> None:
        """One parameter's gradient becomes zeros in the accumulators, and in what was moved aside. It still counts as a
        gradient, unless ``set_to_none``."""
        record, rank = self.plan.buckets[bucket], self.group.rank
        self.touched[bucket][slot] = self.touched[bucket][slot] and not set_to_none
        start, _ = record.layout.shard_range(rank)
        first, stop = record.layout.in_shard(record.slots[slot], rank)
        kept = [tensors[bucket] for tensors in (self.buffers.host, self.buffers.acc) if tensors]
        for tensor in (*kept, *([self._spill[bucket]] if bucket in self._spilled else ())):
            if tensor.numel() == record.numel:
                tensor[record.slots[slot].offset : record.slots[slot].stop] = 0
            else:
                tensor[first - start : stop - start] = 0

    def close_step(self) -> None:
        """After an update: what explain tells of it is put aside, and counting begins anew."""
        self.reductions_of_last_step = self.num_reductions
        self.num_reductions = [0] * len(self.plan.buckets)
        self.nbytes_of_last_step = self.nbytes_moved
        self.nbytes_moved = dict.fromkeys(self.nbytes_moved, 0)

    def touched_flags(self) -> list[int]:
        return [int(flag) for flags in self.touched for flag in flags]

    def set_touched(self, flags: Sequence[int]) -> None:
        items = iter(flags)
        self.touched = [[bool(next(items)) for _ in bucket.slots] for bucket in self.plan.buckets]
