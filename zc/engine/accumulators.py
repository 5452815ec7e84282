"""What the operations of schedules work on: one rank's tensors and ranks, and what each accumulator holds.

Accumulators know whether they are empty: the first write after zero_grad overwrites, it does not add, so that nothing
has to be zeroed. One bucket goes through these states, `Acc`::

                 a write                a reduction
    stage 1:  EMPTY --------> PARTIAL -------------> REDUCED      (this rank's slice holds the mean, the rest is spent)
                                 ^                      |
                                 +---- a write ---------+         (moves the slice aside; the next reduction adds it)

                 a reduction
    stage 2:  EMPTY ------------> REDUCED ----+
                                     ^        | a reduction adds
                                     +--------+
    zero_grad with set_to_none: -> EMPTY

Stage 1 moves a slice aside where backwards before the last one were not inside `zc.no_sync`. Reduction is linear, so
the sum of two means is the mean of the sums.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zc.log import log

if TYPE_CHECKING:
    from zc.engine.buffers import Buffers
    from zc.planning.plan import Bucket, Plan
    from zc.ranks.group import Group
    from zc.ranks.routes import Routes
    from zc.schedule.spec import Op

Function = Callable[..., Any]  # of an `Accumulators` and the arguments of a node


class Acc(enum.Enum):
    """What an accumulator holds: nothing, this rank's own sum, or the mean over ranks."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


