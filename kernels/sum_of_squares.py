"""``sum_of_squares``: this rank's part of a gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_dtype, check_flat
from zc.kernels._chunks import ranges, scratch_like

__all__ = ["sum_of_squares", "sum_of_squares_twin"]


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
    return sum_of_squares_twin(x)


def sum_of_squares_twin(x: Tensor) -> Tensor:
    """The same in torch: pieces widened in cache, a dot product each, added in order."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    scratch = scratch_like(x, torch.float64)
    for start, length in ranges(x.numel()):
        wide = scratch[:length].copy_(x[start : start + length])
        total += torch.dot(wide, wide)
    return total
