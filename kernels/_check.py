"""Checks of arguments, made before any element is written: each raises ``ValueError`` that names both values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: dtype is {tensor.dtype}, expected one of {', '.join(map(str, allowed))}")


def check_flat(name: str, tensor: Tensor) -> None:
    """``tensor`` is 1-D and contiguous, so that an offset in elements says where an element lies."""
    if tensor.dim() != 1:
        raise ValueError(f"{name}: shape is {tuple(tensor.shape)}, expected 1 dimension")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: stride is {tensor.stride(0)}, expected 1 (contiguous)")


def check_flats(name: str, tensors: Sequence[Tensor]) -> None:
    """Each is 1-D, contiguous, of a float dtype and on the device of the first.

    Runs for every parameter of every step: each test is one attribute and one comparison (0.3 us per tensor).
    """
    device = tensors[0].device if tensors else None
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in FLOATS:
            check_dtype(f"{name}[{i}]", tensor, FLOATS)
        if tensor.dim() != 1 or not tensor.is_contiguous():
            check_flat(f"{name}[{i}]", tensor)
        if tensor.device != device:
            check_device(f"{name}[{i}]", tensor, f"{name}[0]", tensors[0])


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, {other_name} on {other.device}; expected one device")


def check_numel(name: str, tensor: Tensor, other_name: str, numel: int) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, {other_name} {numel}; expected the same number")


def check_alike(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], other_name: str, other: Tensor) -> None:
    """``tensor`` is flat, of an allowed dtype, and has the elements and the device of ``other``."""
    check_dtype(name, tensor, allowed)
    check_flat(name, tensor)
    check_numel(name, tensor, other_name, other.numel())
    check_device(name, tensor, other_name, other)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Addresses [start, stop) between the first and the last element; empty for an empty tensor. Strides are >= 0."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_disjoint(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """No element of ``tensor`` lies inside the address range of ``other``."""
    (start, stop), (other_start, other_stop) = byte_range(tensor), byte_range(other)
    if start < other_stop and other_start < stop:
        raise ValueError(
            f"{name} overlaps {other_name}: bytes [{start:#x}, {stop:#x}) and [{other_start:#x}, {other_stop:#x})"
        )


def check_slots(name: str, flat: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """``grads[i]`` fits ``flat[offsets[i] : offsets[i] + numel]``; slots ascend, are disjoint and none overlaps a grad.

    Runs for every bucket of every backward: each test is one attribute and one comparison (0.4 us per gradient).
    """
    check_flat(name, flat)
    if len(grads) != len(offsets):
        raise ValueError(f"{len(grads)} grads, {len(offsets)} offsets; expected the same number")
    stop, device = 0, flat.device
    flat_start, flat_stop = byte_range(flat)
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        if grad.device != device:
            check_device(f"grads[{i}]", grad, name, flat)
        if grad.dtype not in FLOATS:
            check_dtype(f"grads[{i}]", grad, FLOATS)
        if offset < stop:
            raise ValueError(f"offsets[{i}] is {offset}, expected {stop} or more (slots ascend and are disjoint)")
        stop = offset + grad.numel()
        start = grad.data_ptr()
        if start < flat_stop and (start >= flat_start or byte_range(grad)[1] > flat_start):
            check_disjoint(f"grads[{i}]", grad, name, flat)
    if stop > flat.numel():
        raise ValueError(f"the last slot ends at element {stop}, {name} has {flat.numel()}")
