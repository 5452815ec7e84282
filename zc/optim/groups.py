"""An optimizer's step on a rank that owns none of a group's parameters.

A class that stacks the gradients of a group fails on an empty group. If a trial shows this
(`zc.optim.trials.takes_empty_groups`), ``step`` runs on a second object of the same class, which sees only the other
groups. Both objects share one ``__dict__``, so a step reads and writes the caller's optimizer. If a step raises,
nothing has to be restored.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def without_empty_groups(optimizer: Optimizer) -> Optimizer:
    """A second object with the ``__dict__`` of ``optimizer``, whose ``param_groups`` omits groups without elements."""
    cls = type(optimizer)

    def param_groups(self: Optimizer) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return [group for group in groups if any(param.numel() for param in group["params"])]

    # a property of the class takes precedence over an attribute of the object
    body = {"param_groups": property(param_groups), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    view: Optimizer = object.__new__(type(cls.__name__, (cls,), body))
    view.__dict__ = optimizer.__dict__
    return view
