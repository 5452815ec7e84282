"""What the accumulators of one rank hold, and what the operations of schedules count.

Accumulators know whether they are empty: the first write after zero_grad overwrites, it does not add, so that nothing
has to be zeroed. In stage 1 an accumulator goes EMPTY -> PARTIAL (this rank's own sum) -> REDUCED (this rank's slice
holds the mean over ranks; the rest is spent). A further backward before zero_grad, without `zc.no_sync` on the one
before, moves the reduced slice aside first, and the next reduction adds it: reduction is linear.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zc.log import log
from zc.ranks.journal import GATHER

if TYPE_CHECKING:
    from zc.engine.buffers import Buffers
    from zc.engine.wire import Code
    from zc.planning.plan import Bucket, Plan
    from zc.ranks.group import Group


class Acc(enum.Enum):
    """What an accumulator holds."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


class Accumulators:
    """What `zc.engine.operations` work on: one rank's buffers and group, and the state of each bucket.

    Operations change the state on the thread of their stream; the calling thread reads it after it has joined the
    streams.
    """

    def __init__(self, plan: Plan, buffers: Buffers, group: Group) -> None:
        self.plan, self.buffers = plan, buffers
        # the ranks that have the shards of one whole; those that have the same shard
        self.group, self.replicas = group.shard, group.replicas
        self.codes: dict[tuple[str, int], Code] = {}  # of what travels encoded, by use and bucket
        self.places: dict[str, dict[int, bytes]] = {}  # by buffer: where the other ranks' is
        self.state = [Acc.EMPTY] * len(plan.buckets)
        self._spill: dict[int, Tensor] = {}  # bucket -> [S], allocated when microbatches were not declared (stage 1)
        self._spilled: set[int] = set()  # buckets whose reduced gradient was moved aside
        # slots of a partial sum that hold nothing yet: the schedule that emptied it fills them in place (stage 1)
        self.unfilled: list[set[int]] = [set() for _ in plan.buckets]
        self.touched = [[False] * len(b.slots) for b in plan.buckets]  # since zero_grad, on this rank
        self.num_reductions = [0] * len(plan.buckets)  # since the last update, for explain
        self.reductions_of_last_step = self.num_reductions
        self.landed = [False] * len(plan.buckets)  # whether host memory has the reduced gradient (offload)
        self.nbytes_moved = {"to_host": 0, "to_device": 0}  # over the bus, by this rank, since the last update
        self.nbytes_of_last_step = self.nbytes_moved
        self.on_deposit: Callable[[int, int, Tensor], None] = lambda bucket, slot, grad: None
        self.on_take: Callable[[Sequence[tuple[int, int]]], list[Tensor]] = lambda places: []  # stage 3

    def grow(self, plan: Plan) -> None:
        """Takes in ``plan``, whose first buckets are the present ones."""
        added = plan.buckets[len(self.plan.buckets) :]
        self.plan = plan
        self.state += [Acc.EMPTY] * len(added)
        self.touched += [[False] * len(b.slots) for b in added]
        self.num_reductions = [*self.num_reductions, *(0 for _ in added)]
        self.reductions_of_last_step = [*self.reductions_of_last_step, *(0 for _ in added)]
        self.landed += [False] * len(added)
        self.unfilled += [set() for _ in added]

    def fill_with_zeros(self, bucket: int, acc: Tensor) -> None:
        """Zeros where a backward that raised has opened slots of a partial sum and not come to fill them."""
        for slot in self.unfilled[bucket]:
            acc[self.plan.buckets[bucket].slots[slot].offset : self.plan.buckets[bucket].slots[slot].stop] = 0
        self.unfilled[bucket].clear()

    def start_reduction(self, bucket: int, sent: Tensor) -> None:
        log.debug("bucket %d: its reduction %d since the last step starts", bucket, self.num_reductions[bucket] + 1)
        self.num_reductions[bucket] += 1
        self.fill_with_zeros(bucket, sent)

    def is_added_to(self, bucket: int) -> bool:
        """Whether a mean is added to what the accumulator holds; in stage 1 the sum that was there has been sent."""
        return self.plan.placement.shards_gradients and self.state[bucket] is not Acc.EMPTY

    def end_reduction(self, bucket: int, out: Tensor) -> None:
        self.landed[bucket] = False
        if bucket in self._spilled:
            self._spilled.discard(bucket)
            out.add_(self._spill[bucket])
        self.state[bucket] = Acc.REDUCED

    def move_aside(self, bucket: int, reduced: Tensor) -> Tensor:
        """Lifetime of the copy: the plan's, since the comm stream still reads it when the next backward has begun."""
        if bucket not in self._spill:
            self._spill[bucket] = torch.empty_like(reduced, device=self.plan.buckets[bucket].device)
        self._spilled.add(bucket)
        return self._spill[bucket].copy_(reduced, non_blocking=True)

    def move(self, out: Tensor, tensor: Tensor, way: str) -> None:
        """Over the bus, on the current stream; the host does not wait, both ends are there for the plan's life."""
        out.copy_(tensor, non_blocking=True)
        self.nbytes_moved[way] += out.nbytes

    def weight_places(self, bucket: int) -> dict[int, bytes]:
        """By rank, where its shard of the weights lies (stage 3). Waits until all of them may be read."""
        name = f"weight[{bucket}]"
        if name not in self.places:
            self.places[name] = self.group.await_full(GATHER, bucket)
        return self.places[name]

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
        inside, _ = record.layout.shard_part(record.slots[slot], rank)
        accs = [tensors[bucket] for tensors in (self.buffers.host, self.buffers.acc) if tensors]
        for tensor in (*accs, *([self._spill[bucket]] if bucket in self._spilled else ())):
            if tensor.numel() == record.numel:
                tensor[record.slots[slot].offset : record.slots[slot].stop] = 0
            else:
                tensor[inside] = 0

    def close_step(self) -> None:
        """After an update: sets aside what explain tells of it, and counts from zero."""
        self.reductions_of_last_step = self.num_reductions
        self.num_reductions = [0] * len(self.plan.buckets)
        self.nbytes_of_last_step = self.nbytes_moved
        self.nbytes_moved = dict.fromkeys(self.nbytes_moved, 0)

    def touched_flags(self) -> list[int]:
        return [int(flag) for flags in self.touched for flag in flags]

    def set_touched(self, flags: Sequence[int]) -> None:
        items = iter(flags)
        self.touched = [[bool(next(items)) for _ in bucket.slots] for bucket in self.plan.buckets]
