"""``adopt_writes``: fp32 masters take what was written into the low-precision weights that were made of them.

Bytes moved where nothing was written, on a CPU: [N] of each read once (bf16: 6 bytes an element); a piece that
differs is read again. On a GPU four of torch's own operations, some 20 bytes per element, and the host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import ranges, scratch_like

__all__ = ["adopt_writes"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def adopt_writes(master: Tensor, given: Tensor, before: Tensor | None = None) -> None:
    """``master = given`` where ``given`` is not ``master`` rounded to its dtype; elsewhere the master keeps its
    precision. With ``before``, where ``given`` is not ``before``.

    A NaN stays a NaN, perhaps with other bits.

    Args:
        master: [N] bf16, fp16, fp32 or fp64, contiguous.
        given: [N] any of these, contiguous, not overlapping ``master``.
        before: as ``given``, and of its dtype.

    Raises:
        ValueError: a dtype, device, layout, size or overlap that breaks the above; nothing has been written.
    """
    check_dtype("master", master, FLOATS)
    check_dtype("given", given, FLOATS)
    check_flat("master", master)
    check_flat("given", given)
    check_numel("master", master, "given", given.numel())
    check_device("master", master, "given", given)
    check_disjoint("master", master, "given", given)
    if before is not None:
        check_dtype("before", before, (given.dtype,))
        check_flat("before", before)
        check_numel("before", before, "given", given.numel())
        check_device("before", before, "given", given)
    if master.device.type != "cpu":  # to ask whether anything differs would wait for the device
        _adopt(master, given, master.to(given.dtype) if before is None else before)
        return
    rounded = scratch_like(given, given.dtype)
    for start, length in ranges(master.numel()):
        mine, theirs = master[start : start + length], given[start : start + length]
        if before is not None:
            cast = before[start : start + length]
        else:
            cast = mine if mine.dtype == theirs.dtype else rounded[:length].copy_(mine)
        if not _same_bits(cast, theirs):
            _adopt(mine, theirs, cast)


def _adopt(master: Tensor, given: Tensor, cast: Tensor) -> None:
    """Four launches on a GPU. As bits: -0.0 over 0.0 is a write, and a NaN may get another NaN's bits."""
    bits = _BITS[given.element_size()]
    torch.where(cast.view(bits).ne(given.view(bits)), given.to(master.dtype), master, out=master)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """As few words as possible: torch.equal takes the same time for a word of 8 bytes as for one of 2."""
    offsets = (tensor.storage_offset() * tensor.element_size() for tensor in (one, other))
    is_whole = not any(nbytes % 8 for nbytes in (one.nbytes, *offsets))  # else view() refuses
    width = 8 if is_whole else one.element_size()
    return torch.equal(one.view(_BITS[width]), other.view(_BITS[width]))
