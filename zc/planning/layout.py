"""Where each parameter lies in a flat buffer: offsets and padding in elements, decided once, no tensors.

A layout of W = 2 ranks (S = P / W), ``a`` and ``b`` parameters, ``.`` padding::

    |<---------------- P = numel_padded ---------------->|
    |aaaaaaaaaaaa..|bbbbbbbbbbbbbbbbbbbbbbbbbbb..........|
    |<----- rank 0 owns S ----->|<---- rank 1 owns S --->|

`flat_layout` packs tightly: a shard's edge may cut a parameter, which elementwise optimizers never notice, and each
rank updates its shard. `whole_layout` is for optimizers that read a whole matrix (Muon): gradients are
reduced into the same equal shards, but a rank updates a run of whole parameters, of any length or none. What of a run
lies in other ranks' shards goes to its owner before an update, and back after it::

    |aaaaaaaaaaaa.|bbbbbbbbbbbb.|cccccccccccccccccccccccc|
    |<------ rank 0 ----->|<------ rank 1 ----->|  2  ...    shards of equal length: what is reduced where
    |<---- owner 0 ------------>|<------ owner 2 ------->|    runs: what is updated where; rank 1 has none

The idea of one noun for the layout: Megatron-LM's megatron_fsdp; the flat shard: ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

ALIGN_NBYTES = 128  # a GPU's memory transaction; also keeps 16-byte vector accesses aligned for every slot


@dataclass(frozen=True)
class Rule:
    """What an optimizer's update allows of the layout of its parameters.

    ``whole``: it may read whole parameters, so each has one owner; what its update costs is an entry of
    `zc.planning.ownership.COSTS`. Else a cut may stand at any multiple of ``block`` elements: those of a block share
    something, as the scale of 8-bit state does.
    """

    whole: bool = False
    block: int = 1
    cost: str = "elements"


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: elements [offset, offset + numel) of the flat buffer.

    ``strides``: the parameter's, where they are not those of a row-major one (`own_strides`): its elements then lie in
    the slot in the order of its own memory, as channels_last has it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.shape} at {self.offset}{'' if self.strides is None else f', strides {self.strides}'}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions from the outermost to the innermost in the slot; None: as they are numbered."""
        if self.strides is None:
            return None
        strides = self.strides
        order = sorted(range(len(strides)), key=lambda d: (self.shape[d] > 1, -strides[d]))
        return tuple(order) if [d for d in order if self.shape[d] > 1] != _long(self.shape) else None


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one bucket, ascending in offset, and the padded size P = ``numel_padded``, a multiple of W slots.
    ``owners``: where each rank updates whole parameters, which rank each slot's is, ascending; None: each rank updates
    its shard."""

    slots: tuple[Slot, ...]
    numel_padded: int
    world_size: int
    owners: tuple[int, ...] | None = None
    num_hosts: int = 1  # more than one: shards of the ranks that have one number on their hosts follow each other

    @property
    def numel_shard(self) -> int:
        """S, the elements that each rank reduces."""
        return self.numel_padded // self.world_size

    @property
    def numel_padding(self) -> int:
        return self.numel_padded - sum(slot.numel for slot in self.slots)

    def shard_of(self, rank: int) -> int:
        """Which shard is the rank's. Of H hosts of L ranks, rank h L + l has shard l H + h: what the hosts' l-th ranks
        reduce between them is one piece, the l-th of L."""
        per_host = self.world_size // self.num_hosts
        return rank % per_host * self.num_hosts + rank // per_host

    def rank_of(self, shard: int) -> int:
        """Whose shard it is."""
        return shard % self.num_hosts * (self.world_size // self.num_hosts) + shard // self.num_hosts

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat buffer whose gradients ``rank`` reduces."""
        start = self.shard_of(rank) * self.numel_shard
        return start, start + self.numel_shard

    @property
    def order(self) -> list[int] | None:
        """Of each rank, which shard is its; None: that of its own number."""
        return None if self.num_hosts == 1 else [self.shard_of(rank) for rank in range(self.world_size)]

    def host_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) that the ranks of one number reduce between hosts: H shards."""
        start = self.shard_of(rank) // self.num_hosts * self.num_hosts * self.numel_shard
        return start, start + self.num_hosts * self.numel_shard

    @cached_property
    def runs(self) -> dict[int, tuple[int, int]]:
        """By rank that owns something, ascending: elements [start, stop) of its parameters, alignment counted. They
        follow each other from element 0 on."""
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
        """The part of ``slot`` that ``rank`` updates, as [start, stop) inside the flat buffer; empty where start ==
        stop."""
        return _within(slot, *self.owned_range(rank))

    def in_shard(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of ``slot`` in the shard of ``rank``, in the same way."""
        return _within(slot, *self.shard_range(rank))

    def of_shard(self, rank: int) -> list[tuple[int, int, int]]:
        """(owner, start, stop): whose the elements of ``rank``'s shard are, ascending; padding at the end has none."""
        start, stop = self.shard_range(rank)
        return [(owner, *common) for owner, run in self.runs.items() if (common := _overlap(run, (start, stop)))]

    def of_run(self, rank: int) -> list[tuple[int, int, int]]:
        """(rank of the shard, start, stop): where the gradients of what ``rank`` updates are reduced, ascending."""
        start, stop = self.runs.get(rank, (0, 0))
        size, shards = self.numel_shard, range(start // self.numel_shard, -(-stop // self.numel_shard))
        return [(self.rank_of(k), max(start, k * size), min(stop, (k + 1) * size)) for k in shards]


def own_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """``strides`` in elements, where such a tensor fills its memory without a hole or an overlap and is not row-major;
    None for all others."""
    dims = sorted(_long(shape), key=lambda d: strides[d])
    expected = [math.prod(shape[d] for d in dims[:k]) for k in range(len(dims))]
    is_dense = math.prod(shape) > 0 and [strides[d] for d in dims] == expected
    row_major = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return tuple(strides) if is_dense and list(strides) != row_major else None


def _long(shape: Sequence[int]) -> list[int]:
    """The dimensions of more than one element: the stride of another one means nothing."""
    return [d for d, size in enumerate(shape) if size > 1]


def _within(slot: Slot, start: int, stop: int) -> tuple[int, int]:
    first = min(max(slot.offset, start), stop)
    return first, max(first, min(slot.stop, stop))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | tuple[()]:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else ()


def align_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def flat_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    align: int,
    num_hosts: int = 1,
    num_replicas: int = 1,
) -> FlatLayout:
    """Packs parameters one after another, each slot at a multiple of ``align`` elements, P a multiple of W * align, and
    each shard of as many pieces of ``align`` as it has replicas."""
    slots, offset = [], 0
    for name, shape in shapes:
        slot = Slot(name, tuple(shape), offset)
        slots.append(slot)
        offset = align_up(slot.stop, align)
    numel = align_up(max(offset, 1), world_size * num_replicas * align)
    return FlatLayout(tuple(slots), numel, world_size, num_hosts=num_hosts)


def layout_of(
    rule: Rule,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    align: int,
    owners: Mapping[str, int],
    num_hosts: int = 1,
    num_replicas: int = 1,
) -> FlatLayout:
    """The layout of one bucket under ``rule``. ``align``: elements; ``owners``: of parameters that stay whole."""
    if rule.whole:
        return whole_layout(shapes, world_size, align, owners, num_hosts, num_replicas)
    return flat_layout(shapes, world_size, math.lcm(align, rule.block), num_hosts, num_replicas)


def whole_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    align: int,
    owners: Mapping[str, int],
    num_hosts: int = 1,
    num_replicas: int = 1,
) -> FlatLayout:
    """The same, one rank's parameters after another's, in the order of the ranks; ``owners`` says whose each is."""
    ordered = sorted(shapes, key=lambda item: owners[item[0]])
    packed = flat_layout(ordered, world_size, align, num_hosts, num_replicas)
    return replace(packed, owners=tuple(owners[slot.name] for slot in packed.slots))
