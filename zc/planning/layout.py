"""Decides where each parameter lies in a flat buffer: offsets and padding in elements, without tensors.

A layout for W = 2 ranks (S = P / W), with parameters ``a`` and ``b``, and padding ``.``::

    |<---------------- P = numel_padded ---------------->|
    |aaaaaaaaaaaa..|bbbbbbbbbbbbbbbbbbbbbbbbbbb..........|
    |<----- rank 0 owns S ----->|<---- rank 1 owns S --->|

`flat_layout` packs tightly, and each rank updates its shard. A shard's edge may cut a parameter, which an elementwise
optimizer does not notice. With ``owners``, for optimizers that read a whole matrix (Muon), gradients are reduced into
the same equal shards, but a rank updates a *run* of whole parameters, of any length or none. Elements of a run that lie
in other ranks' shards are sent to its owner before an update, and back after it::

    |aaaaaaaaaaaa.|bbbbbbbbbbbb.|cccccccccccccccccccccccc|
    |<------ rank 0 ----->|<------ rank 1 ----->|  2  ...    shards of equal length: who reduces
    |<---- owner 0 ------------>|<------ owner 2 ------->|    runs: who updates; rank 1 has none

The layout as a record of its own is from Megatron-LM's megatron_fsdp, the flat shard from ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

LEFT = "."  # the name of a slot without a parameter begins so, and no parameter's does
ALIGN_NBYTES = 128  # a GPU's memory transaction; also keeps 16-byte vector accesses aligned for every slot


@dataclass(frozen=True)
class Rule:
    """An optimizer's requirement on the layout of its parameters.

    ``whole``: its update may read whole parameters, so each has one owner; ``cost`` names an entry of
    `zc.planning.ownership.COSTS`. Otherwise a shard may cut a parameter at any multiple of ``block`` elements, for
    example of those that share one scale of 8-bit state.
    """

    whole: bool = False
    block: int = 1
    cost: str = "elements"


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: elements [offset, offset + numel) of the flat buffer.

    ``strides``: the parameter's own, if it is not row-major (`own_strides`). Its elements then lie in the slot in the
    order of its own memory, for example channels_last.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    @cached_property
    def is_left(self) -> bool:
        """Whether its parameter has left the bucket: another one has its name now, or it lies in another bucket."""
        return self.name.startswith(LEFT)

    def __str__(self) -> str:
        return f"{self.name} {self.shape} at {self.offset}{'' if self.strides is None else f', strides {self.strides}'}"

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions in the slot, outermost first; None: in the order of their numbers."""
        if self.strides is None:
            return None
        strides = self.strides
        order = sorted(range(len(strides)), key=lambda d: (self.shape[d] > 1, -strides[d]))
        return tuple(order) if [d for d in order if self.shape[d] > 1] != _long(self.shape) else None


