# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``copy_writes``: copies what was written into low-precision weights to the fp32 masters that they were made of.

Bytes moved where nothing was written: [N] of each read once (bf16: 6 bytes per element). On a CPU a piece that differs
is read again. On a GPU all tensors are one launch, and the host does not wait; a table on the device has a row of
int64 per tensor: the addresses of master, weights and what they were before, elements, and the first program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels._common import (
    FLOATS,
    cdiv,
    check_alike,
    check_disjoint,
    check_dtype,
    check_flat,
    constexpr,
    kernel,
    on_device,
    ranges,
    scratch_like,
    tl,
    use_triton,
    without_grad,
)
from zc.kernels._slots import find_row, to_device

BLOCK = 2048
NUM_COLUMNS = 5
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = (torch.bfloat16, torch.float16)


@without_grad
def copy_writes(masters: Sequence[Tensor], weights: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> None:
    """``masters[i] = weights[i]`` where ``weights[i]`` is not ``masters[i]`` rounded to its dtype; elsewhere a master
    keeps its precision. With ``before``, where ``weights[i]`` is not ``before[i]``.

    A NaN stays a NaN, perhaps with other bits.

    Args:
        masters: [N] each, bf16, fp16, fp32 or fp64, contiguous.
        weights: as many; [N] any of these, contiguous, none overlapping its master.
        before: as ``weights``, and of their dtypes.

    Raises:
        ValueError: a dtype, device, layout, size or overlap that breaks the above; nothing has been written.
    """
    for k, (master, weight) in enumerate(zip(masters, weights, strict=True)):
        check_dtype(f"masters[{k}]", master, FLOATS)
        check_flat(f"masters[{k}]", master)
        check_alike(f"weights[{k}]", weight, FLOATS, f"masters[{k}]", master)
        check_disjoint(f"masters[{k}]", master, f"weights[{k}]", weight)
        if before is not None:
            check_alike(f"before[{k}]", before[k], (weight.dtype,), f"weights[{k}]", weight)
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for k, (master, weight) in enumerate(zip(masters, weights, strict=True)):
        groups.setdefault((master.device, master.dtype, weight.dtype), []).append(k)
    for (_, wide, narrow), members in groups.items():
        of_group = [masters[k] for k in members], [weights[k] for k in members]
        old = None if before is None else [before[k] for k in members]
        if use_triton(of_group[0][0]) and wide == torch.float32 and narrow in _NARROW:
            copy_writes_triton(*of_group, old)
        else:
            copy_writes_reference(*of_group, old)


def copy_writes_reference(
    masters: Sequence[Tensor], weights: Sequence[Tensor], before: Sequence[Tensor] | None
) -> None:
    """The same in torch: on a CPU piece by piece, on a device four operations a tensor, which wait for nothing."""
    for k, (master, weight) in enumerate(zip(masters, weights, strict=True)):
        old = None if before is None else before[k]
        if master.device.type != "cpu":  # to ask whether anything differs would wait for the device
            _copy_where(master, weight, master.to(weight.dtype) if old is None else old)
        else:
            _copy_pieces(master, weight, old)


def _copy_pieces(master: Tensor, weights: Tensor, before: Tensor | None) -> None:
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
    """Copies what differs from ``old``. As bits, since -0.0 over 0.0 is a write, and a NaN may get another NaN's
    bits."""
    bits = _BITS[weights.element_size()]
    torch.where(old.view(bits).ne(weights.view(bits)), weights.to(master.dtype), master, out=master)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors of one dtype are equal bit by bit; of a device the host waits for it. As few words as
    possible: torch.equal takes the same time for a word of 8 bytes as for one of 2."""
    offsets = (tensor.storage_offset() * tensor.element_size() for tensor in (one, other))
    is_whole = not any(nbytes % 8 for nbytes in (one.nbytes, *offsets))  # else view() refuses
    bits = _BITS[8] if is_whole else _BITS.get(one.element_size(), torch.uint8)
    return torch.equal(one.view(bits), other.view(bits))


def copy_writes_triton(masters: Sequence[Tensor], weights: Sequence[Tensor], before: Sequence[Tensor] | None) -> None:
    """One launch. Masters are fp32, weights all bf16 or all fp16."""
    rows: list[list[int]] = []
    num_programs = 0
    for master, weight, old in zip(masters, weights, weights if before is None else before, strict=True):
        rows.append([master.data_ptr(), weight.data_ptr(), old.data_ptr(), master.numel(), num_programs])
        num_programs += cdiv(master.numel(), BLOCK)
    if not num_programs:
        return
    table = to_device(rows, masters[0].device)
    with on_device(table):
        copy_rows[(num_programs,)](
            table, len(rows), IS_BF16=weights[0].dtype == torch.bfloat16, HAS_BEFORE=before is not None,
            BLOCK=BLOCK, COLUMNS=NUM_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@kernel("num_rows")
def copy_rows(table, num_rows, IS_BF16: constexpr, HAS_BEFORE: constexpr, BLOCK: constexpr, COLUMNS: constexpr):
    program = tl.program_id(0)
    row = find_row(table, num_rows, program, 4, COLUMNS)
    narrow: constexpr = tl.bfloat16 if IS_BF16 else tl.float16
    at = (program - tl.load(row + 4)) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(row + 3)
    master = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    weights = tl.load(tl.load(row + 1).to(tl.pointer_type(narrow)) + at, mask=mask)
    if HAS_BEFORE:
        old = tl.load(tl.load(row + 2).to(tl.pointer_type(narrow)) + at, mask=mask)
    else:
        old = tl.load(master, mask=mask).to(narrow)
    # as bits, since -0.0 over 0.0 is a write
    is_written = weights.to(tl.int16, bitcast=True) != old.to(tl.int16, bitcast=True)
    tl.store(master, weights.to(tl.float32), mask=mask & is_written)
