# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""Adds a gradient to each slot of a flat buffer, in one launch whatever their number.

A table on the device has one row of int64, 96 bytes, per slot, so that a launch serves any number of them. A column
holds the first program of each row, ascending, and a program finds its row by a binary search over it: log2 of the
rows, in L1 after a processor's first program. It adds one block of the slot, or some tiles::

    column    0    1       2      3              4      5..7         8..11
              ptr  offset  numel  first_program  kind   sizes[1:4]   strides (elements)

A transposed gradient, [B, J, M] whose dimension J has stride 1, goes in tiles of [TILE_M, TILE_J]: reads follow J and
writes M, so both are of neighbours, and what is divided is a tile's number. (A channels-last [O, I, 3, 3] is [O, I, 9];
a transposed matrix has B = 1.) Every other strided one goes element by element.

The idea of a table instead of one launch per tensor: apex / PyTorch multi_tensor_apply; here without its limit of 4 KB
of arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels._common import cdiv, constexpr, jit, kernel, on_device, tl

NUM_COLUMNS = 12
BLOCK = 4096
TILE_M, TILE_J = 16, 64  # writes of at least a sector of 32 bytes; M is 9 for a convolution of 3 x 3, J 64 and more
TILES = BLOCK // (TILE_M * TILE_J)  # of a program
_DTYPE_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_STRIDED, _UNALIGNED, _TILED = 4, 8, 12  # added to the dtype's kind


def handles(flat: Tensor, grads: Sequence[Tensor]) -> bool:
    """Whether the kernel is what adds these. fp64 (a test's oracle, not a training dtype) goes to the reference, and
    what torch adds in one launch, without a table: the kernel takes 5 % less of an H200's time for it, and ten times
    the host's."""
    is_simple = all(grad.dtype == flat.dtype and grad.is_contiguous() for grad in grads)
    return not is_simple and flat.dtype in _DTYPE_KINDS and all(grad.dtype in _DTYPE_KINDS for grad in grads)


