"""Host memory that a device copies from and to: pinned in place.

Ordinary memory is registered with the driver. ``pin_memory=True`` would take it from PyTorch's caching host allocator,
which rounds a block up to a power of two: as much as twice of what is asked for, where memory is what offload is about.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """Allocates tensors in host memory that ``device`` can copy from and to without blocking the host.

    For a GPU each has pages of its own: tensors from the heap share their first and last page with others, and the
    driver registers no page twice. What is page-locked here stays so until this object goes; the tensors may live on
    as ordinary ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: list[Tensor] = []  # held until they are unlocked: their addresses must not be anyone else's
        self.note: str | None = None  # why what was made last is pageable
        weakref.finalize(self, _unlock, self._locked, os.getpid()).atexit = False  # the process ends: the driver's part

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] of zeros; page-locked where the device is a GPU and its driver agrees, else `note` says why not."""
        if self._device.type != "cuda" or not numel:
            return torch.zeros(numel, dtype=dtype)
        made = _pages(numel, dtype)
        if self.note is None:
            with torch.cuda.device(self._device):
                # portable (1): every device of this process may copy from it
                code = _runtime().cudaHostRegister(made.data_ptr(), made.nbytes, 1)
                if int(code):
                    self.note = self._refused(made.nbytes, code)
                else:
                    self._locked.append(made)
        return made

    def _refused(self, nbytes: int, code: Any) -> str:
        """The driver keeps its error for the next launch of a kernel, and that would raise it: one is made here."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        before = sum(tensor.nbytes for tensor in self._locked)
        return (
            f"offload: the driver does not page-lock {nbytes:,} bytes of host memory beside {before:,} that are: error "
            f"{int(code)}, {_runtime().cudaGetErrorString(code)}. Copies from and to what is left pageable block the "
            "host and overlap nothing; a low `ulimit -l` is one reason"
        )


def _pages(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] of zeros on pages that nothing else is on. No child gets them at a fork: this process's next write would
    go to a copy, which the device does not know."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=dtype)  # holds the pages


def _unlock(tensors: list[Tensor], process: int) -> None:
    for tensor in tensors if os.getpid() == process else ():  # a fork has neither the pages nor the device
        _runtime().cudaHostUnregister(tensor.data_ptr())
    tensors.clear()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
