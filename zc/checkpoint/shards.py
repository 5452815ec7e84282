"""A flat shard as part of a tensor with a shape: what torch.distributed.checkpoint needs to write and read it.

A shard's edge may cut a parameter in the middle of a row, and DCP knows only boxes. Any range of elements, in row-major
order or in that of another memory format, is a few boxes: the aligned middle, and at each end what is left of a row, of
a plane, ... (2 n - 1 at most for n dimensions). Each box is contiguous in the shard, so nothing is copied or gathered
to cut it out::

    shape (4, 5), elements [3, 17)      . . . a a        a: (0, 3) of size (1, 2)
                                        b b b b b        b: (1, 0) of size (2, 5)
                                        b b b b b
                                        c c . . .        c: (3, 0) of size (1, 2)

Saved so, a tensor has its own name and shape for any reader of DCP, and any number of ranks reads what any other has
written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zc import torch_private


@dataclass(frozen=True)
class Box:
    """``sizes`` elements from ``offsets`` on, in each dimension; elements [start, start + numel) in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int, order: Sequence[int] | None = None) -> list[Box]:
    """Elements [start, stop) of a row-major tensor as disjoint boxes, in order; of one whose dimensions lie in
    ``order``, from the outermost to the innermost, where they lie in another."""
    if order is not None:
        back = _inverse(order)
        return [
            Box(tuple(box.offsets[d] for d in back), tuple(box.sizes[d] for d in back), box.start)
            for box in boxes([shape[d] for d in order], start, stop)
        ]
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    found: list[Box] = []
    at = start
    while at < stop:
        offsets = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        # the outermost dimension of which a whole index fits, from here on
        for dim, stride in enumerate(strides):
            if at % stride == 0 and at + stride <= stop:
                count = min((stop - at) // stride, shape[dim] - offsets[dim])
                sizes = (*([1] * dim), count, *shape[dim + 1 :])
                break
        else:
            sizes = ()  # a tensor without dimensions
        found.append(Box(offsets, sizes, at))
        at += found[-1].numel
    return found


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda d: order[d])


class ShardOf(Tensor):
    """This rank's elements [start, start + local.numel()) of a tensor of ``shape``, counted row by row with the
    dimensions in ``order`` (None: as they are): what DCP's planners take for a sharded tensor (the methods with two
    underscores are its protocol). No arithmetic: it is a name for ``local``, 1-D.
    """

    local: Tensor
    start: int
    order: tuple[int, ...] | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], local: Tensor, start: int, order: tuple[int, ...] | None = None
    ) -> ShardOf:
        made = torch_private.make_wrapper(cls, local.new_empty(()).expand(tuple(shape)))
        assert local.dim() == 1 and start + local.numel() <= math.prod(shape), (shape, local.shape, start)
        made.local, made.start, made.order = local, start, order
        return made

    def with_local(self, local: Tensor) -> ShardOf:
        """The same part, of other memory."""
        return ShardOf(tuple(self.shape), local, self.start, self.order)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        stop = self.start + self.local.numel()
        return f"ShardOf(shape={tuple(self.shape)}, elements=[{self.start}, {stop}), dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the disabled default, a plain function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on {args[0]!r}: it only names a rank's part for a checkpoint; use .local")

    @property
    def boxes(self) -> list[Box]:
        return boxes(tuple(self.shape), self.start, self.start + self.local.numel(), self.order)

    def view_of(self, box: Box) -> Tensor:
        """Under a storage of its own: DCP's writer clones a tensor that is part of a larger one, and keeps all clones
        until its file is written, a second copy of the masters."""
        first = box.start - self.start
        found = torch_private.own_storage(self.local.detach()[first : first + box.numel])
        if self.order is None:
            return found.view(box.sizes)
        return found.view([box.sizes[d] for d in self.order]).permute(_inverse(self.order))

    def copied(self) -> ShardOf:
        """The same part, of a copy in host memory."""
        return self.with_local(self.local.detach().to("cpu", copy=True))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box),
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self.view_of(box)
        raise ValueError(f"{index} is not in {self!r}")


class ReadOnly(ShardOf):
    """A whole tensor that rank 0 writes and every rank reads: a buffer, a frozen parameter."""

    def with_local(self, local: Tensor) -> ReadOnly:
        return ReadOnly(tuple(self.shape), local, self.start, self.order)

    def copied(self) -> ReadOnly:
        """Itself: a copy would never be written."""
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return []


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
