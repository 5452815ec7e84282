"""Where each parameter lies in a flat buffer: offsets and padding in elements, decided once, no tensors.

A layout of W = 2 ranks (S = P / W), ``a`` and ``b`` parameters, ``.`` padding::

    |<---------------- P = numel_padded ---------------->|
    |aaaaaaaaaaaa..|bbbbbbbbbbbbbbbbbbbbbbbbbbb..........|
    |<----- rank 0 owns S ----->|<---- rank 1 owns S --->|

`flat_layout` packs tightly: a shard's edge may cut a parameter, which elementwise optimizers never notice.
`whole_layout` keeps every parameter on one rank, for optimizers that read a whole matrix (Muon).
The idea of one noun for the layout: Megatron-LM's megatron_fsdp; the flat shard: ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_NBYTES = 128  # a GPU's memory transaction; also keeps 16-byte vector accesses aligned for every slot


@dataclass(frozen=True)
class Rule:
    """What an optimizer's update allows of the layout of its parameters.

    ``whole``: it may read whole parameters, so each has one owner. Else a cut may stand at any multiple of ``block``
    elements: those of a block share something, as the scale of 8-bit state does.
    """

    whole: bool = False
    block: int = 1


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: elements [offset, offset + numel) of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one bucket, ascending in offset, and the padded size P = ``numel_padded``, a multiple of W slots."""

    slots: tuple[Slot, ...]
    numel_padded: int
    world_size: int

    @property
    def numel_shard(self) -> int:
        """S, the elements that each rank owns."""
        return self.numel_padded // self.world_size

    @property
    def numel_padding(self) -> int:
        return self.numel_padded - sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat buffer that ``rank`` owns."""
        return rank * self.numel_shard, (rank + 1) * self.numel_shard

    def owned(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of ``slot`` that ``rank`` updates."""
        return self.in_shard(slot, rank)

    def in_shard(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The part of ``slot`` that ``rank`` owns, as [start, stop) inside the flat buffer; empty where start ==
        stop."""
        start, stop = self.shard_range(rank)
        first = min(max(slot.offset, start), stop)
        return first, max(first, min(slot.stop, stop))


def align_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def flat_layout(shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int, align: int) -> FlatLayout:
    """Packs parameters one after another, each slot at a multiple of ``align`` elements, P a multiple of W * align."""
    slots, offset = [], 0
    for name, shape in shapes:
        slot = Slot(name, tuple(shape), offset)
        slots.append(slot)
        offset = align_up(slot.stop, align)
    return FlatLayout(tuple(slots), align_up(max(offset, 1), world_size * align), world_size)


def layout_of(rule: Rule, shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int, align: int) -> FlatLayout:
    """The layout of one bucket under ``rule``. ``align``: elements."""
    if rule.whole:
        return whole_layout(shapes, world_size, align)
    return flat_layout(shapes, world_size, math.lcm(align, rule.block))


def whole_layout(shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int, align: int) -> FlatLayout:
    """Keeps each parameter inside one rank's shard: largest first onto the least loaded rank (LPT, Graham 1969).

    S is the heaviest rank's load, so P grows past the sum of the parameters where they don't divide evenly; the plan
    says by how much.
    """
    loads = [0] * world_size
    where: dict[str, tuple[int, int]] = {}
    for name, shape in sorted(shapes, key=lambda item: (-math.prod(item[1]), item[0])):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        where[name] = (rank, loads[rank])
        loads[rank] += align_up(math.prod(shape), align)
    numel_shard = align_up(max(1, *loads), align)
    slots = [Slot(name, tuple(shape), where[name][0] * numel_shard + where[name][1]) for name, shape in shapes]
    # zero-element parameters share an offset with their neighbour: the name keeps the order the same on every rank
    slots.sort(key=lambda slot: (slot.offset, slot.numel, slot.name))
    return FlatLayout(tuple(slots), numel_shard * world_size, world_size)
