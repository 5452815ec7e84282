"""What zc keeps for a compiled model, found by the model."""

from __future__ import annotations

import weakref

from torch import nn

from zc.errors import PlanError
from zc.optim.optimizer import ShardedOptimizer

# Not an attribute of the module: a deepcopy of the module must not share its gradients with the original.
COMPILED: weakref.WeakKeyDictionary[nn.Module, ShardedOptimizer] = weakref.WeakKeyDictionary()


def sharded(model: nn.Module) -> ShardedOptimizer:
    """What zc keeps for a compiled model; raises where ``model`` is none."""
    found = COMPILED.get(model)
    if found is None:
        raise PlanError(f"this {type(model).__name__} was not compiled: call zc.compile(model, optimizer) first")
    return found
