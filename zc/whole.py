"""Whole weights in stage 3, for code outside of the model's forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zc.engine.memory_order import in_shape
from zc.registry import sharded


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """All parameters have all their bytes inside, on every rank: to evaluate, average, export or change weights.

    All ranks enter it together, between two updates, and hold the whole model meanwhile. Where ranks make other numbers
    of backwards, those that have made theirs wait for the others. What is written into parameters inside, the same on
    all ranks, goes to the shards and the masters at the end. Tensors that share their memory, such as those of
    ``model.state_dict()``, keep the values of that moment. In stages 1 and 2, where parameters are always whole, it
    does nothing.

    Raises:
        ZcError: ``optimizer.step()`` was called inside; or a parameter was given a tensor of another shape or dtype,
            and its shards stay as they were. RankMismatchError: not all ranks have entered it.
    """
    runtime = sharded(model).runtime
    if not runtime.weights.is_unsharded:
        runtime.settle()
    with runtime.weights.unsharded():
        yield


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` with whole tensors in host memory, on rank 0; an empty dict on the others.

    All ranks call it. Buckets come one at a time, so no device holds more than its shards and one bucket. Works in all
    stages.
    """
    runtime = sharded(model).runtime
    weights = runtime.weights
    names = {id(param): name for name, param in runtime.placed.items()}
    whole: dict[str, Tensor] = {}
    is_first = runtime.group.rank == 0
    weights.adopt_writes()
    for bucket in runtime.plan.sharded:
        flat = weights.gathered(bucket.index)
        for slot in bucket.slots if is_first else ():
            part = in_shape(flat[slot.offset : slot.stop], slot)
            whole[slot.name] = part.detach().to("cpu", copy=True)
    if not is_first:
        return {}
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = names.get(id(value))
        if name is not None and name in whole:
            state[key] = whole[name]
        else:
            state[key] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return state
