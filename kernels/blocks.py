# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""Numbers in blocks of 256 with a scale each: where they lie in the bytes that are sent, and the kernels that encode
and decode them.

A block is 256 elements. An encoded one becomes 256 integers of 8 bits, or 128 bytes with two of 4 bits each, and one
fp32 scale. An exact one becomes 256 fp32 numbers. Blocks of either kind stand in *runs*.

``encode_blocks``: fp32 numbers, or the differences of two tensors, as integers of 8 or 4 bits with a scale per
block of 256.

Bytes moved: every element read once (twice with ``base``), 1.02 or 0.52 bytes per element written. Block-wise scales
are those of 8-bit optimizers (arXiv:2110.02861).

``sum_blocks`` and ``add_blocks``: decode gradients, and differences of weights, that `encode_blocks` has encoded.

Both launch one kernel. Bytes moved: 1.02 or 0.52 per element of each row, 4 written (read once more where it adds).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zc.kernels._common import (
    CHUNK,
    cdiv,
    check_alike,
    check_device,
    check_disjoint,
    check_dtype,
    check_flat,
    check_numel,
    constexpr,
    jit,
    kernel,
    on_device,
    scratch_like,
    tl,
    use_triton,
    without_grad,
)

BLOCK = 256  # elements that share a scale
HALF = BLOCK // 2
NUM = 8  # blocks per program
TRAINED = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 128  # bytes: each block begins at a multiple of it, so that accesses are 128 bits wide
EXACT = 1024  # bytes of an exact block
TOP = {8: 127.0, 4: 7.0}  # the largest integer, by bits
TINY = torch.finfo(torch.float32).tiny  # a scale below this one is subnormal, and a quotient by it may overflow


class Run(NamedTuple):
    """Blocks [first, first + num), all encoded or all exact. Their bytes begin at byte ``at``, the scales of encoded
    ones at fp32 word ``scales``. It is -1 for exact ones."""

    first: int
    num: int
    at: int
    scales: int


class Piece(NamedTuple):
    """Some blocks of a run: their elements in the tensor, their bytes, and the fp32 words of their scales or None."""

    elements: slice
    payload: slice
    scales: slice | None


class Blocks:
    """Runs that cover blocks 0, 1, ... of a tensor, in order; ``bits``: of an encoded element. ``tables`` gets each
    `table`, for a caller who keeps it while launched kernels read it."""

    def __init__(
        self, runs: Sequence[tuple[int, int, int, int]], bits: int, tables: list[Tensor] | None = None
    ) -> None:
        self.runs, self.bits = tuple(Run(*run) for run in runs), bits
        self.num_blocks = sum(run.num for run in self.runs)
        self._tables: dict[torch.device, Tensor] = {}
        self._kept = tables if tables is not None else []
        if bits not in TOP:
            raise ValueError(f"bits is {bits}, expected 8 or 4")
        reached = 0
        for run in self.runs:
            if run.first != reached or run.at % UNIT:
                raise ValueError(f"{run}: expected blocks from {reached} on, at a multiple of {UNIT} bytes")
            reached += run.num

    @property
    def payload(self) -> int:
        """Bytes of an encoded block, without its scale."""
        return BLOCK * self.bits // 8

    def pieces(self, most: int) -> Iterator[Piece]:
        """All blocks in order, at most ``most`` at once."""
        for run in self.runs:
            is_exact = run.scales < 0
            width = EXACT if is_exact else self.payload
            for start in range(0, run.num, most):
                stop = min(start + most, run.num)
                yield Piece(
                    slice((run.first + start) * BLOCK, (run.first + stop) * BLOCK),
                    slice(run.at + start * width, run.at + stop * width),
                    None if is_exact else slice(run.scales + start, run.scales + stop),
                )

    def table(self, device: torch.device) -> Tensor:
        """[2, blocks] int32: of each block the `UNIT` where its bytes begin, and the word of its scale or -1."""
        if device not in self._tables:
            units, words = ([torch.empty(0, dtype=torch.int64, device="cpu")] for _ in range(2))
            for run in self.runs:
                k = torch.arange(run.num, device="cpu")
                width = EXACT if run.scales < 0 else self.payload
                units.append((run.at + k * width) // UNIT)
                words.append(torch.full_like(k, -1) if run.scales < 0 else run.scales + k)
            table = torch.stack([torch.cat(units), torch.cat(words)]).to(torch.int32)
            self._tables[device] = table.to(device)
            self._kept.append(self._tables[device])
        return self._tables[device]


def _check_wire(name: str, wire: Tensor, blocks: Blocks) -> None:
    """``wire``: bytes, contiguous, aligned, and long enough for ``blocks``."""
    if wire.dtype != torch.uint8:
        raise ValueError(f"{name}: dtype is {wire.dtype}, expected torch.uint8")
    if not wire.is_contiguous():
        raise ValueError(f"{name}: shape {tuple(wire.shape)}, strides {wire.stride()}; expected contiguous bytes")
    if wire.shape[-1] % 4 or wire.storage_offset() % 4:
        where = f"{wire.shape[-1]} bytes from byte {wire.storage_offset()} on"
        raise ValueError(f"{name} has {where}, expected whole words")
    ends = [run.at + run.num * (EXACT if run.scales < 0 else blocks.payload) for run in blocks.runs]
    ends += [4 * (run.scales + run.num) for run in blocks.runs if run.scales >= 0]
    if wire.shape[-1] < max(ends, default=0):
        raise ValueError(f"{name} has {wire.shape[-1]} bytes, its blocks end at byte {max(ends)}")


@without_grad
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
    _check_wire("wire", wire, blocks)
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


@without_grad
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


@without_grad
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
    _check_wire("rows", rows, blocks)
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
