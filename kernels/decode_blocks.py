# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``sum_blocks`` and ``add_blocks``: decode gradients, and differences of weights, that `encode_blocks` has encoded.

Both launch one kernel. Bytes moved: 1.02 or 0.52 per element of each row, 4 written (read once more where it adds).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._blocks import BLOCK, HALF, NUM, TRAINED, Blocks, Piece, check_wire
from zc.kernels._check import check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import CHUNK, scratch_like
from zc.kernels._triton import cdiv, constexpr, jit, kernel, on_device, tl, use_triton

__all__ = ["add_blocks", "decode_blocks_reference", "decode_blocks_triton", "sum_blocks"]


@torch.no_grad()
def sum_blocks(rows: Tensor, out: Tensor, blocks: Blocks, *, scale: float, add: bool) -> None:
    """``s = ((rows[0] + rows[1]) + rows[2]) + ...`` of the decoded rows, in fp32; ``out = s * scale``, or
    ``out += s * scale`` with ``add``. Rounded as in `reduce_rows`.

    Args:
        rows: [W, bytes] uint8, contiguous, each as ``blocks`` says.
        out: [256 * blocks] fp32, contiguous. Without ``add`` its old content is not read.

    Raises:
        ValueError: a dtype, device, layout or size that breaks the above; nothing has been written.
    """
    check_dtype("out", out, (torch.float32,))
    _run(rows, out, blocks, scale=scale, add=add, is_update=False)


@torch.no_grad()
def add_blocks(wire: Tensor, out: Tensor, blocks: Blocks) -> None:
    """``out +=`` the decoded blocks, in fp32, rounded to the dtype of ``out``; exact blocks replace their elements.

    Args:
        wire: bytes, contiguous, as ``blocks`` says.
        out: [256 * blocks] fp32, bf16 or fp16, contiguous.

    Raises:
        ValueError: a dtype, device, layout or size that breaks the above; nothing has been written.
    """
    check_dtype("out", out, TRAINED)
    _run(wire.view(1, -1), out, blocks, scale=1.0, add=True, is_update=True)


def _run(rows: Tensor, out: Tensor, blocks: Blocks, *, scale: float, add: bool, is_update: bool) -> None:
    if rows.dim() != 2 or rows.shape[0] < 1:
        raise ValueError(f"rows: shape is {tuple(rows.shape)}, expected [W, bytes] with W >= 1")
    check_wire("rows", rows, blocks)
    check_flat("out", out)
    check_numel("out", out, "all blocks", BLOCK * blocks.num_blocks)
    check_device("out", out, "rows", rows)
    check_disjoint("out", out, "rows", rows)
    decode = decode_blocks_triton if use_triton(out) else decode_blocks_reference
    decode(rows, out, blocks, scale, add, is_update)


def decode_blocks_reference(
    rows: Tensor, out: Tensor, blocks: Blocks, scale: float, add: bool, is_update: bool
) -> None:
    """The same in torch, piece by piece."""
    scratch = torch.empty_like(scratch_like(out, torch.float32)), scratch_like(out, torch.float32)
    for piece in blocks.pieces(CHUNK // BLOCK):
        own = out[piece.elements]
        total, widened = (each[: own.numel()] for each in scratch)
        _decode(rows[0], total, blocks.bits, piece)
        if is_update and piece.scales is None:
            own.copy_(total)
            continue
        for row in rows[1:]:
            total.add_(_decode(row, widened, blocks.bits, piece))
        if scale != 1.0:
            total.mul_(scale)
        own.copy_(total.add_(own) if add else total)


def _decode(row: Tensor, out: Tensor, bits: int, piece: Piece) -> Tensor:
    payload = row[piece.payload]
    if piece.scales is None:
        return out.copy_(payload.view(torch.float32))
    values = out.view(-1, BLOCK)
    integers = payload.view(torch.int8).view(len(values), -1)
    if bits == 8:
        values.copy_(integers)
    else:
        values[:, :HALF], values[:, HALF:] = (integers << 4) >> 4, integers >> 4
    values.mul_(row.view(torch.float32)[piece.scales, None])
    return out


def decode_blocks_triton(
    rows: Tensor, out: Tensor, blocks: Blocks, scale: float, add: bool, is_update: bool
) -> None:
    """One launch, one pass."""
    if not blocks.num_blocks:
        return
    with on_device(out):
        decode[(cdiv(blocks.num_blocks, NUM),)](
            rows.view(torch.int8), rows.view(torch.float32), out, blocks.table(out.device), blocks.num_blocks,
            rows.shape[1] // 4, rows.shape[0], float(scale), BITS=blocks.bits, ADD=add, UPDATE=is_update, NUM=NUM,
            HALF=HALF, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@jit
def _values(row, words, unit, word, is_encoded, is_exact, column, BITS: constexpr, HALF: constexpr):
    """Both halves of each block, as fp32."""
    scale = tl.load(words + word, mask=is_encoded, other=0.0)
    left = tl.load(words + unit * 32 + column, mask=is_exact, other=0.0)
    right = tl.load(words + unit * 32 + column + HALF, mask=is_exact, other=0.0)
    first = tl.load(row + unit * 128 + column, mask=is_encoded, other=0).to(tl.int32)
    if BITS == 8:
        second = tl.load(row + unit * 128 + column + HALF, mask=is_encoded, other=0).to(tl.int32)
    else:
        second = first >> 4
        first = (first << 28) >> 28
    left = tl.where(is_encoded, first.to(tl.float32) * scale, left)
    return left, tl.where(is_encoded, second.to(tl.float32) * scale, right)


@kernel("num_rows", "num_blocks")
def decode(rows, words, out, table, num_blocks, row_words, num_rows, scale, BITS: constexpr, ADD: constexpr,
           UPDATE: constexpr, NUM: constexpr, HALF: constexpr):  # fmt: skip
    block = tl.program_id(0) * NUM + tl.arange(0, NUM)
    is_there = (block < num_blocks)[:, None]
    unit = tl.load(table + block, mask=block < num_blocks, other=0).to(tl.int64)[:, None]
    word = tl.load(table + num_blocks + block, mask=block < num_blocks, other=-1)[:, None]
    is_encoded, is_exact = is_there & (word >= 0), is_there & (word < 0)
    column = tl.arange(0, HALF)[None, :]
    at = block.to(tl.int64)[:, None] * (2 * HALF) + column
    row_words = tl.cast(row_words, tl.int64)
    left, right = _values(rows, words, unit, word, is_encoded, is_exact, column, BITS, HALF)
    for rank in range(1, num_rows):
        start = rank * row_words
        more_left, more_right = _values(
            rows + start * 4, words + start, unit, word, is_encoded, is_exact, column, BITS, HALF
        )
        left += more_left
        right += more_right
    left, right = left * scale, right * scale
    if ADD:
        old_left = tl.load(out + at, mask=is_there, other=0.0).to(tl.float32)
        old_right = tl.load(out + at + HALF, mask=is_there, other=0.0).to(tl.float32)
        if UPDATE:
            left = tl.where(is_exact, left, old_left + left)
            right = tl.where(is_exact, right, old_right + right)
        else:
            left, right = old_left + left, old_right + right
    tl.store(out + at, left.to(out.dtype.element_ty), mask=is_there)
    tl.store(out + at + HALF, right.to(out.dtype.element_ty), mask=is_there)
