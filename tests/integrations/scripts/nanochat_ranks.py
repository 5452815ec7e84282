"""``nanochat_ranks.py script ...``: runs a script of nanochat's as one of torchrun's ranks on a CPU.

nanochat makes a process group on GPUs only. Where its own optimizer is to communicate over gloo (``NANOCHAT_FUTURES``),
works get futures, which gloo's have not and the optimizer waits for.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Done:
    def __init__(self, work: Any) -> None:
        work.wait()

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def waiting(call: Callable[..., Any]) -> Callable[..., Done]:
    return lambda *args, **kwargs: Done(call(*args, **kwargs))


class Gloo:
    all_reduce = staticmethod(waiting(dist.all_reduce))
    reduce_scatter_tensor = staticmethod(waiting(dist.reduce_scatter_tensor))
    all_gather_into_tensor = staticmethod(waiting(dist.all_gather_into_tensor))

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if "NANOCHAT_FUTURES" in os.environ:
        import nanochat.optim

        nanochat.optim.dist = Gloo()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
