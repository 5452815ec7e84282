"""``reduce_rows``: the W rows that an all-to-all delivered, summed in rank order into this rank's shard."""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import compute_dtype, ranges, scratch_like

__all__ = ["reduce_rows", "reduce_rows_twin"]


@torch.no_grad()
def reduce_rows(rows: Tensor, out: Tensor, *, scale: float, add: bool) -> None:
    """``s = ((rows[0] + rows[1]) + rows[2]) + ...`` in fp32; then ``out = s * scale``, or ``out += s * scale`` with ``add``.

    The order is the ranks' and the product is rounded before it is added, so the result is bitwise the same for every
    bucket size, device and schedule.

    Args:
        rows: [W, S] bf16, fp16, fp32 or fp64 (the wire dtype); elements of a row are contiguous, W >= 1.
        out: [S] fp32 (fp64 for fp64 rows), contiguous. Without ``add`` its old content is not read.
        scale: 1 / W of the whole group for a mean.

    Raises:
        ValueError: a dtype, device, layout or size that breaks the above, or ``out`` shares memory with a row.
    """
    check_dtype("rows", rows, FLOATS)
    if rows.dim() != 2 or rows.shape[0] < 1:
        raise ValueError(f"rows: shape is {tuple(rows.shape)}, expected [W, S] with W >= 1")
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(f"rows: stride within a row is {rows.stride(1)}, expected 1")
    check_dtype("out", out, (compute_dtype(rows.dtype),))
    check_flat("out", out)
    check_numel("out", out, "a row", rows.shape[1])
    check_device("out", out, "rows", rows)
    if rows.is_contiguous():
        check_disjoint("out", out, "rows", rows)
    else:  # out may lie between two rows
        for rank, row in enumerate(rows):
            check_disjoint("out", out, f"rows[{rank}]", row)
    reduce_rows_twin(rows, out, scale, add)


def reduce_rows_twin(rows: Tensor, out: Tensor, scale: float, add: bool) -> None:
    """The same in torch, piece by piece: each element leaves main memory once, temporaries stay in cache."""
    num_rows = rows.shape[0]
    in_wide = rows.dtype == out.dtype
    partial = scratch_like(out, out.dtype) if add else out[:0]
    widened = out[:0] if in_wide else scratch_like(out, out.dtype)
    for start, length in ranges(out.numel()):
        out_piece = out[start : start + length]
        total = partial[:length] if add else out_piece
        row_pieces = rows[:, start : start + length].unbind(0)
        if in_wide and num_rows > 1:
            torch.add(row_pieces[0], row_pieces[1], out=total)
        else:
            total.copy_(row_pieces[0])
        for row in row_pieces[2 if in_wide else 1 :]:
            total.add_(row if in_wide else widened[:length].copy_(row))
        if scale != 1.0:
            total.mul_(scale)
        if add:
            out_piece.add_(total)
