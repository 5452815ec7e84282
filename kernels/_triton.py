"""The one place that imports Triton. Without it every kernel is its torch reference, and ``why_reference`` says why."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
_import_error: str | None = None
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except Exception as error:  # noqa: BLE001  a broken install (no compiler, wrong driver) raises more than ImportError
    triton, _import_error = None, f"{type(error).__name__}: {error}"

# Kernels annotate compile-time parameters with this name. Others stay bare: Triton reads annotations as its types.
if TYPE_CHECKING:
    constexpr: TypeAlias = Any  # noqa: PYI042  the interpreter knows only this spelling
else:
    constexpr = getattr(tl, "constexpr", None)


def jit(function: Callable[..., Any], counts: Sequence[str] = ()) -> Any:
    """``triton.jit``; without Triton the plain function, which nobody calls. Of ``counts`` nothing is compiled in:
    whether one is 1 or a multiple of 16 makes nothing faster, and each would be a compile of its own."""
    return function if triton is None else triton.jit(function, do_not_specialize=list(counts))


def kernel(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` of what is launched: names its scalars that count something."""
    return functools.partial(jit, counts=counts)


def why_reference() -> str | None:
    """Why the torch references run even where a kernel exists; None where Triton kernels run (tensors on a GPU)."""
    if _import_error is not None:
        return f"triton can't be imported: {_import_error}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm device"
    return None


def note_of(device: torch.device) -> str | None:
    """A note for users of ``device`` where its kernels are slower than need be: why, and what to install."""
    reference = f"every kernel runs as its torch reference on {device}, slower"
    if device.type not in ("cpu", "cuda"):
        return f"{reference}: zc launches its Triton kernels on CUDA and ROCm alone"
    why = why_reference() if device.type == "cuda" else None
    return None if why is None else f"{reference}: {why} (pip install 'zero-compile[triton]')"


def use_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton is not None


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: this makes it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
