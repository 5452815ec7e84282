"""Methods of an optimizer's class other than its step that walk its parameters: schedule-free's ``eval()``, a Hessian.

On the caller's object such a method would read and write whole parameters, with states gathered, as the caller's own
code does. That is right where weights are whole; on this rank's slices it is faster, and works in stage 3. So a method
runs on slices if small data shows that it treats parameters (or their elements) one by one (`on_slices`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zc.optim.local import REPLACED, class_of
from zc.optim.trials import (
    CLOSE,
    PAIRS,
    Updated,
    cut_matrix,
    difference,
    joined_parts,
    leaves,
    same_state,
    small_data,
    update_copy,
    wrapped,
)


def candidates(cls: type[Optimizer]) -> list[str]:
    """Public methods that the class has beyond torch's, that can be called without arguments, and whose code mentions
    the parameters of its groups or its state."""
    own = [each for each in cls.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    names = dict.fromkeys(name for each in own for name in vars(each))
    return [
        name
        for name in names
        if not name.startswith("_") and name not in REPLACED
        if isinstance(inspect.getattr_static(cls, name), types.FunctionType) and _takes_nothing(getattr(cls, name))
        if {"params", "state"} & mentions(cls, name)
    ]


def _takes_nothing(function: Any) -> bool:
    _, *params = inspect.signature(function).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params)


def mentions(cls: type[Optimizer], name: str) -> set[str]:
    """Names and strings in the code of a method, and of the methods that it calls."""
    seen: dict[str, set[str]] = {}

    def look(name: str) -> None:
        function = inspect.unwrap(getattr(cls, name))
        if name not in seen and isinstance(function, types.FunctionType):
            seen[name] = set(_words(function.__code__))
            for word in seen[name]:
                if not word.startswith("__") and isinstance(getattr(cls, word, None), types.FunctionType):
                    look(word)

    look(name)
    return {word for words in seen.values() for word in words}


def may_zero(cls: type[Optimizer]) -> bool:
    """Whether the code of its methods, or of a function of their modules that they name, mentions an operation by which
    gradients become zeros."""
    own = [each for each in cls.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    found, seen = set[str](), set[Any]()
    todo = [item for each in own for item in vars(each).values()]
    while todo:
        item = todo.pop()
        function = inspect.unwrap(item) if isinstance(item, types.FunctionType) else None
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        if function.__globals__.get("__name__", "").startswith("torch."):
            continue
        words = set(_words(function.__code__))
        found |= words
        todo += [function.__globals__[word] for word in words if word in function.__globals__]
    return not found.isdisjoint(("zero_", "_foreach_zero_", "fill_"))


def _words(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, types.CodeType):
            yield from _words(const)


def on_slices(
    optimizer: Optimizer, block: int | None, groups: Sequence[Mapping[str, Any]], device: torch.device
) -> list[str]:
    """The methods that may run on this rank's slices of these groups. ``block``: None where parameters stay whole,
    otherwise slices are cut at multiples of it. Only those that change weights or state: others exchange nothing."""
    names = candidates(class_of(optimizer))
    if not names or wrapped(optimizer) is not None:
        return []
    fit = set(names)
    changes: set[str] = set()
    for group in (group for group in groups if group["params"]):
        for name in names:
            for before in ((), *((other,) for other in names if other != name)):
                seen = _try(optimizer, group, (*before, name), block, device)
                base = _try(optimizer, group, before, block, device)
                if seen is None or base is None:
                    fit.discard(name)
                elif not _are_same(seen, base):
                    changes.add(name)
    return [name for name in names if name in fit & changes]


def _are_same(one: Sequence[Updated], other: Sequence[Updated]) -> bool:
    return all(
        difference(a.elementwise(), b.elementwise(), 0.0) is None
        and same_state(dict(leaves(a.state)), dict(leaves(b.state)), 0.0)
        for a, b in zip(one, other, strict=True)
    )


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], methods: Sequence[str], block: int | None, device: torch.device
) -> list[Updated] | None:
    """What the methods make of parameters together, after some steps; None if it is not what they make of each alone,
    or if they return more than a number."""
    matrix, cuts = cut_matrix(block or 1)
    for shapes, close in PAIRS if block is None else (((matrix,), CLOSE),):
        data = [small_data(shape, device, seed) for seed, shape in enumerate(shapes, start=20)]
        values, grads = [value for value, _ in data], [own for _, own in data]
        try:
            together, again = (
                update_copy(optimizer, group, values, grads, seed, methods=methods) for seed in (1, 2)
            )
            parts = data
            if block is not None:
                parts = [(values[0].view(-1)[cut], [grad.view(-1)[cut] for grad in grads[0]]) for cut in cuts]
            apart = [update_copy(optimizer, group, [v], [own], 1, methods=methods)[0] for v, own in parts]
        except Exception:  # noqa: BLE001  (other shapes; or it can't be tried)
            continue
        returned = [each.returned for each in (*together, *again, *apart)]
        if any(item != returned[0] for item in returned) or not isinstance(returned[0], (int, float, str, type(None))):
            return None
        if any(difference(a.elementwise(), b.elementwise()) is not None for a, b in zip(together, again, strict=True)):
            return None  # it draws random numbers
        if block is not None:
            whole = {key: value.view(-1) for key, value in together[0].elementwise().items()}
            is_same = difference(whole, joined_parts([part.elementwise() for part in apart]), close) is None
        else:
            pairs = zip(together, apart, strict=True)
            is_same = all(difference(a.elementwise(), b.elementwise(), close) is None for a, b in pairs)
        return together if is_same else None
    return None
