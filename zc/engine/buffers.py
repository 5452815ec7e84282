"""The tensors of a plan on one rank, all of which are allocated here, and what each accumulator holds.

Bytes per rank, by element of P (docs/design.md has the table by stage). ``acc`` and ``ring`` exist from a backward to
the ``zero_grad`` that sets gradients to None, the others always::

    flat_param    P * param_dtype    the parameters' own memory, whole on every rank
                                     (stage 3: nothing; parameters have bytes while they are read)
    weight        S * param_dtype    stage 3: this rank's shard of the weights; also the master, if as wide
    frozen        S * param_dtype    stage 3, or shard_frozen: this rank's shard of the frozen parameters
    arena         weight_cap         there: gathered weights, at most, while a forward or backward runs
    master_shard  S * acc_dtype      only where param_dtype is narrower than acc_dtype; for an optimizer that reads
                                     whole parameters, the parameters that this rank owns (`zc.planning.layout`)
    acc           S (stage 2) or P (stage 1) * acc_dtype
    ring          num_buffers flat_grad in grad_dtype and one scratch, sized for the largest bucket; no scratch
                  where ranks read each other's memory. A reduction of several hops (`zc.planning.plan`) also needs
                  two host_sum, of P / ranks per host elements each, or [S] with replicas; its scratch has room
                  for the largest hop. Ranks of one host that exchange messages sum them in flat_grad or acc
    spill         S * acc_dtype      stage 1 alone: where the reduced gradient of a bucket is moved aside (below), from
                  the first time on that it was
    published     S * param_dtype    only where weights travel as differences: this rank's part of flat_param after
                  the last update, to notice writes of the caller
    update        likewise: the encoded differences of the largest bucket

With offload, host memory (pinned if the device is a GPU) has::

    master_shard  S * acc_dtype      always: the weights are on the device, as flat_param or, in stage 3, weight
    host          S (stage 1 that accumulates there: P) * acc_dtype: the gradient that the update reads
    param         num_buffers * S * param_dtype of the largest bucket that has a cast

The device has ``staging``: num_buffers times the largest ``host``; and no acc if gradients accumulate in ``host``.

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
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from zc.planning.allocations import Lifetime, has_own_master, in_order, nbytes_of, of_bucket, shared
from zc.planning.layout import Slot
from zc.planning.plan import FIRST_FROZEN, Bucket, Plan
from zc.ranks.routes import Routes, part_of
from zc.schedule.buffer import Buffer

if TYPE_CHECKING:
    from zc.offload.host_step import HostMemory
    from zc.ranks.group import Group
    from zc.schedule.spec import Op


class Buffers:
    """flat_param, master_shard, accumulators and ring of one rank.

    Lifetimes: accumulators and ring exist from a bucket's first write (`allocate`) until gradients are set to None
    (`free`), like plain PyTorch's gradients. The main stream calls both, and `free` after it has joined all other
    streams, so they need no record_stream unless the main stream has changed (`Streams.hand_to_main`). All other
    tensors live as long as the plan, but for gathered weights (`arena`, `whole`). A ring buffer holds one bucket's
    gradient from its flatten_cast, and in two levels by messages the host's sum after it, until the last reduce or take
    that reads it; the schedule's events keep the next user away until then. ``flat_param[b]`` never moves: it is the
    memory of its parameters, each with a storage of its own that keeps it alive.

    A new object has no tensors; `add` and `add_staging` allocate those that live as long as the plan. ``memory`` has
    those that a plan with offload keeps on the host.

    Each tensor that an operation on a stream uses, and that outlives the call which makes it, lies in one of
    `all_tensors`. When a model is dropped, its streams may still use them, and these lists name all such memory.
    """

    def __init__(self, plan: Plan, rank: int, memory: HostMemory | None = None) -> None:
        self.rank, self._memory = rank, memory
        self._set_plan(plan)
        # All tensors by kind. A list stays the same object while its tensors come and go.
        self._of_kind: dict[str, list[Tensor]] = {}
        # the ring, as bytes
        self.has_ring = False
        self.flat_grad: Final = self._new_list("flat_grad")
        self.scratch: Final = self._new_list("scratch")
        self.host_sum: Final = self._new_list("host_sum")
        self.flat_param: Final = self._new_list("flat_param")
        self.weight: Final = self._new_list("weight")
        self.frozen: Final = self._new_list("frozen")
        self.arena: Final = self._new_list("arena")  # the issuing thread makes and drops it, when no stream uses it
        self.whole: Final = self._new_list("whole")  # [P], while a sharded bucket is gathered into memory of its own
        self.encoded: Final = self._new_list("encoded")  # [P] each, of whole buckets that came encoded (`WholeParams`)
        self.master_shard: Final = self._new_list("master")
        self.acc: Final = self._new_list("acc")
        self._numel_acc: list[int] = []  # by bucket
        self.spill: Final = self._new_list("spill")  # stage 1: reduced gradients [S] that were moved aside
        self.host: Final = self._new_list("host")
        self._staging: Final = self._new_list("staging")
        self._param: Final = self._new_list("param")
        self._update: Final = self._new_list("update")
        self.published: Final = self._new_list("published")
        self.tables: Final = self._new_list("tables")  # where blocks of encoded rows lie, as kernels read it
        self.num_skipped: Final = self._new_list("num_skipped")  # [1], at most: the steps that a GradScaler left out
        self.all_tensors: Final = list(self._of_kind.values())
        # cached views of a bucket's gradient; `free` drops them, since a view keeps the memory alive
        self.cuts: dict[int, list[dict[str, Tensor]]] = {}

    def _set_plan(self, plan: Plan) -> None:
        self.plan, self._rooms = plan, shared(plan, self.rank)

    def _new_list(self, kind: str) -> list[Tensor]:
        return self._of_kind.setdefault(kind, [])

    def add(self, bucket: Bucket) -> None:
        """Allocates the tensors of the plan's next bucket that live as long as the plan."""
        allocations = of_bucket(self.plan, bucket)
        lasting = [each for each in allocations if each.lifetime is Lifetime.PLAN]
        tensors = {
            each.kind: self._zeros(each.numel(bucket, self.rank), each.dtype, bucket.device, on_host=each.on_host)
            for each in lasting
        }
        if bucket.is_frozen:
            assert bucket.index == FIRST_FROZEN + len(self.frozen)
            self.frozen.append(tensors["frozen"])
            return
        assert bucket.index == len(self.flat_param)
        self.flat_param.append(tensors.get("flat_param", empty(0, bucket.param_dtype, bucket.device)))
        for kind in tensors.keys() & {"weight", "host", "published"}:
            self._of_kind[kind].append(tensors[kind])
        parameters = tensors["weight"] if "weight" in tensors else self.owned(tensors["flat_param"], bucket)
        self.master_shard.append(tensors.get("master_shard", parameters))
        for acc in (each for each in allocations if each.kind == "acc"):
            self.acc.append(empty(0, acc.dtype, bucket.device))
            self._numel_acc.append(acc.numel(bucket, self.rank))
        if not self.plan.placement.shards_gradients:
            self.spill.append(empty(0, bucket.acc_dtype, bucket.device))

    def add_staging(self) -> None:
        """Allocates the buffers for weights on their way: encoded differences, and with offload the copies between the
        device and host memory."""
        self._make_rooms(Lifetime.PLAN)

    def _make_rooms(self, lifetime: Lifetime) -> None:
        """Allocates the buffers through which all buckets pass, as bytes. Those between device and host memory begin as
        zeros; the values of others are undefined."""
        device = self.plan.buckets[0].device
        for room in self._rooms:
            if room.lifetime is lifetime:
                make = partial(self._zeros, on_host=room.on_host) if room.kind in ("staging", "param") else empty
                self._of_kind[room.kind][:] = [make(room.nbytes, torch.uint8, device) for _ in range(room.num)]

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device, *, on_host: bool) -> Tensor:
        if on_host:
            assert self._memory is not None, "only with offload a plan has something there"
            return self._memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def weight_shard(self, index: int) -> Tensor:
        """[S]: this rank's shard of the weights of a sharded bucket, frozen or not."""
        return self.weight[index] if index < FIRST_FROZEN else self.frozen[index - FIRST_FROZEN]

    @property
    def filled(self) -> list[int]:
        """The sharded buckets that have been added, by number."""
        return [*range(len(self.weight)), *range(FIRST_FROZEN, FIRST_FROZEN + len(self.frozen))]

    def weight_part(self, bucket: Bucket, slot: Slot) -> tuple[Tensor, slice]:
        """This rank's elements of a sharded parameter, and which elements of the slot they are."""
        inside, elements = bucket.layout.shard_part(slot, self.rank)
        return self.weight_shard(bucket.index)[inside], elements

    def master_part(self, bucket: Bucket, slot: Slot) -> tuple[Tensor, slice] | None:
        """The same of the masters, if they have memory of their own."""
        if bucket.is_frozen or not has_own_master(self.plan, bucket):
            return None
        inside, elements = bucket.layout.owned_part(slot, self.rank)
        return self.master_shard[bucket.index].detach()[inside], elements

    def make_arena(self, nbytes: int) -> None:
        """Room for gathered weights. Lifetime: until ``arena`` is cleared, when no stream uses it."""
        if not self.arena or self.arena[0].numel() < nbytes:
            self.arena[:] = [empty(nbytes, torch.uint8, self.plan.buckets[0].device)]

    def gathered(self, name: str, bucket: Bucket, start: int) -> Tensor:
        """[P]: the whole weights of a bucket, at byte ``start`` of the arena; or, as ``flat_param`` of a bucket that
        all ranks keep as shards, in memory of their own (`whole`)."""
        buffer = Buffer.named(name)
        if buffer.kind == "flat_param":
            return self.whole[0]
        return self.arena[buffer.index][start : start + bucket.nbytes].view(bucket.param_dtype)

    def allocate(self, bucket: Bucket) -> None:
        """Allocates the accumulator of ``bucket`` and the ring if they do not exist; their values are undefined. The
        main stream calls this before it writes a gradient, so before any other stream uses them."""
        if not self.has_ring:
            self._make_rooms(Lifetime.GRADIENTS)
            self.has_ring = True
        if self.acc and not self.acc[bucket.index].numel():
            self.acc[bucket.index] = empty(self._numel_acc[bucket.index], bucket.acc_dtype, bucket.device)
            self.cuts.pop(bucket.index, None)

    def allocate_spill(self, bucket: Bucket, numel: int) -> None:
        """Allocates what a reduced gradient of ``numel`` elements is moved to, if it does not exist."""
        if not self.spill[bucket.index].numel():
            self.spill[bucket.index] = empty(numel, bucket.acc_dtype, bucket.device)

    def free(self, buckets: Sequence[Bucket]) -> None:
        """Frees the accumulators of ``buckets``, and the ring if no accumulator is left. They contain no gradient, and
        no stream uses them. A view that somebody still has keeps its memory. `acc` keeps empty tensors of their dtype
        and device."""
        for bucket in buckets:
            self.cuts.pop(bucket.index, None)
            if self.acc:
                self.acc[bucket.index] = empty(0, bucket.acc_dtype, bucket.device)
        if not any(acc.numel() for acc in self.acc):
            self._free_ring()

    def _free_ring(self) -> None:
        for tensors in (self.flat_grad, self.scratch, self.host_sum):
            tensors.clear()
        self.has_ring = False

    def gradients(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """All tensors that `free` frees for these buckets, and perhaps more."""
        accs = [self.acc[bucket.index] for bucket in buckets] if self.acc else []
        return [*accs, *self.flat_grad, *self.scratch, *self.host_sum]

    def close(self) -> None:
        """Frees all tensors. The caller has waited for all copies, and has given the parameters memory of their own."""
        self.cuts.clear()
        for tensors in self.all_tensors:
            tensors.clear()
        if self._memory is not None:
            self._memory.unlock()
            self._memory = None

    def grow(self, plan: Plan) -> None:
        """Replaces the plan. The present buckets are the first ones of ``plan`` and do not move; the caller adds the
        others. Drops frozen buckets that ``plan`` lacks. Nothing may use the ring meanwhile. Not with offload."""
        for index in {bucket.index for bucket in self.plan.frozen} - {bucket.index for bucket in plan.frozen}:
            self.frozen[index - FIRST_FROZEN] = self.frozen[index - FIRST_FROZEN].new_empty(0)
        self._set_plan(plan)
        self._free_ring()  # the next one has room for the largest bucket of all

    @property
    def note(self) -> str | None:
        """Says why host memory is not as requested, if it is not."""
        return self._memory.note if self._memory is not None else None

    def remember_shard(self, bucket: Bucket) -> None:
        """Remembers this rank's shard of flat_param after an update: a later difference is a write of the caller."""
        if bucket.sends_differences:
            self.published[bucket.index].copy_(self.owned(self.flat_param[bucket.index], bucket))

    def shard(self, tensor: Tensor, bucket: Bucket) -> Tensor:
        """[S]: this rank's shard of an accumulator, which has [P] or [S] elements."""
        if tensor.numel() == bucket.layout.numel_shard:
            return tensor
        start, stop = bucket.layout.shard_range(self.rank)
        return tensor[start:stop]

    def owned(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """The elements of ``flat`` [P] that this rank updates: its shard [S], or its run of whole parameters."""
        start, stop = bucket.layout.owned_range(self.rank)
        return flat[start:stop]

    def numel_owned(self, bucket: Bucket) -> int:
        start, stop = bucket.layout.owned_range(self.rank)
        return stop - start

    def whole_grads(self, bucket: Bucket) -> Tensor:
        """[elements of this rank's run]: memory for the gradients of the whole parameters that this rank updates. In
        stage 1 it is their place in acc_flat: after a reduction only this rank's shard of acc_flat is in use."""
        acc = self.acc[bucket.index] if self.acc and not self.host else None
        if acc is not None and acc.numel() == bucket.numel:
            return self.owned(acc, bucket)
        return empty(self.numel_owned(bucket), bucket.acc_dtype, bucket.device)

    def acc_shard(self, bucket: Bucket) -> Tensor:
        """[S]: the reduced gradient that the update reads: with offload, the copy in host memory."""
        return self.shard((self.host or self.acc)[bucket.index], bucket)

    def acc_copies(self, bucket: Bucket) -> list[Tensor]:
        """[S] each: all copies of the reduced gradient. Code that changes the gradient in place must change each."""
        return [self.shard(acc, bucket) for acc in self.accs_of(bucket.index)]

    def accs_of(self, bucket: int) -> list[Tensor]:
        """The accumulators of a bucket, [S] or [P], in host memory and on the device."""
        return [tensors[bucket] for tensors in (self.host, self.acc) if tensors]

    def named(self, name: str, bucket: Bucket) -> Tensor:
        """The tensor of a buffer of the schedule: ``flat_grad[i]`` [P] and ``acc[b]``.

        With offload also ``staging[i]`` and ``host[b]`` [S] or [P], and, for the elements that this rank updates,
        ``master[b]``, ``param[i]`` and its part of ``flat_param[b]``.
        """
        buffer = Buffer.named(name)
        if buffer.kind == "weight":
            return self.weight_shard(buffer.index)
        tensor = self._of_kind[buffer.kind][buffer.index]
        match buffer.kind:
            case "flat_param":
                return self.owned(tensor, bucket)
            case "staging":
                return part_of(tensor, self.plan.numel_on_host(bucket), bucket.acc_dtype)
            case "param":
                return part_of(tensor, self.numel_owned(bucket), bucket.param_dtype)
            case "flat_grad":
                return part_of(tensor, bucket.numel, bucket.grad_dtype)
        return tensor

    def staged_run(self, name: str, bucket: Bucket) -> Tensor:
        """``staging[i]`` as room for the whole parameters that this rank has updated (stage 3)."""
        return part_of(self._staging[Buffer.named(name).index], self.numel_owned(bucket), bucket.param_dtype)

    def raw(self, name: str) -> Tensor:
        """The bytes of a buffer."""
        buffer = Buffer.named(name)
        return self._of_kind[buffer.kind][buffer.index].view(torch.uint8)

    def inner_sum(self, name: str, bucket: Bucket, hop: int) -> Tensor:
        """Where a hop of a reduction that is not the last one leaves its sum: at the start of this buffer."""
        return part_of(self.raw(name), self.plan.hops[hop].numel_sum(bucket), bucket.net_dtype)

    def nbytes(self) -> dict[str, int]:
        """Bytes on this rank while it has gradients, by kind, each storage once. What lives as long as the plan is
        measured; `zc.planning.allocations` says the rest."""
        both = zip(self.master_shard, self.plan.buckets, strict=True)
        own = (master for master, bucket in both if has_own_master(self.plan, bucket))
        kinds = ("flat_param", "weight", "frozen", "published", "host", "update", "staging", "param")
        lasting = {kind: self._of_kind[kind] for kind in kinds}
        lasting |= {"master_shard": list(own), "spill": [tensor for tensor in self.spill if tensor.numel()]}
        measured = {kind: _nbytes(tensors) for kind, tensors in lasting.items() if tensors}
        return in_order(nbytes_of(self.plan, self.rank) | measured)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All memory with undefined values comes from here: tests fill it with NaN."""
    return torch.empty(numel, dtype=dtype, device=device)


Function = Callable[..., Any]  # of an `Accumulators` and the arguments of a node


class Acc(enum.Enum):
    """What an accumulator holds: nothing, this rank's own sum, or the mean over ranks."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


class Accumulators:
    """What one rank's accumulators hold, and with it all that an operation needs: buffers, routes and ranks. It is the
    first argument of each function in `zc.engine.operations`, also of those that move weights.

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
        self.spilled: set[int] = set()  # buckets whose reduced gradient was moved aside
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
        # bucket and slot of gradients that an optimizer's class has changed in a copy alone, that of their owner
        self.edited: set[tuple[int, int]] = set()
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

    def move_aside(self, bucket: int, reduced: Tensor) -> Tensor:
        """Copies a reduced gradient, where microbatches were not declared (stage 1). Lifetime of the copy: the plan's,
        since the comm stream still reads it when the next backward has begun."""
        self.buffers.allocate_spill(self.plan.buckets[bucket], reduced.numel())
        self.spilled.add(bucket)
        return self.buffers.spill[bucket].copy_(reduced, non_blocking=True)

    def move(self, out: Tensor, tensor: Tensor, way: str) -> None:
        """Copies over the bus, on the current stream. The host does not wait: both tensors live as long as the plan."""
        out.copy_(tensor, non_blocking=True)
        self.nbytes_moved[way] += out.nbytes

    def open_shards(self) -> None:
        """Other ranks may read this rank's shards of the weights until `Shards.close`, where they do."""
        if self.routes.shards is not None:
            self.routes.shards.open({index: self.buffers.weight_shard(index) for index in self.buffers.filled})

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        """zero_grad. With ``set_to_none`` False the gradients become zeros, which still count as gradients."""
        for bucket in buckets:
            if set_to_none:
                self.state[bucket.index] = Acc.EMPTY
                self.touched[bucket.index] = [False] * len(bucket.slots)
            elif self.state[bucket.index] is not Acc.EMPTY:
                for acc in self.buffers.accs_of(bucket.index):
                    acc.zero_()
            self.spilled.discard(bucket.index)
            self.edited = {where for where in self.edited if where[0] != bucket.index}
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
        self.edited.discard((bucket, slot))
        self.touched[bucket][slot] = self.touched[bucket][slot] and not set_to_none
        inside, _ = record.layout.shard_part(record.slots[slot], rank)
        spilled = [self.buffers.spill[bucket]] if bucket in self.spilled else []
        for tensor in self.buffers.accs_of(bucket) + spilled:
            if tensor.numel() == record.numel:
                tensor[record.slots[slot].offset : record.slots[slot].stop] = 0
            else:
                tensor[inside] = 0

    def put_assigned(self, *, add: bool) -> None:
        """Writes `assigned` values into the accumulators, in place of the mean over ranks or in addition to it, and
        forgets them. Called when no stream uses the accumulators."""
        self.edited -= self.assigned.keys()
        for (bucket, slot), value in self.assigned.items():
            record = self.plan.buckets[bucket]
            if self.state[bucket] is Acc.EMPTY:
                self.buffers.allocate(record)
                for acc in self.buffers.accs_of(bucket):
                    acc.zero_()
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

    def touched_flags(self) -> bytes:
        """One byte a parameter, in the order of the plan."""
        return bytes(itertools.chain.from_iterable(self.touched))
