"""Host memory that a device copies from and to: pinned in place, and counted before it is taken; page faults.

Ordinary memory is registered with the driver. ``pin_memory=True`` would take it from PyTorch's caching host allocator,
which rounds a block up to a power of two: as much as twice of what is asked for, where memory is what offload is about.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zc.errors import PlanError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


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


def available_nbytes() -> int | None:
    """Bytes of memory that this machine, or the container that we are in, can still give; None where nobody says."""
    found: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for limit, used in _CGROUPS:
        if Path(limit).exists() and Path(used).exists() and (text := Path(limit).read_text().strip()).isdigit():
            found.append(max(0, int(text) - int(Path(used).read_text())))
    return min(found) if found else None


def num_page_faults() -> int | None:
    """Pages that this process has taken from the system since it began, those among them that malloc had given back
    before; None where the system does not count them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource is not None else None


def ranks_on_this_host(world_size: int) -> int:
    """How many ranks share this machine's memory and processors: torchrun says it, else all of them."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(local), world_size) if local.isdigit() and int(local) > 0 else world_size


def num_threads(world_size: int) -> int:
    """Threads for a rank's updates: the processors that this process may use, divided among the ranks here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_on_this_host(world_size))


def check_room(needed: Mapping[str, int], num_ranks: int, available: int | None) -> None:
    """Raises PlanError, with both figures, where ``num_ranks`` times the bytes ``needed`` by kind do not fit."""
    total = num_ranks * sum(needed.values())
    if available is not None and total > available:
        kinds = ", ".join(f"{name} {nbytes:,}" for name, nbytes in needed.items() if nbytes)
        raise PlanError(
            f"offload needs {total:,} bytes of host memory for {num_ranks} rank(s) on this machine ({kinds} for each), "
            f"and {available:,} are available: use more machines, or a smaller part (offload_accumulate='device')"
        )
