"""Sizes and pieces of the references: work cut so that every temporary stays in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements of one piece. 1 MB of fp32: the piece in use stays in L2 or L3, and a torch call on it (some 50 us) dwarfs
# its dispatch and the Python around it (5 us). bench/kernels.py --sweep: 2^16 takes up to twice as long as 2^18, more
# gains nothing.
CHUNK = 1 << 18


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


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of consecutive items that fit one piece together; an item longer than that is alone."""
    start, used = 0, 0
    for i, length in enumerate(lengths):
        if i > start and used + length > CHUNK:
            yield start, i
            start, used = i, 0
        used += length
    if lengths:
        yield start, len(lengths)


def pieces(dst: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of pieces (dst, grad) of one shape, in order; ``dst`` is contiguous, ``grad`` of its shape may be strided.

    A strided gradient is cut along its first dimension only, so that a piece is a view of it, never a copy.
    """
    if grad.numel() <= CHUNK:
        yield dst, grad
        return
    if grad.is_contiguous():
        dst, grad = dst.view(-1), grad.view(-1)
    num_rows = max(1, CHUNK // (grad.numel() // grad.shape[0]))
    yield from zip(torch.split(dst, num_rows), torch.split(grad, num_rows), strict=True)
