"""Private names of torch that the references use. Kernels import nothing of zc, so these are not in torch_private."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all_(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Each tensor into the one at its place, cast. On CPU a loop of copy_ in C++: 1 us per tensor less than one in
    Python. (``torch._foreach_copy_``, what torch.optim and FSDP2 copy with, 2.1 to 2.15.)"""
    torch._foreach_copy_(list(to), list(tensors))


def add_all_(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Adds each tensor to the one at its place. (``torch._foreach_add_``, as torch.optim uses it, 2.1 to 2.15.)"""
    torch._foreach_add_(list(to), list(tensors))


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of ``flat``, one after another, each of the shape of a tensor (none empty): one call into C++ for all.
    (``torch._utils._unflatten_dense_tensors``, as DDP uses it; torch leaves it untyped.)"""
    views: tuple[Tensor, ...] = torch._utils._unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    return views