def collapse(grad: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of ``grad`` with neighbouring dimensions joined where one stride steps through both."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(grad.shape, grad.stride(), strict=True):
        if size == 1:
            continue
        if strides and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return sizes, strides


def launch(flat: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Adds ``grads`` to the slots of ``flat``."""
    rows: list[list[int]] = []
    copies: list[Tensor] = []  # copies of gradients: alive until the launch is queued, then stream order protects them
    num_programs = 0
    for grad, offset in zip(grads, offsets, strict=True):
        if grad.numel() == 0:
            continue
        if grad.is_neg():  # the imaginary part of a lazy conjugate: its memory has the negative
            grad = grad.resolve_neg()
            copies.append(grad)
        sizes, strides = collapse(grad)
        if len(sizes) > 4 or (grad.numel() >= 2**31 and strides != [1]):  # the kernel's index has 4 digits of 32 bits
            grad = grad.contiguous()
            copies.append(grad)
            sizes, strides = collapse(grad)
        kind = _DTYPE_KINDS[grad.dtype]
        if len(sizes) > 1 or strides not in ([], [1]):
            kind += _TILED if fills_tiles(sizes, strides) else _STRIDED
        elif grad.data_ptr() % 16 or offset % 16:
            kind += _UNALIGNED
        missing = 4 - len(sizes)
        sizes, strides = ([1] * missing + sizes)[1:], [0] * missing + strides
        rows.append([grad.data_ptr(), offset, grad.numel(), num_programs, kind, *sizes, *strides])
        num_programs += cdiv(_num_tiles(sizes), TILES) if kind > _TILED else cdiv(grad.numel(), BLOCK)
    if not rows:
        return
    table = to_device(rows, flat.device)
    with on_device(flat):
        add_slots[(num_programs,)](
            table, flat, len(rows), BLOCK=BLOCK, TILE_M=TILE_M, TILE_J=TILE_J,
            COLUMNS=NUM_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _num_tiles(sizes: Sequence[int]) -> int:
    """Of [B, J, M]."""
    return sizes[0] * cdiv(sizes[1], TILE_J) * cdiv(sizes[2], TILE_M)


def fills_tiles(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these, of `collapse`, are of a transposed gradient, and tiles hold a quarter of what they could."""
    if len(sizes) not in (2, 3) or strides[-2] != 1:
        return False
    batched = sizes if len(sizes) == 3 else (1, *sizes)
    return _num_tiles(batched) * TILE_M * TILE_J <= 4 * math.prod(sizes)


@jit
def _add(out, x, mask):
    """``out += x`` in fp32; ``mask`` None: the whole block."""
    tl.store(out, tl.load(out, mask=mask) + x.to(tl.float32), mask=mask)


@jit
def _add_block(source, out, start, numel, BLOCK: constexpr):
    """Contiguous. A block without a mask is what lets the compiler use 128-bit accesses."""
    at = tl.arange(0, BLOCK)
    source += start
    out += start
    if start + BLOCK <= numel:
        _add(out + at, tl.load(source + at), None)
    else:
        mask = at < numel - start
        _add(out + at, tl.load(source + at, mask=mask), mask)


@jit
def _add_strided(source, out, start, numel, row, BLOCK: constexpr):
    """Element ``i`` of the slot is the element of the gradient whose digits to the bases ``sizes`` spell ``i``."""
    size1, size2, size3 = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    stride0, stride1, stride2, stride3 = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11)
    for first in range(0, BLOCK, 1024):  # in pieces: 64-bit addresses of a whole block would take every register
        i = (start + first + tl.arange(0, 1024)).to(tl.int32)
        mask = i < numel
        at = (i % size3).to(tl.int64) * stride3
        rest = i // size3
        at += (rest % size2).to(tl.int64) * stride2
        rest = rest // size2
        at += (rest % size1).to(tl.int64) * stride1 + (rest // size1).to(tl.int64) * stride0
        _add(out + i, tl.load(source + at, mask=mask), mask)


@jit
def _add_tiles(source, out, first, row, NUM: constexpr, TILE_M: constexpr, TILE_J: constexpr):
    """Tiles [first, first + NUM) of a [B, J, M], those of one run of writes after one another."""
    num_b, size_j, size_m = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    stride_b, stride_m = tl.load(row + 9), tl.load(row + 11)
    per_run = tl.cdiv(size_m, TILE_M)
    per_matrix = per_run * tl.cdiv(size_j, TILE_J)
    for tile in range(first, first + NUM):
        b = tile // per_matrix
        j = tile % per_matrix // per_run * TILE_J + tl.arange(0, TILE_J)[None, :]
        m = tile % per_run * TILE_M + tl.arange(0, TILE_M)[:, None]
        mask = (j < tl.where(b < num_b, size_j, 0)) & (m < size_m)
        x = tl.load(source + (b * stride_b + m.to(tl.int64) * stride_m) + j, mask=mask)
        _add(out + (b * size_j * size_m + j * size_m + m), x, mask)


@jit
def _add_row(ptr, out, start, numel, kind, row, DTYPE: constexpr, BLOCK: constexpr, TILE_M: constexpr,
          TILE_J: constexpr):  # fmt: skip
    # a pointer of its own in each branch: tl.multiple_of marks the very value that it is given, for all its uses
    if kind < 4:
        source = tl.multiple_of(ptr.to(tl.pointer_type(DTYPE)), 16)
        hinted = out + tl.multiple_of(tl.load(row + 1), 16)
        _add_block(source, hinted, start, numel, BLOCK)
    elif kind < 8:
        source = ptr.to(tl.pointer_type(DTYPE))
        _add_strided(source, out + tl.load(row + 1), start, numel, row, BLOCK)
    elif kind > 12:
        source = ptr.to(tl.pointer_type(DTYPE))
        size = TILE_M * TILE_J
        _add_tiles(source, out + tl.load(row + 1), start // size, row, BLOCK // size, TILE_M, TILE_J)
    else:
        source = ptr.to(tl.pointer_type(DTYPE))
        _add_block(source, out + tl.load(row + 1), start, numel, BLOCK)


@kernel("num_rows")
def add_slots(table, out, num_rows, BLOCK: constexpr, TILE_M: constexpr, TILE_J: constexpr,
              COLUMNS: constexpr):  # fmt: skip
    program = tl.program_id(0)
    row = find_row(table, num_rows, program, 3, COLUMNS)
    ptr = tl.load(row)
    numel = tl.load(row + 2)
    start = (program - tl.load(row + 3)) * BLOCK
    kind = tl.load(row + 4)
    if kind % 4 == 1:
        _add_row(ptr, out, start, numel, kind, row, tl.float32, BLOCK, TILE_M, TILE_J)
    elif kind % 4 == 2:
        _add_row(ptr, out, start, numel, kind, row, tl.bfloat16, BLOCK, TILE_M, TILE_J)
    else:
        _add_row(ptr, out, start, numel, kind, row, tl.float16, BLOCK, TILE_M, TILE_J)


def to_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[len(rows), columns] int64: all that goes to the device, from pinned memory, without a synchronisation."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
    return table.to(device, non_blocking=True)


@jit
def find_row(table, num_rows, program, FIRST_PROGRAM: constexpr, COLUMNS: constexpr):
    """The last row whose first program, in column FIRST_PROGRAM, is not after ``program``.

    A row without programs has the first program of the next row, so it is never the last.
    """
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(table + middle * COLUMNS + FIRST_PROGRAM) <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return table + low * COLUMNS
