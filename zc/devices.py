"""What zc asks of a device, whatever it is: CUDA, ROCm, XPU, or one that a package adds to torch."""

from __future__ import annotations

import torch


def has_streams(device: torch.device) -> bool:
    """Whether torch has streams of this device that run beside each other, as zc's schedules need. MPS has one for
    all, and a device that is no accelerator of torch has none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    try:
        return torch.Stream(device) != torch.accelerator.current_stream(device)
    except RuntimeError:  # NotImplementedError is one
        return False


def is_cuda(device: torch.device) -> bool:
    """CUDA or ROCm. They alone page-lock memory in place, and run Triton kernels as zc launches them."""
    return device.type == "cuda"


def accelerator_type() -> str:
    """The type of device beside the CPU; "cuda" where torch knows none."""
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def allocated_nbytes(device: torch.device) -> int:
    """The bytes of all tensors on the device."""
    return int(torch.get_device_module(device).memory_allocated(device))


def free_nbytes(device: torch.device) -> int:
    """The bytes that can still be allocated on the device."""
    return int(torch.get_device_module(device).mem_get_info(device)[0])
