"""Eight bits between hosts: which elements travel encoded, and where each block lies in the bytes. No tensors.

With ``reduce_dtype=torch.int8`` gradients travel as 8-bit integers, with ``gather_dtype`` (torch.int8 or "int4")
weights as differences: the owner of a shard encodes its masters minus the weights that all ranks have, and every rank,
the owner included, adds the decoded difference. The rounding error stays in the master, for the next update. Bytes are
encoded where they leave a host, or a rank whose host is not known. Ranks of one host alone that exchange messages
(GPUs, or ZC_HOST_MEMORY=0) encode among each other, too; inside one of several hosts, by memory, or between replicas
nothing is. Stage 3 keeps no weights
on all ranks, so each gather for a forward or backward encodes the weights themselves.

A block of 256 elements has one scale. Slots begin at multiples of a block, and shards are whole blocks, so a block has
elements of one parameter alone, and its bits do not depend on the bucket's size. Parameters of fewer than two
dimensions, and those below 4 blocks, travel exact, in fp32; of their weights the values travel, in place of
differences, and replace what a rank has. A row has the blocks of one shard, then their scales::

    |a block of 256 bytes|another|an exact one, 1024 bytes|...|scale|scale|...|padding|

(Block-wise 8-bit gradients by all-to-all, with a sum in fp32 at the owner, are ZeRO++'s qgZ, arXiv:2306.10209; 4-bit
differences of weights SDP4Bit's, arXiv:2410.15526.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zc.planning.layout import FlatLayout, Slot
    from zc.planning.plan import Bucket, Plan

BLOCK = 256
SMALL = 4 * BLOCK  # elements below which a parameter travels exact
UNIT = 128  # bytes: blocks and rows begin at multiples of it
EXACT_NBYTES, SCALE_NBYTES = 4 * BLOCK, 4
BITS: dict[object, int] = {torch.int8: 8, "int4": 4}  # of gather_dtype; reduce_dtype takes the first


@dataclass(frozen=True)
class Wire:
    """How elements that leave a host travel: in so many bits, those of small parameters exact."""

    bits: int

    @property
    def block(self) -> int:
        """Slots and shards begin at multiples of so many elements."""
        return BLOCK

    def row_nbytes(self, layout: FlatLayout) -> tuple[int, ...]:
        """Bytes of each shard's row."""
        return row_nbytes(layout, self.bits)

    def exact_numel(self, plan: Plan) -> int:
        """Elements of parameters that travel as they are."""
        return sum(slot.numel for bucket in plan.buckets for slot in bucket.slots if is_exact(slot))

    def rows_between_hosts(self, plan: Plan, bucket: Bucket, rank: int) -> Rows:
        """The rows that a rank encodes in a reduction, and those that it has after a gather: of all shards, or of those
        in its `FlatLayout.net_range`."""
        layout, count = bucket.layout, plan.topology.num_across
        return rows_of(layout, self.bits, layout.shard_of(rank) // count * count, count)

    def own_row(self, bucket: Bucket, rank: int) -> Rows:
        """The row of a rank's own shard: each other rank sends it one in a reduction, and it encodes one for a
        gather."""
        return rows_of(bucket.layout, self.bits, bucket.layout.shard_of(rank), 1)


def wire_of(dtype: object) -> Wire | None:
    """What reduce_dtype or gather_dtype asks for; None: elements travel as they are."""
    bits = BITS.get(dtype)
    return None if bits is None else Wire(bits)


@dataclass(frozen=True)
class Rows:
    """The rows of some shards that follow each other in a bucket. ``offsets``: bytes where each row begins, and where
    the last one ends; ``runs`` cover the blocks of all of them, as `zc.kernels.blocks.Run` describes each."""

    runs: tuple[tuple[int, int, int, int], ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]


def is_exact(slot: Slot) -> bool:
    """Whether a parameter is not encoded."""
    return len(slot.shape) < 2 or slot.numel < SMALL


@functools.lru_cache(maxsize=4096)
def rows_of(layout: FlatLayout, bits: int, first: int, count: int) -> Rows:
    """The rows of ``count`` shards, from shard ``first`` on."""
    per_shard, payload = layout.numel_shard // BLOCK, BLOCK * bits // 8
    runs, offsets = list[tuple[int, int, int, int]](), [0]
    for shard in range(first, first + count):
        spans = list(_spans(layout, shard * per_shard, (shard + 1) * per_shard))
        at, starts = offsets[-1], list[int]()
        for start, stop, exact in spans:
            starts.append(at)
            at += (stop - start) * (EXACT_NBYTES if exact else payload)
        for begin, (start, stop, exact) in zip(starts, spans, strict=True):
            runs.append((start - first * per_shard, stop - start, begin, -1 if exact else at // SCALE_NBYTES))
            at += 0 if exact else (stop - start) * SCALE_NBYTES
        offsets.append(-(-at // UNIT) * UNIT)
    return Rows(tuple(runs), tuple(offsets))


def _spans(layout: FlatLayout, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Blocks [start, stop) as (first, end, exact), neighbours of one kind together. Padding after the last slot is
    encoded: it takes fewer bytes."""
    edges = [*((slot.offset // BLOCK, is_exact(slot)) for slot in layout.slots if slot.numel)]
    edges.append((max((-(-slot.stop // BLOCK) for slot in layout.slots), default=0), False))
    first, exact = start, False
    for edge, kind in edges:
        end = min(max(edge, start), stop)
        if kind != exact and end > first:
            yield first, end, exact
            first = end
        exact = kind
    if stop > first:
        yield first, stop, exact


@functools.lru_cache(maxsize=1024)
def row_nbytes(layout: FlatLayout, bits: int) -> tuple[int, ...]:
    """Bytes of the row of each shard."""
    per_shard, encoded = layout.numel_shard // BLOCK, BLOCK * bits // 8 + SCALE_NBYTES
    num_exact = [0] * layout.world_size
    for start, stop, exact in _spans(layout, 0, layout.numel_padded // BLOCK):
        for shard in range(start // per_shard, -(-stop // per_shard)) if exact else ():
            low, high = max(start, shard * per_shard), min(stop, (shard + 1) * per_shard)
            num_exact[shard] += high - low
    nbytes = (num * EXACT_NBYTES + (per_shard - num) * encoded for num in num_exact)
    return tuple(-(-n // UNIT) * UNIT for n in nbytes)
