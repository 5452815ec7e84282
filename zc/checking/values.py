"""Batches and random numbers: nested values, what they hold as bytes, and the generators that a program draws from."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from zc.errors import PlanError


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with each tensor in its dicts, lists and tuples changed. Other objects are kept as they are."""
    return _map(value, Tensor, change)


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: _map(item, kind, change) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, kind, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, kind, change) for item in value)
    return value


class _Sent:
    """A tensor of a device, on its way to a rank that has another one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().cpu()


def packed(batches: Sequence[Any]) -> bytes:
    """For another rank. Raises PlanError for what can't be sent."""
    portable = [map_tensors(batch, lambda t: t if t.device.type == "cpu" else _Sent(t)) for batch in batches]
    try:
        return pickle.dumps(portable)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"zc.check sends batches to all ranks, and these can't be pickled ({error}): give it dicts, lists and "
            "tuples of tensors and numbers"
        ) from error


def unpacked(data: bytes, device: torch.device) -> list[Any]:
    """What another rank has `packed`, its device tensors on ``device``."""
    batches: list[Any] = pickle.loads(data)
    return [_map(batch, _Sent, lambda sent: sent.tensor.to(device)) for batch in batches]


def leaves(value: Any) -> list[Any]:
    """What nested dicts, lists and tuples hold, in order."""
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def digest(value: Any) -> str:
    """Equal for equal values: of tensors all bytes, of anything else what pickle makes of it."""
    total = hashlib.sha256()
    for leaf in leaves(value):
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
