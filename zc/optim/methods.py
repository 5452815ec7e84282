"""Methods of the caller's optimizer objects that zc replaces (`zc.optim.local.REPLACED`). The classes stay as they are.

``model.zero_grad`` is not replaced: zc notices a parameter whose ``.grad`` was set to None.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.local import REPLACED
from zc.optim.optimizer import ShardedOptimizer


def replace(model: nn.Module, sharded: ShardedOptimizer) -> None:
    """Puts zc's methods on an optimizer object."""
    optimizer = sharded.optimizer
    owner, of_model = weakref.proxy(sharded), weakref.ref(model)
    add, before = type(optimizer).add_param_group, optimizer.step

    # a method with the signature of the class's: schedulers and GradScaler look at it. It may be a scheduler's already.
    @functools.wraps(getattr(before, "__func__", before))
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return before(*args, **kwargs)
        except Exception:
            owner.publish_rest()  # other ranks publish the same buckets
            raise

    def zero_grad(set_to_none: bool = True) -> None:
        owner.zero_grad(set_to_none=set_to_none)

    def state_dict() -> dict[str, Any]:
        state: dict[str, Any] = owner.state_dict()
        return state

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        owner.load_state_dict(state_dict)

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

    for name in sharded.methods:
        setattr(optimizer, name, MethodType(_on_slices(type(optimizer), name, owner), optimizer))
    if sharded.runtime.plan.placement.shards_weights:
        # in a loop that the caller compiles Dynamo would look at parameters that have no bytes
        step = torch.compiler.disable(step)  # type: ignore[no-untyped-call]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _on_slices(cls: type[Optimizer], name: str, owner: ShardedOptimizer) -> Callable[..., Any]:
    """A method of the class that runs on slices; on what the caller gives it where that is a parameter."""

    @functools.wraps(getattr(cls, name))
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
            return getattr(cls, name)(optimizer, *args, **kwargs)
        return owner.run_on_slices(name, args, kwargs)

    return run


def restore(sharded: ShardedOptimizer) -> None:
    """Removes what `replace` has put on the object, so that its class's methods apply again."""
    for name in (*REPLACED, *sharded.methods):
        vars(sharded.optimizer).pop(name, None)
