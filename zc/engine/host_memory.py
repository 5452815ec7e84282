"""Host memory that a device copies from and to, page-locked in place.

This module allocates ordinary memory and registers it with the driver. ``pin_memory=True`` would use PyTorch's caching
host allocator, which rounds a block up to a power of two: up to twice the memory, and offload exists to save memory.
Other devices than CUDA's and ROCm's have that one, which keeps a block while copies use it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from zc.devices import is_cuda

_Locked = list[tuple[torch.device, Tensor]]
# Page-locked memory of models that were dropped. The garbage collector adds to it, in any thread, perhaps while another
# one captures a CUDA graph, so it must not call CUDA. Copies of the model may still be queued: the memory lives until
# the calling thread empties the list in `unlock_dropped`.
_DROPPED: _Locked = []


class HostMemory:
    """Allocates tensors in host memory that ``device`` can copy from and to without blocking the host.

    For a GPU each tensor has pages of its own: tensors from the heap share their first and last page with others, and
    the driver registers no page twice. The pages stay locked until `unlock`; the tensors may live on as ordinary ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: _Locked = []
        self.note: str | None = None  # why the driver refused to lock a tensor; later ones are pageable, too
        unlock_dropped()
        # when the process ends, the driver unlocks everything
        weakref.finalize(self, _drop, self._locked, os.getpid()).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] of zeros, page-locked if the device is a GPU and its driver agrees; `note` says why it does not."""
        if self._device.type == "cpu" or not numel:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        if not is_cuda(self._device):
            self.note = (
                f"offload: host memory for {self._device} is pinned by PyTorch's allocator, which may round each block "
                "up to a power of two. zc page-locks memory in place on CUDA and ROCm alone"
            )
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        tensor = _pages(numel, dtype)
        if self.note is None:
            with torch.cuda.device(self._device):
                # portable (1): every device of this process may copy from it
                code = _runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)
                if int(code):
                    self.note = self._refused(tensor.nbytes, code)
                else:
                    self._locked.append((self._device, tensor))
        return tensor

    def unlock(self) -> None:
        """Unlocks all pages. The caller has waited for the copies."""
        _unlock(self._locked)

    def _refused(self, nbytes: int, code: Any) -> str:
        """Clears the driver's error, which the next kernel launch would raise, by a launch of its own."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        before = sum(tensor.nbytes for _, tensor in self._locked)
        return (
            f"offload: the driver does not page-lock {nbytes:,} bytes of host memory after {before:,} bytes: error "
            f"{int(code)}, {_runtime().cudaGetErrorString(code)}. Copies from and to pageable memory block the host "
            "and overlap nothing; a low `ulimit -l` is one reason"
        )


def unlock_dropped() -> None:
    """Unlocks the memory of models that the program has dropped, when the device has done its copies."""
    dropped = [_DROPPED.pop() for _ in range(len(_DROPPED))]
    for device in {device for device, _ in dropped}:
        torch.cuda.synchronize(device)
    _unlock(dropped)


def _pages(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] of zeros on pages of their own. They are shared with forked processes: after a fork of private pages, the
    next write of this process would go to a copy that the device does not know."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)  # holds the pages


def _drop(locked: _Locked, process: int) -> None:
    if os.getpid() == process:  # the registrations are not a forked process's
        _DROPPED.extend(locked)


def _unlock(locked: _Locked) -> None:
    while locked:
        _, tensor = locked.pop()
        _runtime().cudaHostUnregister(tensor.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
