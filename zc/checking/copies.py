"""Copies of a model and its optimizers that share nothing with them."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.assignment import given_in

Memo = dict[int, Any]


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Copies whose optimizers have the copy's parameters. Raises PlanError where something can't be copied."""
    memo: Memo = {}
    try:
        twin = copy.deepcopy(model, memo)
        for each in given_in(optimizer):
            _copy_optimizer(each, memo)
        return twin, copy.deepcopy(optimizer, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise PlanError(
            f"zc.check trains copies, and {type(model).__name__} or its optimizer can't be copied "
            f"({type(error).__name__}: {error}): call it before the first forward, and keep no tensor with a graph, "
            "file or lock in an attribute"
        ) from error


def _copy_optimizer(optimizer: Optimizer, memo: Memo) -> None:
    """Puts a copy into ``memo``. deepcopy alone would lose hooks and attributes, which torch's ``__getstate__`` leaves
    out; a scheduler's wrapper around ``step`` would update the original, so the copy has its class's."""
    if id(optimizer) in memo:
        return
    for inside in _optimizers_inside(vars(optimizer)):
        _copy_optimizer(inside, memo)
    twin = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    own = {name: value for name, value in vars(optimizer).items() if not _is_wrapped_method(optimizer, name, value)}
    vars(twin).update(copy.deepcopy(own, memo))


def _is_wrapped_method(optimizer: Optimizer, name: str, value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType)) and callable(getattr(type(optimizer), name, None))


def _optimizers_inside(value: Any) -> Iterator[Optimizer]:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        if isinstance(item, Optimizer):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _optimizers_inside(item)


def names_of(model: nn.Module, optimizer: Any) -> list[dict[int, str]]:
    """For each optimizer, the names of its parameters by their numbers in its ``state_dict()``."""
    names = {id(param): name for name, param in model.named_parameters()}
    tables = []
    for each in given_in(optimizer):
        params = [param for group in each.param_groups for param in group["params"]]
        tables.append({k: names.get(id(param), f"number {k}") for k, param in enumerate(params)})
    return tables


def options_of(optimizer: Any) -> list[tuple[str, dict[str, str]]]:
    """Of each group its name and its options, as text."""
    return [
        (f"{type(each).__name__}, group {k}", {key: str(value) for key, value in group.items() if key != "params"})
        for each in given_in(optimizer)
        for k, group in enumerate(each.param_groups)
    ]


def options_by_name(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """By parameter name, the options of its group."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        names[id(param)]: {key: value for key, value in group.items() if key != "params"}
        for each in given_in(optimizer)
        for group in each.param_groups
        for param in group["params"]
        if id(param) in names
    }
