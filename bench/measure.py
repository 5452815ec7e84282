"""What a training process can say about itself: memory, versions; and starting such processes with torchrun."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def peak_rss_nbytes() -> int:
    """Largest resident set of this process, in bytes, since it started or since `reset_peak_rss`."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> bool:
    """Starts `peak_rss_nbytes` anew; False where the system can't.

    Pages that malloc only keeps are given back first: what compiling needed is not what a step needs.
    """
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # another libc, no /proc, or it is read-only
        return False
    return True


def storages() -> dict[int, int]:
    """Address -> bytes of every storage that a Python object or a gradient of one holds, each counted once."""
    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():  # some libraries' objects warn when they are looked at
        warnings.simplefilter("ignore")
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    for tensor in tensors:
        parts = [tensor] if tensor.grad is None or not tensor.is_leaf else [tensor, tensor.grad]
        for part in parts:
            local = part.to_local() if hasattr(part, "to_local") else part
            try:
                storage = local.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # fake tensors and wrappers have no storage of their own
                continue
    found.pop(0, None)  # freed, or a meta tensor's
    return found


def live_nbytes(before: Mapping[int, int]) -> int:
    """Bytes of tensors that live now and did not in ``before`` (`storages`)."""
    return sum(n for address, n in storages().items() if before.get(address) != n)


def device_name(device: torch.device) -> str:
    """The processor's name, for a row of results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Short commit of the checkout, with + where tracked files differ from it; "unknown" outside of one."""
    try:
        call = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=10"]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """torch, python and zc's commit."""
    return {"torch": str(torch.__version__), "python": platform.python_version(), "commit": commit()}


def launch(module: str, flags: Sequence[str], *, ranks: int, env: Mapping[str, str] | None = None) -> None:
    """``python -m module flags`` on ``ranks`` processes of one thread each; raises CalledProcessError if one fails."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    if sys.platform == "linux":
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo else looks the host's name up, which may not resolve
    torchrun = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    command = [sys.executable, *torchrun, "--nproc_per_node", str(ranks), "-m", module, *flags]
    subprocess.run(command, env=variables, cwd=ROOT, check=True)
