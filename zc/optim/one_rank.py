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

from collections.abc import Sequence
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


class OneRank:
    """The queries and collectives of torch.distributed in a group of one rank. Types and constants, such as ReduceOp,
    come from torch.distributed; any other function raises AttributeError."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return 1

    def barrier(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Finished | None:
        return _work(None, async_op)

    def all_reduce(self, tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Finished | None:
        return _work([tensor], async_op)

    broadcast = reduce = all_reduce

    def all_gather(
        self, tensor_list: Sequence[Tensor], tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Finished | None:
        return self.all_gather_into_tensor(tensor_list[0], tensor, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, input_list: Sequence[Tensor], *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Finished | None:
        return self.all_gather_into_tensor(output, input_list[0], async_op=async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Finished | None:
        return self.reduce_scatter_tensor(output_tensor, input_tensor, async_op=async_op)

    @torch.no_grad()
    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        *args: Any,
        async_op: bool = False,
        **kwargs: Any,
    ) -> Finished | None:
        output.copy_(input.view_as(output))
        return _work([output], async_op)

    all_gather_single, reduce_scatter_single = all_gather_into_tensor, reduce_scatter_tensor  # torch 2.13's names
    all_to_all_single = reduce_scatter_tensor

    def __getattr__(self, name: str) -> Any:
        value = getattr(dist, name)
        if callable(value) and not isinstance(value, type):
            raise AttributeError(f"zc.one_rank has no {name}: call it under `if dist.get_world_size() > 1`")
        return value


def _work(result: Any, async_op: bool) -> Finished | None:
    return Finished(result) if async_op else None


one_rank = OneRank()
