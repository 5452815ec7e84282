# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""Tables on the device: one row of int64 a tensor, so that a launch serves any number of tensors.

A column holds the first program of each row, ascending; a program finds its row by a binary search over it (log2 of
the rows, in L1 after a processor's first program). The idea of a table instead of a launch a tensor: apex / PyTorch
multi_tensor_apply; here without its limit of 4 KB of arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.kernels._triton import constexpr, jit, tl


def to_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[len(rows), columns] int64: all that goes to the device, from pinned memory, without a synchronisation."""
    return torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@jit
def find_row(table, num_rows, program, FIRST_PROGRAM: constexpr, COLUMNS: constexpr):
    """The last row whose first program, in column FIRST_PROGRAM, is not after ``program``.

    A row without programs has the first program of the row behind it, so it is never the last.
    """
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(table + middle * COLUMNS + FIRST_PROGRAM) <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return table + low * COLUMNS
