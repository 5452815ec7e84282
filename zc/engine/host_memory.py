"""Host memory that a device copies from and to: pinned in place.

Ordinary memory is registered with the driver. ``pin_memory=True`` would take it from PyTorch's caching host allocator,
which rounds a block up to a power of two: as much as twice of what is asked for, where memory is what offload is about.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """Allocates tensors in host memory that ``device`` can copy from and to without blocking the host.

    What is page-locked here stays so until this object goes; the tensors may live on as ordinary ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: list[Tensor] = []  # held until they are unlocked: their addresses must not be anyone else's
        weakref.finalize(self, _unlock, self._locked)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] of zeros; page-locked where the device is a GPU.

        Raises RuntimeError where the driver refuses (``ulimit -l`` is one reason).
        """
        made = torch.zeros(numel, dtype=dtype)
        if self._device.type == "cuda" and numel:
            with torch.cuda.device(self._device):
                # portable (1): every device of this process may copy from it
                code = _runtime().cudaHostRegister(made.data_ptr(), made.untyped_storage().nbytes(), 1)
            torch.cuda.check_error(int(code))
            self._locked.append(made)
        return made


def _unlock(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        _runtime().cudaHostUnregister(tensor.data_ptr())
    tensors.clear()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
