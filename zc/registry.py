"""What zc keeps for a compiled model, found by the model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zc.errors import PlanError

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


# Not an attribute of the module: a deepcopy of the module must not share its gradients with the original.
COMPILED: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


def sharded(model: nn.Module) -> ShardedModel:
    """What zc keeps for a compiled model; raises where ``model`` is none."""
    found = COMPILED.get(model)
    if found is None:
        raise PlanError(f"this {type(model).__name__} was not compiled: call zc.compile(model, optimizer) first")
    return found


def persistent_nbytes(model: nn.Module) -> dict[str, int]:
    """Bytes that this rank holds for the model, by kind, counted from the tensors themselves.

    Those of gradients (acc, flat_grad, recv) it holds from a backward until they are set to None.
    """
    found = sharded(model)
    nbytes = found.runtime.buffers.nbytes()
    kept = [state for held in found.optimizers for state in held.optimizer.state.values()]
    states = [v for state in kept if isinstance(state, dict) for v in state.values() if isinstance(v, Tensor)]
    nbytes["optimizer_state"] = sum(v.nbytes for v in states if v.dim() > 0)
    return nbytes
