"""Views between a parameter's shape and its slot, where elements lie in the order of the parameter's own memory:
row-major by default, or channels_last if the caller chose that (`zc.planning.layout.Slot`); and what of an optimizer's
state lies like its parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zc.planning.layout import Slot


def in_order(whole: Tensor, slot: Slot) -> Tensor:
    """A view of ``whole``, which has the slot's shape, with dimensions in the order of the slot."""
    return whole if slot.order is None else whole.permute(slot.order)


def flattened(tensor: Tensor, slot: Slot) -> Tensor:
    """[n]: a tensor of the slot's shape, flattened in the slot's order; a view if it already lies so. A 1-D tensor is a
    part of the slot, or all of it, and is returned unchanged."""
    flat = tensor if tensor.dim() == 1 else in_order(tensor, slot).reshape(-1)
    return flat.contiguous()  # a parameter with holes, as every second column of a matrix


def in_shape(flat: Tensor, slot: Slot) -> Tensor:
    """A view of ``flat`` [n], with the slot's shape if it has all elements of the slot. A whole parameter keeps its
    shape because optimizers and their options may read it."""
    if flat.numel() != slot.numel or len(slot.shape) == 1:
        return flat
    return flat.view(slot.shape) if slot.strides is None else flat.as_strided(slot.shape, slot.strides)


def change_each(change: Callable[[Any, Any], Any], key: Any, item: Any) -> Any:
    """A state with ``change(key, value)`` in place of each value. An optimizer may keep several in a list or a dict,
    into which DCP looks, too; those in a dict have keys of their own."""
    if isinstance(item, Mapping):
        return {inner: change_each(change, inner, value) for inner, value in item.items()}
    if isinstance(item, list):
        return [change_each(change, key, value) for value in item]
    return change(key, item)


def values_in(key: Any, item: Any) -> Iterator[tuple[Any, Any]]:
    """Each value of a state with its key, as `change_each` finds them."""
    if isinstance(item, Mapping):
        for inner, value in item.items():
            yield from values_in(inner, value)
    elif isinstance(item, list):
        for value in item:
            yield from values_in(key, value)
    else:
        yield key, item


def is_cut(key: Any, item: Any, shape: torch.Size) -> bool:
    """Whether a value in the state of a slice of this ``shape`` has the slice's elements. The count of steps is a
    number of its own, also of a parameter with 0 dimensions."""
    return isinstance(item, Tensor) and item.shape == shape and key != "step"


class Sent(NamedTuple):
    """A value of a rank's state as ranks send it: a tensor is in host memory, and a part [n] where ranks divide it."""

    value: Any
    is_part: bool = False
    was_on_host: bool = True

    @staticmethod
    def of(value: Any, part: Tensor | None) -> Sent:
        if not isinstance(value, Tensor):
            return Sent(value)
        own = (value if part is None else part).detach()
        return Sent(own.to("cpu", copy=part is None), part is not None, own.device.type == "cpu")


def joined(parts: Sequence[Any], slot: Slot, device: torch.device) -> Any:
    """The whole of a state of which ranks have `Sent` parts, in the order of their elements. What is not cut is the
    first one's. Tensors that were not in host memory go to ``device``."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts], slot, device) for key in first}
    if isinstance(first, list):
        return [joined(items, slot, device) for items in zip(*parts, strict=True)]
    value = in_shape(torch.cat([part.value for part in parts]), slot) if first.is_part else first.value
    return value if first.was_on_host else value.to(device)
