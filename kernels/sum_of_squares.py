# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``sum_of_squares``: this rank's part of a gradient norm.

Bytes moved: [N] read once, and 8 KB of partial sums. 128-bit loads where ``x`` starts at 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_dtype, check_flat
from zc.kernels._chunks import ranges, scratch_like
from zc.kernels._triton import cdiv, constexpr, jit, on_device, tl, use_triton

__all__ = ["sum_of_squares", "sum_of_squares_triton", "sum_of_squares_twin"]

BLOCK = 1024
NUM_PARTIALS = 1024  # fixed, not the number of processors: the order of additions is the same on every GPU


@torch.no_grad()
def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of ``x[i] ** 2``, a 0-d float64 tensor on the device of ``x``; each element is read once.

    float64 because a square of an fp32 number is exact in it: no overflow at |x| > 1.8e19, and the rounding of the sum
    is some 1e-13, far below what clipping or an all-reduce in another order could show. One order of additions for one
    size: deterministic, without atomics. inf and NaN come through.

    Args:
        x: [N] bf16, fp16, fp32 or fp64, contiguous; N may be 0.

    Raises:
        ValueError: a wrong dtype or layout.
    """
    check_dtype("x", x, FLOATS)
    check_flat("x", x)
    return sum_of_squares_triton(x) if use_triton(x) else sum_of_squares_twin(x)


def sum_of_squares_twin(x: Tensor) -> Tensor:
    """The same in torch: pieces widened in cache, a dot product each, added in order."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    scratch = scratch_like(x, torch.float64)
    for start, length in ranges(x.numel()):
        wide = scratch[:length].copy_(x[start : start + length])
        total += torch.dot(wide, wide)
    return total


def sum_of_squares_triton(x: Tensor) -> Tensor:
    """Two launches: partial sums of every NUM_PARTIALS-th block, then their sum in one program."""
    total = torch.empty((), dtype=torch.float64, device=x.device)
    num_partials = max(1, min(NUM_PARTIALS, cdiv(x.numel(), BLOCK)))
    partials = torch.empty(num_partials, dtype=torch.float64, device=x.device)
    with on_device(x):
        square_blocks[(num_partials,)](x, partials, x.numel(), BLOCK=BLOCK, num_warps=4)
        add_partials[(1,)](partials, total, num_partials, BLOCK=NUM_PARTIALS, num_warps=4)
    return total


@jit
def square_blocks(x, partials, numel, BLOCK: constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    while start + BLOCK <= numel:  # no mask: 128-bit loads
        wide = tl.load(x + start + at).to(tl.float64)
        total += wide * wide
        start += step
    wide = tl.load(x + start + at, mask=at < numel - start, other=0.0).to(tl.float64)
    tl.store(partials + tl.program_id(0), tl.sum(total + wide * wide))


@jit
def add_partials(partials, total, num_partials, BLOCK: constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(total, tl.sum(tl.load(partials + at, mask=at < num_partials, other=0.0)))
