"""Which of the caller's optimizers updates which parameter, and by which rule.

`zc.compile` takes one optimizer, or several in a list, a tuple or a dict, and returns the same object. Each may wrap
another optimizer over the same parameters (SAM, Lookahead): then the innermost is what zc updates, and the methods of
the wrapper are the caller's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.declared import DECLARED
from zc.planning.layout import Rule

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]
Container = TypeVar("Container", bound=Optimizers)


@dataclass(frozen=True)
class Assignment:
    """Resolved once by `zc.compile`, and by `zc.recompile` for the parameters that it adds.

    ``container``: the optimizer, or the list, tuple or dict of them, as the caller passed it. ``params``: the trainable
    parameters by fully qualified name, in order of registration. ``owners``: by name, the number of its optimizer.
    """

    container: Any
    optimizers: tuple[Optimizer, ...]
    rules: tuple[Rule, ...]
    params: Mapping[str, nn.Parameter]
    owners: Mapping[str, int]


def optimizers_in(container: Any) -> tuple[Optimizer, ...]:
    """Of each of `given_in` the innermost."""
    return tuple(map(innermost, given_in(container)))


def given_in(container: Any) -> tuple[Optimizer, ...]:
    """The optimizers in order, as the caller has them. Raises TypeError if something else is among them, PlanError if
    there are none or one is there twice."""
    _refuse_wrapper(container, "optimizer")
    if isinstance(container, Optimizer):
        return (container,)
    if not isinstance(container, (list, tuple, Mapping)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, or a list, tuple or dict of them, got "
            f"{type(container).__name__}"
        )
    items = list(container.items() if isinstance(container, Mapping) else enumerate(container))
    for key, item in items:
        _refuse_wrapper(item, f"optimizer[{key!r}]")
        if not isinstance(item, Optimizer):
            raise TypeError(
                f"optimizer is a {type(container).__name__}, and [{key!r}] of it must be a torch.optim.Optimizer, got "
                f"{type(item).__name__}"
            )
    if not items:
        raise PlanError(f"optimizer is an empty {type(container).__name__}: give at least one torch.optim.Optimizer")
    for k, (key, item) in enumerate(items):
        earlier = next((other for other, before in items[:k] if before is item), None)
        if earlier is not None:
            raise PlanError(f"optimizer[{earlier!r}] and optimizer[{key!r}] are the same {type(item).__name__}")
    return tuple(item for _, item in items)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that another one wraps, through any number of wrappers; ``optimizer`` itself if it wraps none.

    Raises PlanError if one holds several optimizers that share its parameters.
    """
    if type(optimizer) in DECLARED:  # it updates parameters itself
        return optimizer
    own = _params_of(optimizer)
    inside: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, item in (("", value), *items):
            is_new = isinstance(item, Optimizer) and item is not optimizer and item not in inside.values()
            if is_new and _params_of(item) <= own:
                inside[name if item is value else f"{name}[{key!r}]"] = item
    if not inside or frozenset[int]().union(*map(_params_of, inside.values())) != own:
        return optimizer
    if len(inside) > 1:
        held = ", ".join(f".{where} ({type(item).__name__})" for where, item in inside.items())
        raise PlanError(
            f"{type(optimizer).__name__} holds several optimizers of its parameters: {held}. Give zc.compile those "
            "that update, in a list"
        )
    return innermost(next(iter(inside.values())))


def _params_of(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(param) for group in getattr(optimizer, "param_groups", ()) for param in group["params"])


def _refuse_wrapper(item: Any, what: str) -> None:
    """Refuses the classes by which accelerate, Lightning and Fabric wrap an optimizer: parameters and hooks are those
    of the optimizer inside."""
    for cls in type(item).__mro__:
        if cls.__name__ in ("AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"):
            raise PlanError(
                f"{what} is a {type(item).__name__}, which wraps another optimizer: give that one, its attribute "
                ".optimizer"
            )


def like_container(container: Any, parts: Sequence[Any]) -> Any:
    """``parts``, one for each of `optimizers_in`, arranged as ``container`` has its optimizers: alone, in a list, or in
    a dict by its keys."""
    if isinstance(container, Optimizer):
        return parts[0]
    return dict(zip(container, parts, strict=True)) if isinstance(container, Mapping) else list(parts)


def parts_of(container: Any, states: Any) -> list[Any] | None:
    """The inverse of `like_container`: of ``states`` the part for each optimizer. None if ``states`` is arranged in
    another way."""
    if isinstance(container, Mapping) and isinstance(states, Mapping) and states.keys() == container.keys():
        return [states[key] for key in container]
    if isinstance(container, (list, tuple)) and isinstance(states, (list, tuple)) and len(states) == len(container):
        return list(states)
    return None
