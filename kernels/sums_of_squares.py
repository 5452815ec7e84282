# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``sums_of_squares``: this rank's part of a gradient norm, of all parameters at once.

Bytes moved: every tensor read once; on a GPU 8 bytes of partial sum for 8192 elements and 32 bytes of table per tensor.
128-bit loads where a tensor starts at 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zc.kernels._common import (
    cdiv,
    check_flats,
    constexpr,
    jit,
    kernel,
    on_device,
    ranges,
    runs,
    scratch_like,
    tl,
    use_triton,
    without_grad,
)
from zc.kernels._private import copy_all_
from zc.kernels._slots import find_row, to_device

BLOCK = 2048  # 8 elements per thread on NVIDIA (16) and AMD (256 threads of 8): a 128-bit load of bf16 on both
PER_PROGRAM = 4 * BLOCK  # 6 M elements still give every processor of a large GPU several programs
PARTIALS = 1024  # added at a time
NUM_COLUMNS = 4  # ptr, numel, first_program, kind
_DTYPE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_UNALIGNED = 4  # added to the dtype's kind
_ALIGN = 8  # fp64 elements in 64 bytes: MKL's dot product adds in another order where its operand starts elsewhere


@without_grad
def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] float64 on their device: element ``i`` is the sum over ``j`` of ``tensors[i][j] ** 2``.

    float64 because a square of an fp32 number is exact in it: no overflow at |x| > 1.8e19, and the rounding of the sum
    is some 1e-13, far below what clipping or an all-reduce in another order could show. inf and NaN come through to
    their own element. One order of additions for one size, without atomics: on one device the same bits in every call,
    whatever the other tensors are and wherever in memory this one starts.

    Args:
        tensors: [N] each, bf16, fp16, fp32 or fp64 (they may differ), contiguous, on one device; N may be 0. Of no
            tensors the result is [0], on the CPU.

    Raises:
        ValueError: a wrong dtype, layout or device; nothing has been computed.
    """
    check_flats("tensors", tensors)
    if not tensors:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    return sums_of_squares_triton(tensors) if use_triton(tensors[0]) else sums_of_squares_reference(tensors)


def sums_of_squares_reference(tensors: Sequence[Tensor]) -> Tensor:
    """The same in torch: small tensors widened into one piece by one call, large ones piece by piece."""
    slots = [x.numel() + -x.numel() % _ALIGN for x in tensors]
    scratch = scratch_like(tensors[0], torch.float64, sum(slots))
    sums: list[Tensor] = []
    for start, stop in runs(slots):
        if stop - start == 1:
            sums.append(_sum_of_pieces(tensors[start], scratch))
        else:
            sums += _sums_of_run(tensors[start:stop], slots[start:stop], scratch)
    return torch.stack(sums)


def _sum_of_pieces(x: Tensor, scratch: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start, length in ranges(x.numel()):
        wide = scratch[:length].copy_(x[start : start + length])
        total += torch.dot(wide, wide)
    return total


def _sums_of_run(tensors: Sequence[Tensor], slots: Sequence[int], scratch: Tensor) -> list[Tensor]:
    views = scratch[: sum(slots)].split_with_sizes(slots)
    # a slice costs as much as the product of a small tensor: only where the slot is longer
    wide = [
        view if slot == x.numel() else view[: x.numel()] for view, slot, x in zip(views, slots, tensors, strict=True)
    ]
    copy_all_(wide, tensors)
    return [torch.dot(x, x) for x in wide]


def sums_of_squares_triton(tensors: Sequence[Tensor]) -> Tensor:
    """Two launches: a partial sum for every PER_PROGRAM elements, then each tensor's partial sums in one program."""
    rows: list[tuple[int, ...]] = []
    num_programs = 0
    for x in tensors:
        ptr, numel = x.data_ptr(), x.numel()
        rows.append((ptr, numel, num_programs, _DTYPE_KINDS[x.dtype] + (_UNALIGNED if ptr % 16 else 0)))
        num_programs += cdiv(numel, PER_PROGRAM)
    device = tensors[0].device
    table = to_device(rows, device)
    partials = torch.empty(num_programs, dtype=torch.float64, device=device)
    sums = torch.empty(len(rows), dtype=torch.float64, device=device)
    # fused: a square of bf16, fp16 or fp32 is exact in fp64, so one rounding less changes no bit and costs half as much
    sizes: dict[str, Any] = {"PER_PROGRAM": PER_PROGRAM, "COLUMNS": NUM_COLUMNS}
    with on_device(table):
        if num_programs:
            square_tensors[(num_programs,)](
                table, partials, len(rows), BLOCK=BLOCK, **sizes, num_warps=4, enable_fp_fusion=True
            )
        add_partials[(len(rows),)](table, partials, sums, BLOCK=PARTIALS, **sizes, num_warps=4, enable_fp_fusion=False)
    return sums


@jit
def _squares(source, length, BLOCK: constexpr):
    """[BLOCK] fp64: at ``j`` the squares of the elements ``j``, ``j + BLOCK``, ... below ``length``, added in order."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start + BLOCK <= length:  # no mask: 128-bit loads
        wide = tl.load(source + start + at).to(tl.float64)
        total += wide * wide
        start += BLOCK
    wide = tl.load(source + start + at, mask=at < length - start, other=0.0).to(tl.float64)
    return total + wide * wide


@jit
def _squares_of(ptr, start, length, is_aligned, DTYPE: constexpr, BLOCK: constexpr):
    # a pointer of its own in each branch: tl.multiple_of marks the very value that it is given, for all its uses
    if is_aligned:
        total = _squares(tl.multiple_of(ptr.to(tl.pointer_type(DTYPE)), 16) + start, length, BLOCK)
    else:
        total = _squares(ptr.to(tl.pointer_type(DTYPE)) + start, length, BLOCK)
    return total


@kernel("num_tensors")
def square_tensors(table, partials, num_tensors, BLOCK: constexpr, PER_PROGRAM: constexpr, COLUMNS: constexpr):
    program = tl.program_id(0)
    row = find_row(table, num_tensors, program, 2, COLUMNS)
    ptr = tl.load(row)
    start = (program - tl.load(row + 2)) * PER_PROGRAM
    length = tl.minimum(tl.load(row + 1) - start, PER_PROGRAM).to(tl.int32)
    kind = tl.load(row + 3)
    is_aligned = kind < 4
    if kind % 4 == 0:
        total = _squares_of(ptr, start, length, is_aligned, tl.float32, BLOCK)
    elif kind % 4 == 1:
        total = _squares_of(ptr, start, length, is_aligned, tl.bfloat16, BLOCK)
    elif kind % 4 == 2:
        total = _squares_of(ptr, start, length, is_aligned, tl.float16, BLOCK)
    else:
        total = _squares_of(ptr, start, length, is_aligned, tl.float64, BLOCK)
    # after all branches: one tree of additions, whatever layout the loads of a dtype and an alignment have
    tl.store(partials + program, tl.sum(total))


@kernel()
def add_partials(table, partials, sums, BLOCK: constexpr, PER_PROGRAM: constexpr, COLUMNS: constexpr):
    row = table + tl.program_id(0) * COLUMNS
    num_partials = tl.cdiv(tl.load(row + 1), PER_PROGRAM).to(tl.int32)
    partials += tl.load(row + 2)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start < num_partials:
        total += tl.load(partials + start + at, mask=at < num_partials - start, other=0.0)
        start += BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total))
