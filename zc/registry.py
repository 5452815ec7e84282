"""The compiled models: from a module to zc's state for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from zc.engine.memory_order import values_in
from zc.errors import PlanError

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


# Not an attribute of the module: a deepcopy of the module must not share its gradients with the original.
COMPILED: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


def sharded(model: nn.Module) -> ShardedModel:
    """zc's state for a compiled model. Raises PlanError for any other model."""
    sharded_model = COMPILED.get(model) if isinstance(model, nn.Module) else None
    if sharded_model is None:
        raise PlanError(f"this {type(model).__name__} was not compiled: call zc.compile(model, optimizer) first")
    return sharded_model


def is_ours(optimizer: Optimizer) -> bool:
    """Whether a compiled model has this optimizer, or the one that it wraps."""
    from zc.optim.assignment import innermost  # late: else the longest chain of imports

    inside = innermost(optimizer)
    return any(one.optimizer is inside for each in COMPILED.values() for one in each.optimizers)


def persistent_nbytes(model: nn.Module) -> dict[str, int]:
    """Bytes that this rank holds for the model, by kind, counted from the tensors themselves.

    Those of gradients (acc, flat_grad, scratch) exist from a backward until the gradients are set to None; whole_grad
    during an update, arena while weights are read (on a CPU from then on), sum while a reduction sums.
    """
    sharded_model = sharded(model)
    runtime = sharded_model.runtime
    nbytes = runtime.buffers.nbytes()
    by_param = [list(optimizer.state_of_class.values()) for optimizer in sharded_model.optimizers]
    states = [value for _, value in values_in(None, by_param)]
    whole = sum(param.nbytes for name, param in runtime.frozen.items() if name not in runtime.placed)
    if whole:
        nbytes["frozen"] = nbytes.get("frozen", 0) + whole
    nbytes["optimizer_state"] = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
    return nbytes
