"""An optimizer's step on a rank that owns none of a group's parameters.

A class that stacks the gradients of a group fails on an empty one. So where a trial shows that
(`zc.optim.trials.takes_empty_groups`), ``step`` runs on a second object of the same class, which sees the other groups
alone. Both objects have one ``__dict__``: whatever a step reads or writes is the caller's optimizer's, and a step that
raises leaves nothing to put back.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def without_empty_groups(optimizer: Optimizer) -> Optimizer:
    """``optimizer`` itself in all but its class, whose ``param_groups`` leaves out groups without elements."""
    cls = type(optimizer)

    def param_groups(self: Optimizer) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return [group for group in groups if any(param.numel() for param in group["params"])]

    # a property of the class goes before an attribute of the object
    body = {"param_groups": property(param_groups), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    view: Optimizer = object.__new__(type(cls.__name__, (cls,), body))
    view.__dict__ = optimizer.__dict__
    return view
