"""This machine: its memory and cores, how many ranks share them, what zc asks of a device, whatever it is: CUDA, ROCm,
XPU, or one that a package adds to torch; and file operations that a crash does not undo.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_AT_CWD, _EXCHANGE = -100, 2  # of Linux's renameat2


def note_of_connections() -> str | None:
    """The note if all streams of a GPU share one hardware queue, or None."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, so a stream that waits for a reduction "
        "can hold up compute that was issued after it. Unset it (the default is 8), or expect less overlap"
    )


def available_nbytes() -> int | None:
    """Bytes of memory that are available on this machine or in this container; None if unknown."""
    limits: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for limit, used in _CGROUPS:
        if Path(limit).exists() and Path(used).exists() and (text := Path(limit).read_text().strip()).isdigit():
            limits.append(max(0, int(text) - int(Path(used).read_text())))
    return min(limits) if limits else None


def resident_nbytes() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except OSError:
        return 0


def ranks_on_this_host(world_size: int) -> int:
    """How many ranks share this machine's memory and processors: torchrun's number, or all ranks."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(local), world_size) if local.isdigit() and int(local) > 0 else world_size


def num_threads(world_size: int) -> int:
    """Threads for a rank's updates: the processors that this process may use, divided among the ranks here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_on_this_host(world_size))


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


# --- file operations that a crash does not undo ---


def sync_folder(path: Path) -> None:
    """Makes the names in the folder durable. In POSIX, fsync of a file does not do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Writes the file, and returns when its content is on the disk. Its name is there after `sync_folder`."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def swap_paths(one: Path, other: Path) -> None:
    """Exchanges two names in one folder, atomically if the system and its file system can. Otherwise in steps: a
    process that is killed between them leaves nothing under ``other``."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, TypeError, AttributeError):
        rename = None
    if rename is not None and rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return
    aside = one.with_name(f"{one.name}.aside")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


def machine_id() -> str:
    """Identifies this boot of this machine; its name where the kernel has no number of the boot. Processes of one
    machine see each other's locks of files."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