@dataclass(frozen=True)
class FlatLayout:
    """The slots of one bucket, ascending in offset, and the padded size P = ``numel_padded``, a multiple of W.
    ``owners``: the rank that updates each slot's whole parameter, ascending; None: each rank updates its shard."""

    slots: tuple[Slot, ...]
    numel_padded: int
    world_size: int
    owners: tuple[int, ...] | None = None
    # 1 unless exchanges have two levels (`Topology.has_levels`): the l-th ranks of all hosts have adjacent shards
    num_hosts: int = 1

    @cached_property
    def numel_shard(self) -> int:
        """S, the elements that each rank reduces."""
        return self.numel_padded // self.world_size

    @cached_property
    def numel_padding(self) -> int:
        return self.numel_padded - sum(slot.numel for slot in self.slots)

    def shard_of(self, rank: int) -> int:
        """The rank's shard. With H hosts of L ranks, rank h L + l has shard l H + h, so the l-th ranks of all hosts
        reduce one contiguous piece, the l-th of L."""
        per_host = self.world_size // self.num_hosts
        return rank % per_host * self.num_hosts + rank // per_host

    def rank_of(self, shard: int) -> int:
        """The rank that has this shard."""
        return shard % self.num_hosts * (self.world_size // self.num_hosts) + shard // self.num_hosts

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat buffer whose gradients ``rank`` reduces."""
        start = self.shard_of(rank) * self.numel_shard
        return start, start + self.numel_shard

    @cached_property
    def numel_net_range(self) -> int:
        """H shards."""
        return self.num_hosts * self.numel_shard

    def net_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that the l-th ranks of all hosts, this one among them, reduce with each other: H
        shards. Inside its host each rank sums one such range. With one host it is the rank's shard."""
        start = self.shard_of(rank) // self.num_hosts * self.numel_net_range
        return start, start + self.numel_net_range

    @cached_property
    def runs(self) -> dict[int, tuple[int, int]]:
        """Elements [start, stop) of each owner's parameters with their alignment, by ascending rank. Runs are adjacent
        and begin at element 0."""
        assert self.owners is not None
        starts: dict[int, int] = {}
        for slot, rank in zip(self.slots, self.owners, strict=True):
            if slot.numel:
                starts.setdefault(rank, slot.offset)
        stops = [*list(starts.values())[1:], max((slot.stop for slot in self.slots), default=0)]
        return {rank: (start, stop) for (rank, start), stop in zip(starts.items(), stops, strict=False)}

    def owned_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat buffer that ``rank`` updates."""
        return self.shard_range(rank) if self.owners is None else self.runs.get(rank, (0, 0))

    def owned(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of ``slot`` that ``rank`` updates, as [start, stop) of the flat buffer; empty if start == stop."""
        return _within(slot, *self.owned_range(rank))

    def in_shard(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of ``slot`` in the shard of ``rank``, as [start, stop) of the flat buffer."""
        return _within(slot, *self.shard_range(rank))

    def owned_part(self, slot: Slot, rank: int) -> tuple[slice, slice]:
        """`owned` as elements of the range that ``rank`` updates, and as elements of the slot."""
        return _part(slot, self.owned(slot, rank), self.owned_range(rank)[0])

    def shard_part(self, slot: Slot, rank: int) -> tuple[slice, slice]:
        """`in_shard` as elements of the shard, and as elements of the slot."""
        return _part(slot, self.in_shard(slot, rank), self.shard_range(rank)[0])

    def of_shard(self, rank: int) -> list[tuple[int, int, int]]:
        """(owner, start, stop) of the elements of ``rank``'s shard, ascending, without padding at the end."""
        low, high = self.shard_range(rank)
        common = [(owner, max(start, low), min(stop, high)) for owner, (start, stop) in self.runs.items()]
        return [(owner, start, stop) for owner, start, stop in common if start < stop]

    def of_run(self, rank: int) -> list[tuple[int, int, int]]:
        """(rank of the shard, start, stop): the ranks that reduce the gradients of this rank's run, ascending."""
        start, stop = self.runs.get(rank, (0, 0))
        size, shards = self.numel_shard, range(start // self.numel_shard, -(-stop // self.numel_shard))
        return [(self.rank_of(k), max(start, k * size), min(stop, (k + 1) * size)) for k in shards]


def own_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """``strides``, in elements, of a tensor that fills its memory without holes or overlaps and is not row-major; None
    for all others."""
    dims = sorted(_long(shape), key=lambda d: strides[d])
    expected = [math.prod(shape[d] for d in dims[:k]) for k in range(len(dims))]
    is_dense = math.prod(shape) > 0 and [strides[d] for d in dims] == expected
    row_major = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return tuple(strides) if is_dense and list(strides) != row_major else None


def _long(shape: Sequence[int]) -> list[int]:
    """The dimensions with more than one element; the strides of others mean nothing."""
    return [d for d, size in enumerate(shape) if size > 1]


def _within(slot: Slot, start: int, stop: int) -> tuple[int, int]:
    first = min(max(slot.offset, start), stop)
    return first, max(first, min(slot.stop, stop))


def _part(slot: Slot, common: tuple[int, int], begin: int) -> tuple[slice, slice]:
    start, stop = common
    return slice(start - begin, stop - begin), slice(start - slot.offset, stop - slot.offset)


def outside(ranges: Iterable[tuple[int, int]], numel: int) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of ``numel`` elements that none of ``ranges`` covers."""
    free, start = [], 0
    for first, stop in sorted(ranges):
        if first > start:
            free.append((start, first))
        start = max(start, stop)
    return tuple(free) + (((start, numel),) if start < numel else ())


def align_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def flat_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    align: int,
    num_hosts: int = 1,
    num_replicas: int = 1,
    owners: Mapping[str, int] | None = None,
    strides: Mapping[str, tuple[int, ...] | None] = {},
) -> FlatLayout:
    """Packs parameters in order, each slot at a multiple of ``align`` elements; with ``owners`` sorted by the rank that
    owns them. P is a multiple of W * align, and a shard has a multiple of ``num_replicas`` pieces of ``align``.
    ``strides``: of each slot, by name."""
    slots, offset = [], 0
    for name, shape in shapes if owners is None else sorted(shapes, key=lambda item: owners[item[0]]):
        slot = Slot(name, tuple(shape), offset, strides.get(name))
        slots.append(slot)
        offset = align_up(slot.stop, align)
    numel = align_up(max(offset, 1), world_size * num_replicas * align)
    of_slots = None if owners is None else tuple(owners[slot.name] for slot in slots)
    return FlatLayout(tuple(slots), numel, world_size, of_slots, num_hosts)
