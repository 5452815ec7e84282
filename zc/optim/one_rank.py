"""`torch.distributed` as a job of one rank sees it, for an optimizer that communicates in its own ``step``.

Under zc, the gradients that ``step`` reads are already reduced, and each rank updates different parameters. So an
optimizer that would reduce them again must run as in a single process. If its class has no such variant, give the
module that defines it this object instead of torch.distributed, before `zc.compile`::

    import nanochat.optim
    nanochat.optim.dist = zc.one_rank

Nothing else in the process changes. zc averages gradients over the ranks, as DDP does; if the optimizer sums them,
adjust the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Finished:
    """The completed work of a collective with ``async_op=True``."""

    def __init__(self, result: Any) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _collective(out: str, source: str = "") -> Callable[..., Finished | None]:
    """One whose first arguments have these names, each a tensor or a list of one: ``out`` becomes what ``source`` has;
    without that it stays as it is."""

    @torch.no_grad()
    def run(_: OneRank, *args: Any, async_op: bool = False, **kwargs: Any) -> Finished | None:
        tensors = {**dict(zip((out, source), args, strict=False)), **kwargs}
        result, value = (
            item if isinstance(item, Tensor) else item[0] for item in (tensors[out], tensors[source or out])
        )
        if source:
            result.copy_(value.view_as(result))
        return Finished([result]) if async_op else None

    return run


class OneRank:
    """The queries and collectives of torch.distributed in a group of one rank. Types and constants, such as ReduceOp,
    come from torch.distributed; any other function raises AttributeError."""

    all_reduce = broadcast = reduce = _collective("tensor")
    all_gather = _collective("tensor_list", "tensor")
    reduce_scatter = _collective("output", "input_list")
    all_gather_into_tensor = all_gather_single = _collective("output_tensor", "input_tensor")  # and torch 2.13's name
    reduce_scatter_tensor = reduce_scatter_single = all_to_all_single = _collective("output", "input")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return 1

    def barrier(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Finished | None:
        return Finished(None) if async_op else None

    def __getattr__(self, name: str) -> Any:
        value = getattr(dist, name)
        if callable(value) and not isinstance(value, type):
            raise AttributeError(f"zc.one_rank has no {name}: call it under `if dist.get_world_size() > 1`")
        return value


one_rank = OneRank()
