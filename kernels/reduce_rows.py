# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``reduce_rows``: the rows of W ranks, received or read, summed in rank order into this rank's shard.

Bytes moved: every row read once, [S] fp32 written once (read once more with ``add``): S * (W * wire bytes + 4 or 8).
128-bit accesses where rows, their stride and ``out`` are aligned to 16 elements, as zc.planning.layout makes them.
The idea, an all-to-all and then a local sum in fp32, is in docs/decisions.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._common import (
    FLOATS,
    cdiv,
    check_device,
    check_disjoint,
    check_dtype,
    check_flat,
    check_numel,
    constexpr,
    jit,
    kernel,
    on_device,
    ranges,
    scratch_like,
    tl,
    use_triton,
    without_grad,
)

MOST_UNROLLED = 16  # rows: 34 to 70 registers of 255 on sm_90, none spilled
GROUP = 8  # of more rows so many at a time. 4 to 11 loads of a thread come before its first addition (SASS, sm_90)
BLOCK = 2048  # 8 elements per thread on NVIDIA (16) and AMD (256 threads of 8): a 128-bit access of bf16 on both


@without_grad
def reduce_rows(rows: Tensor, out: Tensor, *, scale: float, add: bool, keeps_rows: bool = True) -> None:
    """``s = ((rows[0] + rows[1]) + rows[2]) + ...`` in fp32; ``out = s * scale``, or ``out += s * scale`` with ``add``.

    The order is the ranks' and the product is rounded before it is added, so the result is bitwise the same for every
    bucket size, device and schedule.

    Args:
        rows: [W, S] bf16, fp16, fp32 or fp64 (the wire dtype); elements of a row are contiguous, W >= 1.
        out: [S] fp32 (fp64 for fp64 rows), contiguous. Without ``add`` its old content is not read.
        scale: of the sum; 1 / all ranks for a mean.
        keeps_rows: False: nobody reads the rows afterwards. On a device without Triton fp32 rows then need no memory
            of their own, which a side stream would allocate.

    Raises:
        ValueError: a dtype, device, layout or size that breaks the above, or ``out`` shares memory with a row.
    """
    check_dtype("rows", rows, FLOATS)
    if rows.dim() != 2 or rows.shape[0] < 1:
        raise ValueError(f"rows: shape is {tuple(rows.shape)}, expected [W, S] with W >= 1")
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(f"rows: stride within a row is {rows.stride(1)}, expected 1")
    check_dtype("out", out, (torch.float64 if rows.dtype == torch.float64 else torch.float32,))
    check_flat("out", out)
    check_numel("out", out, "a row", rows.shape[1])
    check_device("out", out, "rows", rows)
    if rows.is_contiguous():
        check_disjoint("out", out, "rows", rows)
    else:  # out may lie between two rows
        for rank, row in enumerate(rows):
            check_disjoint("out", out, f"rows[{rank}]", row)
    if use_triton(rows) and rows.dtype != torch.float64:
        reduce_rows_triton(rows, out, scale, add)
    else:
        reduce_rows_reference(rows, out, scale, add, keeps_rows)


def reduce_rows_reference(rows: Tensor, out: Tensor, scale: float, add: bool, keeps_rows: bool = True) -> None:
    """The same in torch, piece by piece: each element leaves main memory once, temporaries stay in a CPU's cache. On a
    device there are none where none are needed: its kernels widen what they read, and the first row takes the sum."""
    num_rows = rows.shape[0]
    in_wide, is_on_cpu = rows.dtype == out.dtype, out.device.type == "cpu"
    in_place = in_wide and not is_on_cpu and (not keeps_rows or (num_rows == 1 and scale == 1.0))
    partial = scratch_like(out, out.dtype) if add and not in_place else out[:0]
    widened = scratch_like(out, out.dtype) if is_on_cpu and not in_wide else None
    for start, length in ranges(out.numel()):
        out_piece = out[start : start + length]
        row_pieces = rows[:, start : start + length].unbind(0)
        total = (row_pieces[0] if in_place else partial[:length]) if add else out_piece
        if in_wide and num_rows > 1:
            torch.add(row_pieces[0], row_pieces[1], out=total)
        elif total is not row_pieces[0]:
            total.copy_(row_pieces[0])
        for row in row_pieces[2 if in_wide else 1 :]:
            total.add_(row if widened is None else widened[:length].copy_(row))
        if scale != 1.0:
            total.mul_(scale)
        if add:
            out_piece.add_(total)


def reduce_rows_triton(rows: Tensor, out: Tensor, scale: float, add: bool) -> None:
    """One launch, one pass. fp64 rows (a test's oracle) go to the reference."""
    if out.numel() == 0:
        return
    num_rows = rows.shape[0]
    with on_device(out):
        sum_rows[(cdiv(out.numel(), BLOCK),)](
            rows, out, out.numel(), rows.stride(0), num_rows, float(scale),
            UNROLLED=num_rows if num_rows <= MOST_UNROLLED else 0, ADD=add, BLOCK=BLOCK, GROUP=GROUP,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@jit
def _sum_block(rows, out, row_stride, num_rows, scale, mask, UNROLLED: constexpr, ADD: constexpr,
               GROUP: constexpr):  # fmt: skip
    total = tl.load(rows, mask=mask).to(tl.float32)
    if UNROLLED > 0:  # no branch between loads, so the assembler moves them ahead as far as registers go
        for rank in tl.static_range(1, UNROLLED):
            total += tl.load(rows + rank * row_stride, mask=mask).to(tl.float32)
    else:
        rank = 1
        while rank + GROUP <= num_rows:
            for k in tl.static_range(GROUP):
                total += tl.load(rows + (rank + k) * row_stride, mask=mask).to(tl.float32)
            rank += GROUP
        while rank < num_rows:
            total += tl.load(rows + rank * row_stride, mask=mask).to(tl.float32)
            rank += 1
    total = total * scale
    if ADD:
        total = tl.load(out, mask=mask) + total
    tl.store(out, total, mask=mask)


@kernel("num_rows")
def sum_rows(rows, out, numel, row_stride, num_rows, scale, UNROLLED: constexpr, ADD: constexpr, BLOCK: constexpr,
             GROUP: constexpr):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    # rank * row_stride passes 2^31 elements; a row of one element comes as the constant 1, which has no .to()
    row_stride = tl.cast(row_stride, tl.int64)
    if start + BLOCK <= numel:  # no mask: 128-bit accesses
        _sum_block(rows + start + at, out + start + at, row_stride, num_rows, scale, None, UNROLLED, ADD, GROUP)
    else:
        mask = at < numel - start
        _sum_block(rows + start + at, out + start + at, row_stride, num_rows, scale, mask, UNROLLED, ADD, GROUP)
