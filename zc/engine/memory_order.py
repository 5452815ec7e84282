"""Between a parameter, or what has its shape, and its slot, where the elements lie in the order of the parameter's own
memory: row-major as a rule, the channels last where the caller has laid them so (`zc.planning.layout.Slot`)."""

from __future__ import annotations

from torch import Tensor

from zc.planning.layout import Slot


def in_order(whole: Tensor, slot: Slot) -> Tensor:
    """A view of ``whole``, of the slot's shape, whose elements come row by row as they lie in the slot."""
    return whole if slot.order is None else whole.permute(slot.order)


def flattened(tensor: Tensor, slot: Slot) -> Tensor:
    """[n]: what has the slot's shape, in the slot's order; a view where it lies so already. What is 1-D is a part of
    the slot, or all of it, and stays as it is."""
    return tensor if tensor.dim() == 1 else in_order(tensor, slot).reshape(-1)


def in_shape(flat: Tensor, slot: Slot) -> Tensor:
    """A view of ``flat`` [n], with the slot's shape where it has all of its elements. (A whole parameter keeps its
    shape: optimizers and their options may look at it.)"""
    if flat.numel() != slot.numel or len(slot.shape) == 1:
        return flat
    return flat.view(slot.shape) if slot.strides is None else flat.as_strided(slot.shape, slot.strides)
