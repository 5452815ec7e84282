"""``copy_writes``: copies what was written into low-precision weights to the fp32 masters that they were made of.

Bytes moved where nothing was written, on a CPU: [N] of each read once (bf16: 6 bytes per element); a piece that
differs is read again. On a GPU four of torch's own operations, some 20 bytes per element, and the host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_alike, check_disjoint, check_dtype, check_flat
from zc.kernels._chunks import ranges, scratch_like

__all__ = ["copy_writes"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def copy_writes(master: Tensor, weights: Tensor, before: Tensor | None = None) -> None:
    """``master = weights`` where ``weights`` is not ``master`` rounded to its dtype; elsewhere the master keeps its
    precision. With ``before``, where ``weights`` is not ``before``.

    A NaN stays a NaN, perhaps with other bits.

    Args:
        master: [N] bf16, fp16, fp32 or fp64, contiguous.
        weights: [N] any of these, contiguous, not overlapping ``master``.
        before: as ``weights``, and of its dtype.

    Raises:
        ValueError: a dtype, device, layout, size or overlap that breaks the above; nothing has been written.
    """
    check_dtype("master", master, FLOATS)
    check_flat("master", master)
    check_alike("weights", weights, FLOATS, "master", master)
    check_disjoint("master", master, "weights", weights)
    if before is not None:
        check_alike("before", before, (weights.dtype,), "weights", weights)
    if master.device.type != "cpu":  # to ask whether anything differs would wait for the device
        _copy_where(master, weights, master.to(weights.dtype) if before is None else before)
        return
    rounded = scratch_like(weights, weights.dtype)
    for start, length in ranges(master.numel()):
        master_piece, piece = master[start : start + length], weights[start : start + length]
        if before is not None:
            old = before[start : start + length]
        else:
            old = master_piece if master.dtype == weights.dtype else rounded[:length].copy_(master_piece)
        if not same_bits(old, piece):
            _copy_where(master_piece, piece, old)


def _copy_where(master: Tensor, weights: Tensor, old: Tensor) -> None:
    """Copies what differs from ``old``: four launches on a GPU. As bits, since -0.0 over 0.0 is a write, and a NaN may
    get another NaN's bits."""
    bits = _BITS[weights.element_size()]
    torch.where(old.view(bits).ne(weights.view(bits)), weights.to(master.dtype), master, out=master)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors of one dtype are equal bit by bit; of a device the host waits for it. As few words as
    possible: torch.equal takes the same time for a word of 8 bytes as for one of 2."""
    offsets = (tensor.storage_offset() * tensor.element_size() for tensor in (one, other))
    is_whole = not any(nbytes % 8 for nbytes in (one.nbytes, *offsets))  # else view() refuses
    bits = _BITS[8] if is_whole else _BITS.get(one.element_size(), torch.uint8)
    return torch.equal(one.view(bits), other.view(bits))
