"""What zc tells a GPU, written down: stand-ins for the driver, for streams, for the allocator, and for NCCL's group.

They go where torch has its own, so that zc's code runs as it is, on CPU tensors.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any

import pytest
import torch
from torch import Tensor

PAGE = 4096


class CudaError(enum.IntEnum):
    """Codes of the runtime, with cuda's numbers."""

    SUCCESS = 0
    MEMORY_ALLOCATION = 2
    ALREADY_REGISTERED = 712
    NOT_REGISTERED = 713


class Driver:
    """``torch.cuda.cudart()``: what is page-locked, by address, and the error that the next launch would raise."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}
        self.pending = CudaError.SUCCESS
        self.calls: list[str] = []  # by which memory goes

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> CudaError:
        pages = _pages(address, nbytes)
        if any(not pages.isdisjoint(_pages(*other)) for other in self.locked.items()):
            self.pending = CudaError.ALREADY_REGISTERED
        elif sum(self.locked.values()) + nbytes > self.limit:
            self.pending = CudaError.MEMORY_ALLOCATION
        else:
            self.locked[address] = nbytes
            return CudaError.SUCCESS
        return self.pending

    def cudaHostUnregister(self, address: int) -> CudaError:
        self.calls.append("unregister")
        if self.locked.pop(address, None) is None:
            self.pending = CudaError.NOT_REGISTERED
        return self.pending

    def cudaGetErrorString(self, code: CudaError) -> str:
        return code.name.lower()

    def launch(self) -> None:
        error, self.pending = self.pending, CudaError.SUCCESS
        if error:
            raise RuntimeError(f"CUDA error: {error.name.lower()}")

    def is_locked(self, tensor: Tensor) -> bool:
        first, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(a <= first and stop <= a + n for a, n in self.locked.items())


def _pages(address: int, nbytes: int) -> frozenset[int]:
    return frozenset(range(address // PAGE, (address + nbytes - 1) // PAGE + 1))


def install_driver(patch: pytest.MonkeyPatch, driver: Driver) -> None:
    """``driver`` is torch's from here on, and a factory's tensor on a GPU is one on the CPU, made by a launch."""
    plain = torch.ones

    def ones(*size: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            driver.launch()
            device = None
        return plain(*size, device=device, **options)

    patch.setattr(torch, "ones", ones)
    patch.setattr(torch.cuda, "cudart", lambda: driver)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(torch.cuda, "synchronize", lambda device: driver.calls.append(f"synchronize {device}"))
