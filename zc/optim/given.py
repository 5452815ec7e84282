"""What the caller gave as optimizer: one, or several in a list, a tuple or a dict, which stays what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

from zc.errors import PlanError

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]
Given = TypeVar("Given", bound=Optimizers)


def listed(given: Any) -> list[Optimizer]:
    """The optimizers in order. Raises TypeError where something else is among them, PlanError where one is there twice
    or none at all."""
    _refuse_wrapper(given, "optimizer")
    if isinstance(given, Optimizer):
        return [given]
    if not isinstance(given, (list, tuple, Mapping)):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list, tuple or dict of them, got {type(given).__name__}"
        )
    items = list(given.items() if isinstance(given, Mapping) else enumerate(given))
    for key, item in items:
        _refuse_wrapper(item, f"optimizer[{key!r}]")
        if not isinstance(item, Optimizer):
            raise TypeError(
                f"optimizer is a {type(given).__name__}, and [{key!r}] of it must be a torch.optim.Optimizer, got "
                f"{type(item).__name__}"
            )
    found = [item for _, item in items]
    if not found:
        raise PlanError(f"optimizer is an empty {type(given).__name__}: give at least one torch.optim.Optimizer")
    for k, (key, item) in enumerate(items):
        earlier = next((other for other, before in items[:k] if before is item), None)
        if earlier is not None:
            raise PlanError(f"optimizer[{earlier!r}] and optimizer[{key!r}] are the same {type(item).__name__}")
    return found


def _refuse_wrapper(item: Any, what: str) -> None:
    """The classes by which accelerate, Lightning and Fabric stand in for an optimizer: its parameters and hooks are
    the other one's."""
    for cls in type(item).__mro__:
        if cls.__name__ in ("AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"):
            raise PlanError(
                f"{what} is a {type(item).__name__}, which stands in for the optimizer inside it: give that one, its "
                "attribute .optimizer"
            )


def shaped(given: Any, parts: Sequence[Any]) -> Any:
    """``parts``, one for each of `listed`, as ``given`` has its optimizers: alone, in a list, or in a dict by its
    keys."""
    if isinstance(given, Optimizer):
        return parts[0]
    return dict(zip(given, parts, strict=True)) if isinstance(given, Mapping) else list(parts)


def parts_of(given: Any, states: Any) -> list[Any] | None:
    """The way back: of ``states`` the part for each optimizer; None where they have another shape than ``given``."""
    if isinstance(given, Mapping) and isinstance(states, Mapping) and states.keys() == given.keys():
        return [states[key] for key in given]
    if isinstance(given, (list, tuple)) and isinstance(states, (list, tuple)) and len(states) == len(given):
        return list(states)
    return None
