"""Batches and random numbers: nested values, what they hold as bytes, and the generators that a program draws from; and
copies of a model and its optimizers that share nothing with them.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.assignment import given_in
from zc.optim.trials import leaves


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with each tensor in its dicts, lists and tuples changed. Other objects are kept as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def packed(batches: Sequence[Any]) -> bytes:
    """For another rank. Raises PlanError for what can't be sent."""
    file = io.BytesIO()
    try:
        torch.save([map_tensors(batch, torch.clone) for batch in batches], file)  # a slice without the rest of its data
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"zc.check sends batches to all ranks, and these can't be pickled ({error}): give it dicts, lists and "
            "tuples of tensors and numbers"
        ) from error
    return file.getvalue()


def unpacked(data: bytes, device: torch.device) -> list[Any]:
    """What another rank has `packed`, its device tensors on ``device``."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    batches: list[Any] = torch.load(io.BytesIO(data), map_location=place, weights_only=False)
    return batches


def digest(value: Any) -> str:
    """Equal for equal values: of tensors all bytes, of anything else what pickle makes of it."""
    total = hashlib.sha256()
    for _, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            total.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(pickle.dumps(leaf))
    return total.hexdigest()


def joined(batches: Sequence[Any]) -> Any:
    """The batches as one: tensors one after the other along their first dimension, all else equal in all of them.
    Raises PlanError where that can't be."""
    first = batches[0]
    if isinstance(first, Tensor):
        if first.ndim and all(each.shape[1:] == first.shape[1:] for each in batches):
            return torch.cat(list(batches))
        if all(torch.equal(each, first) for each in batches):
            return first
    elif isinstance(first, Mapping):
        if all(each.keys() == first.keys() for each in batches):
            items = {key: joined([each[key] for each in batches]) for key in first}
            return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    elif isinstance(first, (list, tuple)):
        if all(len(each) == len(first) for each in batches):
            items_of = [joined(items) for items in zip(*batches, strict=True)]
            return type(first)(*items_of) if hasattr(first, "_fields") else type(first)(items_of)
    elif all(digest(each) == digest(first) for each in batches):
        return first
    raise PlanError("these batches do not make one: shapes beyond the first dimension, or other values, differ")


class Randomness:
    """The generators of this process: torch's on the host and on ``device``, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device

    def get(self) -> dict[str, Any]:
        state = {"host": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}
        if self._module is not None:
            state["device"] = self._module.get_rng_state(self._device)
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["host"])
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        if self._module is not None:
            self._module.set_rng_state(state["device"], self._device)


def drawn(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The generators that have moved."""
    return {name for name in before if digest(before[name]) != digest(after[name])}


Memo = dict[int, Any]


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Copies whose optimizers have the copy's parameters. Raises PlanError where something can't be copied."""
    memo: Memo = {}
    try:
        twin = copy.deepcopy(model, memo)
        for each in given_in(optimizer):
            _copy_optimizer(each, memo)
        return twin, copy.deepcopy(optimizer, memo)
    except (TypeError, RuntimeError) as error:
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
