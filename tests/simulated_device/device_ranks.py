"""Jobs on the simulated device: ranks of their own, because a process that has the device keeps it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from device_build import build, why_not
from harness import RankPool, RanksFailed

needs_device = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
_pool: RankPool | None = None


def run_on_device(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``[fn(rank, world_size, *args) for rank in ...]`` by rank, as harness.run_ranks. Each process has the device, and
    its default group has gloo for the CPU's tensors and the simulated group for the device's."""
    global _pool
    build()  # in nobody's time
    if _pool is None:
        _pool = RankPool()
    try:
        store = tempfile.mktemp(dir=_pool.folder)
        return _pool.run(job, world_size, fn, args, store, timeout, timeout=timeout)
    except RanksFailed:
        end_ranks()  # an error of a kernel stays with the process
        raise


def end_ranks() -> None:
    """The next job has processes that nothing has run in."""
    if _pool is not None:
        _pool._rebuild()


def shutdown() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def job(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], store: str, timeout: float) -> Any:
    """In the rank."""
    import simulated
    import torch
    import torch.distributed as dist

    compiled = simulated.install()
    dist.destroy_process_group()
    file = dist.FileStore(store, world_size)
    limit = timedelta(seconds=2 * timeout)
    dist.init_process_group(simulated.BACKENDS, store=file, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier(group=dist.new_group(backend="gloo"))
    torch.accelerator.set_device_index(rank % compiled.num_devices)
    compiled.clear()
    try:
        return fn(rank, world_size, *args)
    finally:
        simulated.synchronize()


if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
