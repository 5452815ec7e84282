"""Two ranks on one GPU, over NCCL or over gloo, that do one job after another, each in a group of its own: to start
the processes takes half a minute.

NCCL refuses two ranks of one host on one device ("Duplicate GPU detected"). NCCL_HOSTID makes each rank a host of its
own to it, and they exchange over sockets on the loopback: slow, but communicators, streams and kernels are NCCL's own.
gloo copies through host memory. To zc both ranks are on one host in either case.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


class TwoRanks:
    """Both are started with the first job, and anew after one that has failed, or had no end in ``limit_s``."""

    def __init__(self, backend: str, limit_s: float) -> None:
        self.backend, self.limit_s = backend, limit_s
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``job(rank, *args)`` returns on each rank."""
        end = time.monotonic() + self.limit_s
        if not self._ranks:
            self._start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        for _, connection in self._ranks:
            connection.send((store, job, args))
        results, texts = [], []
        for rank, (_, connection) in enumerate(self._ranks):
            # once one has failed, the other one may wait for it for ever
            if not connection.poll(1.0 if texts else max(0.1, end - time.monotonic())):
                texts.append(f"rank {rank}: no end in {self.limit_s:.0f} s")
                continue
            try:
                is_done, result = connection.recv()
            except EOFError:
                is_done, result = False, "its process has ended"
            results.append(result)
            texts += [] if is_done else [f"rank {rank}: {result}"]
        if texts:
            self.close()
            pytest.fail("\n".join(texts))
        return results

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.backend, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks.clear()


def _serve(rank: int, backend: str, connection: Connection) -> None:
    os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"zc-{rank}")
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    while True:
        store, job, args = connection.recv()
        try:
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
            result = job(rank, *args)
            dist.destroy_process_group()
        except Exception:  # noqa: BLE001  (the test shows it, and ends both ranks)
            connection.send((False, traceback.format_exc()))
            return
        connection.send((True, result))
        del job, args
        torch.compiler.reset()  # each job compiles as in a fresh process
        gc.collect()
