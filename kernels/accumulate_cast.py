"""``accumulate_cast``: the gradients of a bucket added into stage 1's fp32 accumulator.

Bytes moved: each gradient read once, its slot read and written once (bf16 into fp32: 10 bytes per element). Gradients
of the accumulator's own dtype are added by torch's multi-tensor sum. It has none that casts, so others are one launch
of ``_slots.add_slots``, with 128-bit accesses where a gradient starts at 16 bytes and its slot at 16 elements
(zc.planning.layout packs slots so); elsewhere the same numbers, slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels import _slots
from zc.kernels._check import check_dtype, check_slots
from zc.kernels._chunks import CHUNK, pieces
from zc.kernels._private import add_all_
from zc.kernels._triton import use_triton

__all__ = ["accumulate_cast", "accumulate_cast_reference", "accumulate_cast_triton"]


@torch.no_grad()
def accumulate_cast(acc: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """``acc[offsets[i] : offsets[i] + grads[i].numel()] += grads[i].flatten()``; the rest stays as it is.

    Args:
        acc: [P] fp32 or fp64, contiguous.
        grads: any shapes, strides and mix of bf16, fp16, fp32, fp64, on the device of ``acc``, none overlapping it.
        offsets: elements into ``acc``, ascending, slots disjoint.

    Raises:
        ValueError: a dtype, device, layout, offset or overlap that breaks the above; nothing has been written.
    """
    check_dtype("acc", acc, (torch.float32, torch.float64))
    check_slots("acc", acc, grads, offsets)
    if use_triton(acc) and _slots.handles(acc, grads):
        accumulate_cast_triton(acc, grads, offsets)
    else:
        accumulate_cast_reference(acc, grads, offsets)


def accumulate_cast_triton(acc: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """One launch; padding has no row."""
    _slots.launch(acc, grads, offsets)


def accumulate_cast_reference(acc: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """The same in torch; another dtype goes through a scratch that stays in cache."""
    scratch = torch.empty(CHUNK, dtype=acc.dtype, device=acc.device)
    alike: tuple[list[Tensor], list[Tensor]] = ([], [])
    for grad, offset in zip(grads, offsets, strict=True):
        if grad.numel() == 0:
            continue
        slot = acc[offset : offset + grad.numel()].view(grad.shape)
        if grad.dtype == acc.dtype:
            for side, tensor in zip(alike, (slot, grad), strict=True):
                side.append(tensor)
            continue
        for slot_piece, grad_piece in pieces(slot, grad):
            if scratch.numel() < grad_piece.numel():
                scratch = torch.empty(grad_piece.numel(), dtype=acc.dtype, device=acc.device)
            slot_piece.add_(scratch[: grad_piece.numel()].view(grad_piece.shape).copy_(grad_piece))
    if alike[0]:
        add_all_(*alike)
