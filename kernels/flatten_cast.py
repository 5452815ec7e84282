"""``flatten_cast``: the gradients of a bucket into its flat buffer, cast, by torch's own multi-tensor copy.

Bytes moved: each gradient read once, [P] written once. On an H200 a Triton kernel that filled all slots in one launch
took 12 to 27 % less of the device's time (5 us of a bucket of 25 MiB), but the host 170 us in place of 19, since the
table of its slots has to get there: docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_dtype, check_slots
from zc.kernels._private import copy_all_, views_of

__all__ = ["flatten_cast"]


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
    # gaps are sources, too, so that one call cuts ``out``; zeros go only there (no memset of the whole)
    sources: list[Tensor] = []
    stop, zero = 0, None
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
    # a device copies tensors of one dtype that lie alike in one launch, and all others one by one
    alike: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in zip(views_of(out, sources), sources, strict=True):
        views, tensors = alike.setdefault((source.dtype, source.is_contiguous()), ([], []))
        views.append(to)
        tensors.append(source)
    for views, tensors in alike.values():
        copy_all_(views, tensors)
