"""A state as torch.distributed.checkpoint can write and read it: a flat shard as part of a tensor with a shape, and
text for the keys of dicts.

A shard's edge may cut a parameter in the middle of a row, but DCP knows only boxes. Any range of elements, in row-major
or another memory order, consists of a few boxes: the aligned middle, and at each end the rest of a row, of a plane, and
so on (at most 2 n - 1 boxes for n dimensions). Each box is contiguous in the shard, so no box needs a copy::

    shape (4, 5), elements [3, 17)      . . . a a        a: (0, 3) of size (1, 2)
                                        b b b b b        b: (1, 0) of size (2, 5)
                                        b b b b b
                                        c c . . .        c: (3, 0) of size (1, 2)

In the checkpoint, each tensor then has its own name and shape. Any DCP program can read it, on any number of ranks.

DCP flattens dicts: all of their keys become text, so 0 could not be told from "0", and of an empty dict nothing is
left. Here other keys become text that says what they were::

    {0: a, (1, "x"): b, "c": {}}
    {"zc key: 0": a, "zc key: (1, 'x')": b, "c": {"zc key: {}": None}}        as DCP gets it
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
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
from zc.errors import CheckpointError

_MARK = "zc key: "
_EMPTY = "zc key: {}"


@dataclass(frozen=True)
class Box:
    """A box of ``sizes`` at ``offsets``. Its elements are [start, start + numel) in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int, order: Sequence[int] | None = None) -> list[Box]:
    """Splits elements [start, stop) of a tensor into disjoint boxes, in order. The tensor is row-major, or its
    dimensions lie in memory in ``order``, from the outermost to the innermost."""
    if order is not None:
        back = _inverse(order)
        return [
            Box(tuple(box.offsets[d] for d in back), tuple(box.sizes[d] for d in back), box.start)
            for box in boxes([shape[d] for d in order], start, stop)
        ]
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    result: list[Box] = []
    at = start
    while at < stop:
        offsets = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        # the outermost dimension in which at least one whole index fits from here on
        for dim, stride in enumerate(strides):
            if at % stride == 0 and at + stride <= stop:
                count = min((stop - at) // stride, shape[dim] - offsets[dim])
                sizes = (*([1] * dim), count, *shape[dim + 1 :])
                break
        else:
            sizes = ()  # a tensor without dimensions
        result.append(Box(offsets, sizes, at))
        at += result[-1].numel
    return result


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda d: order[d])


class ShardOf(Tensor):
    """This rank's elements [start, start + local.numel()) of a tensor of ``shape``, in memory order ``order`` (None:
    row-major). DCP's planners treat it as a sharded tensor, through the methods with two underscores. It supports no
    arithmetic: it only describes ``local``, which is 1-D.
    """

    local: Tensor
    start: int
    order: tuple[int, ...] | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], local: Tensor, start: int, order: tuple[int, ...] | None = None
    ) -> ShardOf:
        shard = torch_private.make_wrapper(cls, local.new_empty(()).expand(tuple(shape)))
        assert local.dim() == 1 and start + local.numel() <= math.prod(shape), (shape, local.shape, start)
        shard.local, shard.start, shard.order = local, start, order
        return shard

    def with_local(self, local: Tensor) -> ShardOf:
        """The same part, in other memory."""
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
        raise TypeError(
            f"{func} on {args[0]!r}: it only names a rank's part for a checkpoint, whose elements are in .local. In "
            "place of dcp.async_save use zc.save(..., asynchronous=True)"
        )

    @property
    def boxes(self) -> list[Box]:
        return boxes(tuple(self.shape), self.start, self.start + self.local.numel(), self.order)

    def view_of(self, box: Box) -> Tensor:
        """The box's elements, with their own storage. DCP's writer would clone a part of a larger storage and keep all
        clones until the file is written, which is a second copy of the masters."""
        first = box.start - self.start
        flat = torch_private.own_storage(self.local.detach()[first : first + box.numel])
        if self.order is None:
            return flat.view(box.sizes)
        return flat.view([box.sizes[d] for d in self.order]).permute(_inverse(self.order))

    def host_copy(self) -> ShardOf:
        """The same part, copied to host memory."""
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

    def host_copy(self) -> ReadOnly:
        """Returns itself, because this rank never writes it."""
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return []


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


# --- keys ---


def with_text_keys(what: str, value: Any) -> Any:
    """A nested value as DCP keeps it. Raises CheckpointError, with ``what``, where a key can't be told from its text;
    lists and dicts are looked into, as DCP does."""
    if isinstance(value, Mapping):
        return {_text_of(what, key): with_text_keys(what, item) for key, item in value.items()} or {_EMPTY: None}
    return [with_text_keys(what, item) for item in value] if isinstance(value, list) else value


def with_own_keys(value: Any) -> Any:
    """What `with_text_keys` was given, or an equal copy of what another program has written."""
    if isinstance(value, Mapping):
        return {} if set(value) == {_EMPTY} else {own_key(key): with_own_keys(item) for key, item in value.items()}
    return [with_own_keys(item) for item in value] if isinstance(value, list) else value


def own_key(text: Any) -> Any:
    """The key that became this text."""
    if isinstance(text, str) and text.startswith(_MARK):
        try:
            key = ast.literal_eval(text.removeprefix(_MARK))
            hash(key)
        except (ValueError, SyntaxError, TypeError):  # another program's own
            return text
        return key
    return text


def _text_of(what: str, key: Any) -> str:
    if type(key) is str and not key.startswith(_MARK):
        return key
    text = f"{_MARK}{key!r}"
    if not _is_same(own_key(text), key):
        raise CheckpointError(
            f"{what} has the key {key!r}, a {type(key).__name__}: zc saves keys that are text, numbers, or tuples of "
            "these"
        )
    return text


def _is_same(one: Any, other: Any) -> bool:
    """Also in type: True is no 1."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
