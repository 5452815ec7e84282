"""Sizes and pieces of the twins: work cut so that every temporary stays in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of one piece: three fp32 pieces (two inputs, one output) fit a core's L2 of 1 MB, and one torch call on a
# piece (about 20 us) still dwarfs its dispatch (1 us). bench/kernels.py --sweep shows the flat optimum.
CHUNK = 1 << 16


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: fp64 where one operand is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def scratch_like(flat: Tensor, dtype: torch.dtype, numel: int | None = None) -> Tensor:
    """One piece of uninitialised memory on the device of ``flat``, no longer than needed."""
    return torch.empty(min(CHUNK, flat.numel() if numel is None else numel), dtype=dtype, device=flat.device)


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    """[start, length) of each piece of ``numel`` elements."""
    for start in range(0, numel, CHUNK):
        yield start, min(CHUNK, numel - start)


def pieces(dst: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of pieces (dst, grad) of one shape, in order; ``dst`` is the flat slot of ``grad``, which may be strided.

    A strided gradient is cut along its first dimension only, so that a piece is a view of it, never a copy.
    """
    if grad.is_contiguous():
        grad = grad.view(-1)
    else:
        dst = dst.view(grad.shape)
    if grad.numel() <= CHUNK:
        yield dst, grad
        return
    num_rows = max(1, CHUNK // (grad.numel() // grad.shape[0]))
    yield from zip(torch.split(dst, num_rows), torch.split(grad, num_rows), strict=True)