class Accumulators:
    """The first argument of each function in `zc.engine.operations`, also of those that move weights.

    Threads: every operation runs on the thread of its stream. That of the main stream is the one that issues schedules:
    autograd's during a backward, the caller's otherwise.
    """

    def __init__(
        self, buffers: Buffers, group: Group, routes: Routes, operations: Mapping[type[Op], Function] = {}
    ) -> None:
        """``operations``: the functions of those kinds of nodes that `zc.engine.operations` does not have."""
        self.buffers, self.operations, plan = buffers, operations, buffers.plan
        # the ranks that share one whole, each with its shard
        self.sharers = group.shard
        # The streams of communication use these; the issuing thread does when it has joined them.
        self.routes = routes
        # The entries of one bucket belong to the operations on its accumulator, which the schedule orders. The issuing
        # thread uses them when it has joined the streams.
        self.state = [Acc.EMPTY] * len(plan.buckets)
        self._spilled: set[int] = set()  # buckets whose reduced gradient was moved aside
        # slots of a partial sum that hold nothing yet: the schedule that emptied it fills them in place (stage 1)
        self.unfilled: list[set[int]] = [set() for _ in plan.buckets]
        self.num_reductions = Counter[int]()  # by bucket, since the last update
        self.landed = [False] * len(plan.buckets)  # whether host memory has the reduced gradient (offload)
        # The copy stream counts, and the issuing thread resets when it has joined it.
        self.nbytes_moved = {"to_host": 0, "to_device": 0}  # over the bus, by this rank, since the last update
        # Only the issuing thread uses the rest.
        # by bucket and slot: this rank has had a gradient since zero_grad; from the boundary on, any rank has
        self.touched = [[False] * len(b.slots) for b in plan.buckets]
        # by bucket and slot: [n] values that the caller has assigned to param.grad, on their way to the accumulator
        self.assigned: dict[tuple[int, int], Tensor] = {}
        # what `deposit` and `take_weights` call: `Runtime` and `ShardedWeights` put their own functions here
        self.on_deposit: Callable[[int, int, Tensor], None] = lambda bucket, slot, grad: None
        self.on_take: Callable[[Sequence[tuple[int, int]]], list[Tensor]] = lambda places: []

    @property
    def plan(self) -> Plan:
        return self.buffers.plan

    def grow(self) -> None:
        """The plan has more buckets now; the first ones are those of before."""
        added = self.plan.buckets[len(self.state) :]
        self.state += [Acc.EMPTY] * len(added)
        self.touched += [[False] * len(b.slots) for b in added]
        self.landed += [False] * len(added)
        self.unfilled += [set() for _ in added]

    def fill_with_zeros(self, bucket: int, acc: Tensor) -> None:
        """Zeros where a backward that raised has opened slots of a partial sum and not come to fill them."""
        for slot in self.unfilled[bucket]:
            acc[self.plan.buckets[bucket].slots[slot].offset : self.plan.buckets[bucket].slots[slot].stop] = 0
        self.unfilled[bucket].clear()

    def start_reduction(self, bucket: int, sent: Tensor) -> None:
        """Called before ``sent``, this rank's gradients [P], go to other ranks."""
        log.debug("bucket %d: its reduction %d since the last step starts", bucket, self.num_reductions[bucket] + 1)
        self.num_reductions[bucket] += 1
        self.fill_with_zeros(bucket, sent)

    def is_added_to(self, bucket: int) -> bool:
        """Whether a mean is added to what the accumulator holds; in stage 1 the sum that was there has been sent."""
        return self.plan.placement.shards_gradients and self.state[bucket] is not Acc.EMPTY

    def end_reduction(self, bucket: int, out: Tensor) -> None:
        """Called when ``out`` [S], this rank's shard of the accumulator, has the mean over ranks."""
        self.landed[bucket] = False
        if bucket in self._spilled:
            self._spilled.discard(bucket)
            out.add_(self.buffers.spill[bucket])
        self.state[bucket] = Acc.REDUCED

    def move_aside(self, bucket: int, reduced: Tensor) -> Tensor:
        """Copies a reduced gradient, where microbatches were not declared (stage 1). Lifetime of the copy: the plan's,
        since the comm stream still reads it when the next backward has begun."""
        self.buffers.allocate_spill(self.plan.buckets[bucket], reduced.numel())
        self._spilled.add(bucket)
        return self.buffers.spill[bucket].copy_(reduced, non_blocking=True)

    def move(self, out: Tensor, tensor: Tensor, way: str) -> None:
        """Copies over the bus, on the current stream. The host does not wait: both tensors live as long as the plan."""
        out.copy_(tensor, non_blocking=True)
        self.nbytes_moved[way] += out.nbytes

    def open_shards(self) -> None:
        """Other ranks may read this rank's shards of the weights until `close_shards`, where they do (`Way.SHARDS`)."""
        if self.routes.gathers_alone:
            self.routes.shards.open({index: self.buffers.weight_shard(index) for index in self.buffers.filled})

    def close_shards(self) -> None:
        """Returns when no rank reads a shard any more, so that all of them may be written."""
        if self.routes.gathers_alone:
            self.routes.shards.close()

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
            for where in [where for where in self.assigned if where[0] == bucket.index]:
                value = self.assigned.pop(where)
                if not set_to_none:
                    self.assigned[where] = value.new_zeros(value.shape)
        if set_to_none:
            self.buffers.free(buckets)

    def drop(self, bucket: int, slot: int, *, set_to_none: bool) -> None:
        """One parameter's gradient becomes zeros in the accumulators, and in what was moved aside. It still counts as a
        gradient, unless ``set_to_none``."""
        record, rank = self.plan.buckets[bucket], self.sharers.rank
        self.assigned.pop((bucket, slot), None)
        self.touched[bucket][slot] = self.touched[bucket][slot] and not set_to_none
        inside, _ = record.layout.shard_part(record.slots[slot], rank)
        accs = [tensors[bucket] for tensors in (self.buffers.host, self.buffers.acc) if tensors]
        for tensor in (*accs, *([self.buffers.spill[bucket]] if bucket in self._spilled else ())):
            if tensor.numel() == record.numel:
                tensor[record.slots[slot].offset : record.slots[slot].stop] = 0
            else:
                tensor[inside] = 0

    def put_assigned(self, *, add: bool) -> None:
        """Writes `assigned` values into the accumulators, in place of the mean over ranks or in addition to it, and
        forgets them. Called when no stream uses the accumulators."""
        for (bucket, slot), value in self.assigned.items():
            record = self.plan.buckets[bucket]
            if self.state[bucket] is Acc.EMPTY:
                self.buffers.allocate(record)
                for tensors in (self.buffers.host, self.buffers.acc):
                    if tensors:
                        tensors[bucket].zero_()
                self.state[bucket], self.landed[bucket] = Acc.REDUCED, True
            inside, _ = record.layout.shard_part(record.slots[slot], self.sharers.rank)
            for shard in self.buffers.acc_copies(record):
                if add:
                    shard[inside].add_(value.to(shard.device))
                else:
                    shard[inside].copy_(value)
        self.assigned.clear()

    def pop_counts(self) -> tuple[Counter[int], dict[str, int]]:
        """`num_reductions` and `nbytes_moved` since the last call."""
        counts = self.num_reductions, self.nbytes_moved
        self.num_reductions, self.nbytes_moved = Counter(), dict.fromkeys(self.nbytes_moved, 0)
        return counts

    def touched_flags(self) -> list[int]:
        return [int(flag) for flags in self.touched for flag in flags]

    def set_touched(self, flags: Sequence[int]) -> None:
        items = iter(flags)
        self.touched = [[bool(next(items)) for _ in bucket.slots] for bucket in self.plan.buckets]
