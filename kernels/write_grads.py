"""How gradients get into the flat buffer of their bucket: written, added, or computed where they belong.

``flatten_cast``: the gradients of a bucket into its flat buffer, cast, by torch's own multi-tensor copy. On a CPU that
makes a view and a copy of each, so there one torch.cat takes those of the buffer's dtype: 0.03 ms, not 0.3, for 147.

Bytes moved: each gradient read once, [P] written once. On an H200 a Triton kernel that filled all slots in one launch
took 12 to 27 % less of the device's time (5 us of a bucket of 25 MiB), but the host 170 us in place of 19, since the
table of its slots has to get there: docs/decisions.md.

``accumulate_cast``: the gradients of a bucket added into stage 1's fp32 accumulator.

Bytes moved: each gradient read once, its slot read and written once (bf16 into fp32: 10 bytes per element). Gradients
of the accumulator's own dtype are added by torch's multi-tensor sum. It has none that casts, so others are one launch
of ``_slots.add_slots``, with 128-bit accesses where a gradient starts at 16 bytes and its slot at 16 elements
(zc.planning.layout packs slots so); elsewhere the same numbers, slower.

``wgrad_into``: a weight's gradient made where it belongs, by torch's own matmul and scatter.

Bytes moved: the inputs once, the slot written once (and read once where it is added to). A gradient of its own would be
written, read and written again: two bytes more for each of it. No kernel of ours: cuBLAS and the CPU's BLAS write and
add in place. With ``add`` False and one dtype the result is bitwise that of ``torch.mm(a, b)``. Slots are aligned to
128 bytes (zc.planning.layout), as BLAS likes its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from zc.kernels import _slots
from zc.kernels._common import (
    CHUNK,
    FLOATS,
    check_device,
    check_disjoint,
    check_dtype,
    check_flat,
    check_numel,
    check_slots,
    pieces,
    use_triton,
    without_grad,
)
from zc.kernels._private import add_all_, copy_all_, views_of


@without_grad
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
    # gaps are sources, too, so that one call fills or cuts ``out``; zeros go only there (no memset of the whole)
    sources: list[Tensor] = []
    gaps: dict[int, Tensor] = {}  # by length: most are those of an alignment, and alike
    stop, is_one_copy = 0, out.device.type == "cpu"
    for grad, offset in zip(grads, offsets, strict=True):
        if offset > stop:
            gap = offset - stop
            if gap not in gaps:
                gaps[gap] = _zeros(out, gap)
            sources.append(gaps[gap])
        stop, numel = offset, grad.numel()
        if numel > 0:
            sources.append(grad)
            stop += numel
            is_one_copy = is_one_copy and grad.dtype == out.dtype and grad.is_contiguous()
    if stop < out.numel():
        sources.append(_zeros(out, out.numel() - stop))
    if not sources:
        return
    if is_one_copy:
        torch.cat([source if source.dim() == 1 else source.view(-1) for source in sources], out=out)
        return
    # a device copies tensors of one dtype that lie alike in one launch, and all others one by one
    alike: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in zip(views_of(out, sources), sources, strict=True):
        views, tensors = alike.setdefault((source.dtype, source.is_contiguous()), ([], []))
        views.append(to)
        tensors.append(source)
    for views, tensors in alike.values():
        copy_all_(views, tensors)


def _zeros(out: Tensor, numel: int) -> Tensor:
    """[numel] of what ``out`` gets in a gap: the gap of an alignment is contiguous, a longer one takes no memory."""
    return out.new_zeros(numel) if numel <= CHUNK else out.new_zeros(()).expand(numel)


@without_grad
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


_HALVES = (torch.bfloat16, torch.float16)


@without_grad
def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """``out (+)= a @ b``.

    Args:
        out: [M * N] (or [B * M * N]), contiguous, in the dtype of ``a``; or fp32 for bf16 and fp16, and then no product
            and no sum is rounded to half precision. A GPU's matmul does that itself (``out_dtype``); on a CPU, whose
            has no such output, the inputs are widened first: the reference, exact, and slower than the half-precision
            matmul.
        a, b: [M, K] and [K, N], or [B, M, K] and [B, K, N], any strides, one dtype, not overlapping ``out``.
        add: whether ``out`` holds something; else what it held, NaN included, is not read.

    Raises:
        ValueError: another shape, layout, dtype or device than that, or an overlap; nothing has been written.
    """
    check_flat("out", out)
    if a.dim() not in (2, 3) or b.dim() != a.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a has shape {tuple(a.shape)}, which can't be multiplied with b of shape {tuple(b.shape)}")
    shape = torch.Size((*a.shape[:-1], b.shape[-1]))
    check_numel("out", out, "a @ b", shape.numel())
    check_device("a", a, "out", out)
    check_device("b", b, "out", out)
    check_dtype("a", a, FLOATS)
    check_dtype("b", b, (a.dtype,))
    check_dtype("out", out, (a.dtype, torch.float32) if a.dtype in _HALVES else (a.dtype,))
    check_disjoint("a", a, "out", out)
    check_disjoint("b", b, "out", out)
    slot = out.view(shape)
    more: dict[str, Any] = {}
    if a.dtype != out.dtype and a.is_cuda:
        more["out_dtype"] = out.dtype
    elif a.dtype != out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if add:
        (torch.addmm if a.dim() == 2 else torch.baddbmm)(slot, a, b, out=slot, **more)
    else:
        (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=slot, **more)


@without_grad
def scatter_into(out: Tensor, index: Tensor, mask: Tensor, values: Tensor, *, add: bool) -> None:
    """``out[index[i]] += values[i]`` for each i where ``mask``, in the order of i on a CPU; without ``add`` from zeros.

    Args:
        out: [V * D], contiguous.
        index: any shape, int64 or int32; where ``mask`` is False it may be out of range.
        mask: bool, the shape of ``index`` and a last dimension of 1.
        values: the shape of ``index`` and a last dimension of D, in the dtype of ``out``, not overlapping it.

    Raises:
        ValueError: shapes, dtypes, devices that break the above, or an overlap; nothing has been written.
    """
    rows = _rows_of(out, index, values, mask)
    if not add:
        rows.zero_()
    if values.numel():
        masked = values.masked_fill(~mask, 0.0).view(-1, rows.shape[1])
        rows.index_add_(0, index.clamp(0, rows.shape[0] - 1).reshape(-1), masked)


@without_grad
def rows_into(out: Tensor, index: Tensor, values: Tensor, *, add: bool) -> None:
    """``out[index[i]] += values[i]``, as `scatter_into` without a mask. A negative index counts from the end; torch
    raises for one out of range, as it does for index_put."""
    rows = _rows_of(out, index, values)
    if not add:
        rows.zero_()
    if values.numel():
        at = torch.where(index < 0, index + rows.shape[0], index)
        rows.index_add_(0, at.reshape(-1), rearrange(values, "... dim -> (...) dim"))


def _rows_of(out: Tensor, index: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """``out`` as [V, D], when all fit each other."""
    check_flat("out", out)
    dim = values.shape[-1] if values.dim() else 0
    fits = mask is None or mask.shape == (*index.shape, 1)
    if not fits or values.shape != (*index.shape, dim) or dim < 1 or out.numel() % dim:
        named = {"out": out, "index": index, "mask": mask, "values": values}
        there = {name: tensor for name, tensor in named.items() if tensor is not None}
        names, shapes = ", ".join(there), ", ".join(str(tuple(t.shape)) for t in there.values())
        raise ValueError(f"{names} do not fit each other: {shapes}")
    check_dtype("index", index, (torch.int64, torch.int32))
    check_dtype("values", values, (out.dtype,))
    check_device("index", index, "out", out)
    check_device("values", values, "out", out)
    if mask is not None:
        check_dtype("mask", mask, (torch.bool,))
        check_device("mask", mask, "out", out)
    check_disjoint("values", values, "out", out)
    return rearrange(out, "(row dim) -> row dim", dim=dim)
