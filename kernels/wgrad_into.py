"""``wgrad_into``: a weight's gradient made where it belongs, by torch's own matmul and scatter.

Bytes moved: the inputs once, the slot once (twice where it is added to); a gradient of its own would cost two bytes
more for each of them, to be copied. No kernel of ours: cuBLAS and the CPU's BLAS write and add in place, with fp32
output for half-precision inputs where the device has it. In fp32 and with ``add`` False the result is bitwise that of
``torch.mm(a, b)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["matmul_into", "scatter_into"]


@torch.no_grad()
def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """``out (+)= a @ b``.

    Args:
        out: [M * N] (or [B * M * N]), contiguous, in the dtype of ``a``, or fp32 on a GPU for bf16 and fp16.
        a, b: [M, K] and [K, N], or [B, M, K] and [B, K, N], any strides, one dtype, not overlapping ``out``.
        add: whether ``out`` holds something; else what it held, NaN included, is not read.

    Raises:
        ValueError: another number of elements, dtype or device than that; nothing has been written.
    """
    shape = torch.Size((*a.shape[:-1], b.shape[-1]))
    if a.dim() not in (2, 3) or b.dim() != a.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a has shape {tuple(a.shape)}, which can't be multiplied with b of shape {tuple(b.shape)}")
    if out.numel() != shape.numel() or not out.is_contiguous():
        raise ValueError(f"out has {out.numel()} elements, contiguous {out.is_contiguous()}; a @ b is {tuple(shape)}")
    if not out.device == a.device == b.device or a.dtype != b.dtype:
        given = ", ".join(f"{t.dtype} on {t.device}" for t in (out, a, b))
        raise ValueError(f"out, a and b must be on one device, a and b of one dtype; got {given}")
    slot = out.view(shape)
    more = {}
    if a.dtype != out.dtype:
        if not a.is_cuda or out.dtype != torch.float32 or a.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"a @ b is {a.dtype}, out is {out.dtype}: only a GPU adds halves into fp32")
        more["out_dtype"] = out.dtype
    if add and a.dim() == 2:
        torch.addmm(slot, a, b, out=slot, **more)  # type: ignore[call-overload]
    elif add:
        torch.baddbmm(slot, a, b, out=slot, **more)  # type: ignore[call-overload]
    elif a.dim() == 2:
        torch.mm(a, b, out=slot, **more)  # type: ignore[call-overload]
    else:
        torch.bmm(a, b, out=slot, **more)  # type: ignore[call-overload]


@torch.no_grad()
def scatter_into(out: Tensor, index: Tensor, mask: Tensor, values: Tensor, *, add: bool) -> None:
    """``out[index[i]] += values[i]`` for each i where ``mask``, in the order of i on a CPU; without ``add`` from zeros.

    Args:
        out: [V * D], contiguous.
        index: any shape, int64 or int32; where ``mask`` is False it may be out of range.
        mask: bool, the shape of ``index`` and a last dimension of 1.
        values: the shape of ``index`` and a last dimension of D, in the dtype of ``out``.

    Raises:
        ValueError: shapes or dtypes that break the above; nothing has been written.
    """
    dim = values.shape[-1] if values.dim() else 0
    if values.shape != (*index.shape, dim) or mask.shape != (*index.shape, 1) or dim < 1 or out.numel() % dim:
        shapes = ", ".join(str(tuple(t.shape)) for t in (out, index, mask, values))
        raise ValueError(f"out, index, mask and values do not fit: {shapes}")
    if values.dtype != out.dtype or not out.is_contiguous():
        raise ValueError(f"values are {values.dtype}, out is {out.dtype}, contiguous {out.is_contiguous()}")
    rows = out.view(-1, dim)
    if not add:
        rows.zero_()
    kept = values.masked_fill(~mask, 0.0).view(-1, dim) if values.numel() else values.reshape(-1, dim)
    rows.index_add_(0, index.clamp(0, rows.shape[0] - 1).reshape(-1), kept)
