"""Two methods of the caller's optimizer objects: ``zero_grad`` and ``add_param_group``. Their classes stay as they are.

``model.zero_grad`` is not replaced: zc notices a parameter whose ``.grad`` was set to None.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.optimizer import ShardedOptimizer


def replace(model: nn.Module, sharded: ShardedOptimizer) -> None:
    """Puts zc's methods on an optimizer object."""
    optimizer = sharded.optimizer
    owner, of_model = weakref.proxy(sharded), weakref.ref(model)
    add = type(optimizer).add_param_group

    def zero_grad(set_to_none: bool = True) -> None:
        owner.zero_grad(set_to_none=set_to_none)

    def add_param_group(param_group: dict[str, Any]) -> None:
        items = param_group["params"]
        if isinstance(items, set):
            add(optimizer, param_group)  # which refuses it: its order differs from rank to rank
        items = [items] if isinstance(items, Tensor) else list(items)
        params = [item[1] if isinstance(item, tuple) else item for item in items]  # of named_parameters()
        trained = of_model()
        names = {id(p): name for name, p in trained.named_parameters()} if trained is not None else {}
        for param in params:
            name = names.get(id(param))
            if name is None or owner.runtime.params.get(name) is param:
                what = (
                    f"parameter {name}, which has its place: set its options in optimizer.param_groups"
                    if name
                    else f"a tensor {tuple(param.shape)} that the model lacks: register it there first, and call "
                    "zc.recompile(model) afterwards"
                )
                raise PlanError(f"add_param_group was given {what}")
        add(optimizer, {**param_group, "params": items})
        owner.runtime.frozen.update({names[id(param)]: param for param in params})
        if not any(param.requires_grad for param in params):
            owner.adopt(())  # checkpoints have the group from now on; zc.recompile gives its parameters places

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def restore(optimizer: Optimizer) -> None:
    """Removes what `replace` has put on the object, so that its class's methods apply again."""
    for name in ("zero_grad", "add_param_group"):
        vars(optimizer).pop(name, None)
