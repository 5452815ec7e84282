"""``flatten_cast``: the gradients of a bucket into its flat buffer, cast, in one launch.

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
from zc.kernels._private import copy_all_, views_of
from zc.kernels._triton import use_triton

__all__ = ["flatten_cast", "flatten_cast_reference", "flatten_cast_triton"]


@torch.no_grad()
def flatten_cast(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """``out[offsets[i] : offsets[i] + grads[i].numel()] = grads[i].flatten()``, rounded once; every other element is 0.

    Args:
        out: [P] bf16, fp16, fp32 or fp64, contiguous; overwritten whole (what it held, NaN included, is not read).
        grads: any shapes, strides and mix of the same four dtypes, on the device of ``out``, none overlapping it.
        offsets: elements into ``out``, ascending, slots disjoint.

    Raises:
        ValueError: a dtype, device, layout, offset or overlap that breaks the above; nothing has been written.
    """
    check_dtype("out", out, FLOATS)
    check_slots("out", out, grads, offsets)
    if use_triton(out) and _slots.handles(out, grads):
        flatten_cast_triton(out, grads, offsets)
    else:
        flatten_cast_reference(out, grads, offsets)


def flatten_cast_triton(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """One launch; a padding gap has a row like any slot."""
    _slots.launch(out, grads, offsets, add=False)


def flatten_cast_reference(out: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
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
    copy_all_(views_of(out, sources), sources)
