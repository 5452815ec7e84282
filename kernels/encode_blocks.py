# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``encode_blocks``: fp32 numbers, or the differences of two tensors, as integers of 8 or 4 bits with a scale per
block of 256.

Bytes moved: every element read once (twice with ``base``), 1.02 or 0.52 bytes per element written. Block-wise scales
are those of 8-bit optimizers (arXiv:2110.02861).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._blocks import BLOCK, HALF, NUM, TINY, TOP, TRAINED, Blocks, check_wire
from zc.kernels._check import check_alike, check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import CHUNK, scratch_like
from zc.kernels._triton import cdiv, constexpr, jit, kernel, on_device, tl, use_triton

__all__ = ["encode_blocks", "encode_blocks_reference", "encode_blocks_triton"]


@torch.no_grad()
def encode_blocks(x: Tensor, wire: Tensor, blocks: Blocks, *, base: Tensor | None = None) -> None:
    """``wire`` <- the blocks of ``x``, or of ``x - base``. Exact blocks are those of ``x`` in either case.

    The scale of an encoded block is its largest magnitude / 127 (7 for 4 bits), and an element is the nearest multiple
    of it, ties to even. A block with a NaN or an infinity has the scale NaN, so all of it arrives as NaN. Where the
    scale would be subnormal it is 1, so such a block arrives as zeros.

    Args:
        x: [256 * blocks] fp32, bf16 or fp16, contiguous.
        wire: bytes, contiguous, where ``blocks`` says. Bytes between runs are left as they are.
        base: as ``x``, of any of these dtypes.

    Raises:
        ValueError: a dtype, device, layout or size that breaks the above; nothing has been written.
    """
    check_dtype("x", x, TRAINED)
    check_flat("x", x)
    check_numel("x", x, "all blocks", BLOCK * blocks.num_blocks)
    check_wire("wire", wire, blocks)
    check_device("wire", wire, "x", x)
    check_disjoint("wire", wire, "x", x)
    if base is not None:
        check_alike("base", base, TRAINED, "x", x)
        check_disjoint("wire", wire, "base", base)
    (encode_blocks_triton if use_triton(x) else encode_blocks_reference)(x, wire, blocks, base)


def encode_blocks_reference(x: Tensor, wire: Tensor, blocks: Blocks, base: Tensor | None) -> None:
    """The same in torch, piece by piece."""
    words, in_fp32 = wire.view(torch.float32), x.dtype == torch.float32
    scratch, difference = (scratch_like(x, torch.float32) for _ in range(2))
    for piece in blocks.pieces(CHUNK // BLOCK):
        values, payload = x[piece.elements], wire[piece.payload]
        if piece.scales is None:
            payload.view(torch.float32).copy_(values)
            continue
        if not in_fp32 or base is not None:
            values = difference[: values.numel()].copy_(values)
        if base is not None:
            values.sub_(base[piece.elements])
        values, scales = values.view(-1, BLOCK), words[piece.scales]
        rows = scratch[: values.numel()].view(-1, BLOCK)
        torch.amax(torch.abs(values, out=rows), 1, out=scales).div_(TOP[blocks.bits])
        scales.masked_fill_(scales == torch.inf, torch.nan).masked_fill_(scales < TINY, 1.0)
        torch.div(values, scales[:, None], out=rows).round_()
        if x.device.type != "cpu" or bool(scales.isnan().any()):
            rows.nan_to_num_(0.0)  # what a NaN becomes as an integer is not defined
        out = payload.view(torch.int8).view(len(rows), -1)
        if blocks.bits == 8:
            out.copy_(rows)
        else:
            integers = rows.to(torch.int8)
            out.copy_((integers[:, :HALF] & 15) | (integers[:, HALF:] << 4))


def encode_blocks_triton(x: Tensor, wire: Tensor, blocks: Blocks, base: Tensor | None) -> None:
    """One launch, one pass."""
    if not blocks.num_blocks:
        return
    with on_device(x):
        encode[(cdiv(blocks.num_blocks, NUM),)](
            x, x if base is None else base, wire.view(torch.int8), wire.view(torch.float32), blocks.table(x.device),
            blocks.num_blocks, TOP=TOP[blocks.bits], TINY=TINY, BITS=blocks.bits, DIFFERS=base is not None, NUM=NUM,
            HALF=HALF, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@jit
def _rounded(x, scale, is_finite):
    """The nearest integer, ties to even: adding 1.5 * 2^23 leaves no bit for a fraction."""
    x = tl.where(is_finite[:, None], tl.div_rn(x, scale[:, None] + tl.zeros_like(x)), 0.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)


@kernel("num_blocks")
def encode(x, base, wire, words, table, num_blocks, TOP: constexpr, TINY: constexpr, BITS: constexpr,
           DIFFERS: constexpr, NUM: constexpr, HALF: constexpr):  # fmt: skip
    block = tl.program_id(0) * NUM + tl.arange(0, NUM)
    is_there = block < num_blocks
    unit = tl.load(table + block, mask=is_there, other=0).to(tl.int64)[:, None]
    word = tl.load(table + num_blocks + block, mask=is_there, other=-1)
    is_encoded, is_exact = (is_there & (word >= 0))[:, None], (is_there & (word < 0))[:, None]
    column = tl.arange(0, HALF)[None, :]
    at = block.to(tl.int64)[:, None] * (2 * HALF) + column
    left = tl.load(x + at, mask=is_there[:, None], other=0.0).to(tl.float32)
    right = tl.load(x + at + HALF, mask=is_there[:, None], other=0.0).to(tl.float32)
    tl.store(words + unit * 32 + column, left, mask=is_exact)
    tl.store(words + unit * 32 + column + HALF, right, mask=is_exact)
    if DIFFERS:
        left -= tl.load(base + at, mask=is_there[:, None], other=0.0).to(tl.float32)
        right -= tl.load(base + at + HALF, mask=is_there[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.abs(left), tl.abs(right))
    # a maximum may drop a NaN, a comparison says False of one
    is_finite = tl.min(((tl.abs(left) < float("inf")) & (tl.abs(right) < float("inf"))).to(tl.int32), 1) == 1
    scale = tl.div_rn(tl.max(largest, 1), tl.full([NUM], TOP, tl.float32))
    scale = tl.where(scale < TINY, 1.0, scale)
    scale = tl.where(is_finite, scale, 1.0)
    first, second = _rounded(left, scale, is_finite), _rounded(right, scale, is_finite)
    if BITS == 8:
        tl.store(wire + unit * 128 + column, first.to(tl.int8), mask=is_encoded)
        tl.store(wire + unit * 128 + column + HALF, second.to(tl.int8), mask=is_encoded)
    else:
        tl.store(wire + unit * 128 + column, ((first & 15) | (second << 4)).to(tl.int8), mask=is_encoded)
    tl.store(words + word, tl.where(is_finite, scale, float("nan")), mask=is_there & (word >= 0))
