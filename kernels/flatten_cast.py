"""``flatten_cast``: the gradients of a bucket into its flat buffer, cast and scaled, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_dtype, check_slots
from zc.kernels._chunks import compute_dtype, pieces

__all__ = ["flatten_cast", "flatten_cast_twin"]


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
    flatten_cast_twin(out, grads, offsets, scale)


def flatten_cast_twin(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], scale: float) -> None:
    """The same in torch: one pass over the gradients, and zeros only into the gaps (no memset of the whole)."""
    stop = 0
    for grad, offset in zip(grads, offsets, strict=True):
        if offset > stop:
            out[stop:offset].zero_()
        stop = offset + grad.numel()
        if stop > offset:
            scaled_copy(out[offset:stop], grad, scale)
    if stop < out.numel():
        out[stop:].zero_()


def scaled_copy(dst: Tensor, grad: Tensor, scale: float) -> None:
    """``dst = grad.flatten() * scale``, rounded once; ``dst`` is contiguous [numel], ``grad`` any layout."""
    if scale == 1.0:
        dst.view(grad.shape).copy_(grad)
    elif dst.dtype == grad.dtype:  # torch multiplies half types in fp32 and rounds once
        torch.mul(grad, scale, out=dst.view(grad.shape))
    else:
        # mul(out=) of another dtype would allocate two temporaries of the whole gradient: 8 times slower at 64 MB
        wide = compute_dtype(dst.dtype, grad.dtype)
        scratch: Tensor | None = None
        for dst_piece, grad_piece in pieces(dst, grad):
            if scratch is None or scratch.numel() < grad_piece.numel():
                scratch = torch.empty(grad_piece.numel(), dtype=wide, device=dst.device)
            piece = scratch[: grad_piece.numel()].view(grad_piece.shape)
            dst_piece.copy_(piece.copy_(grad_piece).mul_(scale))
