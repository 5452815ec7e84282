"""``python -m zc``: versions, devices and distributed backends, for a bug report.

``python -m zc check script.py:make``: whether a loop does on several ranks what it does on one device (docs/check.md).
``python -m zc diff FOLDER``: the last calls of ranks that differ, side by side (docs/diverged.md).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch
import torch.distributed as dist

import zc


def report() -> dict[str, str]:
    """What decides how zc runs here, by name."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none (every kernel runs as its torch reference; pip install 'zero-compile[triton]')"
    devices = [f"cpu ({len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores)"]
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({props.name}, {props.total_memory / 2**30:.0f} GiB)")
    available = dist.is_available()
    backends = [
        name
        for name, has in (
            ("gloo", available and dist.is_gloo_available()),
            ("nccl", available and dist.is_nccl_available()),
            ("mpi", available and dist.is_mpi_available()),
        )
        if has
    ]
    return {
        "zc": zc.__version__,
        "torch": str(torch.__version__),
        "triton": triton,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "devices": ", ".join(devices),
        "threads": str(torch.get_num_threads()),
        "distributed": ", ".join(backends) or "none",
    }


def main() -> int:
    if sys.argv[1:2] == ["check"]:
        from zc.checking.command import run

        return run(sys.argv[2:])
    if sys.argv[1:2] == ["diff"]:
        from zc.report import diverged

        return diverged.run(sys.argv[2:])
    if sys.argv[1:]:
        print(f"python -m zc has no command {sys.argv[1]!r}: check and diff are two, and alone it prints versions")
        return 2
    for name, value in report().items():
        print(f"{name:>12}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
