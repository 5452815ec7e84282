"""``flatten_cast``: the gradients of a bucket into its flat buffer, cast and scaled, in one launch.

Bytes moved: each gradient read once, [P] written once. 128-bit accesses where a gradient starts at 16 bytes and its
slot at 16 elements (zc.planning.layout packs slots so); elsewhere the same numbers, slower. The kernel is
``_slots.fill_slots``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels import _slots
from zc.kernels._check import FLOATS, check_dtype, check_slots
from zc.kernels._chunks import CHUNK, compute_dtype, fitting, pieces
from zc.kernels._private import copy_all_, views_of
from zc.kernels._triton import use_triton

__all__ = ["flatten_cast", "flatten_cast_reference", "flatten_cast_triton"]


@torch.no_grad()
def flatten_cast(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], *, scale: float = 1.0) -> None:
    """``out[offsets[i] : offsets[i] + grads[i].numel()] = grads[i].flatten() * scale``; every other element is 0.

    Args:
        out: [P] bf16, fp16, fp32 or fp64, contiguous; overwritten whole (what it held, NaN included, is not read).
        grads: any shapes, strides and mix of the same four dtypes, on the device of ``out``, none overlapping it.
        offsets: elements into ``out``, ascending, slots disjoint.
        scale: multiplied in fp32 (fp64 where grad or ``out`` is fp64), then rounded once to ``out.dtype``.

    Raises:
        ValueError: a dtype, device, layout, offset or overlap that breaks the above; nothing has been written.
    """
    check_dtype("out", out, FLOATS)
    check_slots("out", out, grads, offsets)
    if use_triton(out) and _slots.handles(out, grads):
        flatten_cast_triton(out, grads, offsets, scale)
    else:
        flatten_cast_reference(out, grads, offsets, scale)


def flatten_cast_triton(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], scale: float) -> None:
    """One launch; a padding gap has a row like any slot."""
    _slots.launch(out, grads, offsets, scale, add=False)


def flatten_cast_reference(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], scale: float) -> None:
    """The same in torch: one pass over the gradients, and zeros only into the gaps (no memset of the whole)."""
    sources: list[Tensor] = []
    stop = 0
    zero: Tensor | None = None
    for grad, offset in zip(grads, offsets, strict=True):
        if offset > stop:
            zero = out.new_zeros(()) if zero is None else zero
            sources.append(zero.expand(offset - stop))
        if grad.numel() > 0:
            sources.append(grad)
        stop = offset + grad.numel()
    if stop < out.numel():
        sources.append(out.new_zeros(()).expand(out.numel() - stop))
    if not sources:
        return
    slots = views_of(out, sources)
    if scale == 1.0:
        copy_all_(slots, sources)
        return
    scratch = torch.empty(CHUNK, dtype=compute_dtype(out.dtype), device=out.device)
    for slot, source in zip(slots, sources, strict=True):
        scratch = scaled_copy(slot, source, scale, scratch)


def scaled_copy(dst: Tensor, grad: Tensor, scale: float, scratch: Tensor) -> Tensor:
    """``dst = grad * scale``, rounded once. Returns the scratch, replaced where it did not fit."""
    if dst.dtype == grad.dtype:  # torch multiplies half types in fp32 and rounds once
        torch.mul(grad, scale, out=dst)
        return scratch
    # mul(out=) of another dtype would allocate two temporaries of the whole gradient: 8 times slower at 64 MB
    for dst_piece, grad_piece in pieces(dst, grad):
        scratch = fitting(scratch, grad_piece, compute_dtype(dst.dtype, grad.dtype))
        piece = scratch[: grad_piece.numel()].view(grad_piece.shape)
        dst_piece.copy_(piece.copy_(grad_piece).mul_(scale))
    return scratch
