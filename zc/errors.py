"""Errors that zc raises for its users. Each names the object and both values. When one is raised nothing has changed,
unless its text says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class ZcError(RuntimeError):
    """Base of all errors that zc raises. (An argument of the wrong type is a ``TypeError``.)"""


class PlanError(ZcError, ValueError):
    """The model, the optimizer or an option can't be planned. ``zc.compile`` raises it before it changes anything."""


class PassError(ZcError):
    """A pass met a graph that breaks its contract. A bug in zc, or a graph that needs a new rule."""


class RaceError(ZcError):
    """A schedule has no proof: a wait is missing or redundant, or a gradient does not arrive exactly once."""


class RankMismatchError(ZcError):
    """Ranks disagree about the model, the plan, the order of their reductions, or a checkpoint."""


class RankLostError(ZcError):
    """A rank has ended, or stands still, while others wait for it. Training can't go on without it."""


class UncoveredGradientError(ZcError):
    """A gradient arrived in a way that the plan does not cover."""


class CheckpointError(ZcError):
    """A checkpoint can't be written or read. It names the folder and the tensor or file. The state is unchanged."""


def some(names: Iterable[str], at_most: int = 5) -> str:
    """The first names, and how many more there are: "a, b, c, d, e and 7 more"."""
    all_names = list(names)
    num_left = len(all_names) - at_most
    return ", ".join(all_names[:at_most]) + (f" and {num_left} more" if num_left > 0 else "")


def optimizer_in_step() -> Optimizer | None:
    """The optimizer whose ``step`` is running, the innermost of several, if there is one. What its closure runs, or a
    module, is the program's own."""
    frame, inside = inspect.currentframe(), set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(owner, Optimizer):
            closure = frame.f_locals.get("closure")
            return None if getattr(closure, "__code__", None) in inside else owner
        if isinstance(owner, nn.Module):
            return None
        inside.add(frame.f_code)
        frame = frame.f_back
    return None


def not_its_own(optimizer: Optimizer) -> str:
    """For errors in the ``step`` of an optimizer that met what is sharded: the reason, and what to do."""
    inside = next((type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if inside is not None:
        return (
            f"it wraps {inside}, and works on them outside of that one's step(). Parameters are whole there in stages "
            "1 and 2 without shard_frozen, and param.grad.full_tensor() is a whole gradient"
        )
    if "param_groups" not in vars(type(optimizer)):  # else a second object, which zc has made (zc/optim/local.py)
        return (
            f"zc.compile was not given this {type(optimizer).__name__}. Make it first, then call "
            "zc.compile(model, optimizer); several go in as a list"
        )
    places = " and ".join(kept_params(optimizer)) or "something beside its groups"
    return (
        f"it takes parameters from {places}, where they are the model's. Take them from "
        'group["params"] of self.param_groups in step(): there each rank sees what it updates. Or use a hook: '
        "register_step_pre_hook before the update, register_step_post_hook after it (with stage=3 inside of `with "
        "zc.whole_parameters(model):`)"
    )


def kept_params(optimizer: Optimizer) -> list[str]:
    """The attributes, and the keys of groups, by which an optimizer keeps parameters of the model."""
    attributes: dict[str, Any] = vars(optimizer)
    groups: list[dict[str, Any]] = attributes["param_groups"]
    params = {id(param) for group in groups for param in group["params"]}

    def has_some(value: Any, depth: int = 3) -> bool:
        """``depth``: of collections inside each other that it looks into."""
        if isinstance(value, Tensor):
            return id(value) in params
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        items = list(value.parameters()) if isinstance(value, nn.Module) else items
        return depth > 0 and isinstance(items, list | tuple | set) and any(has_some(i, depth - 1) for i in items)

    own = [f"self.{name}" for name, value in attributes.items() if name != "param_groups" and has_some(value)]
    options = [(key, value) for group in groups for key, value in group.items() if key != "params"]
    return list(dict.fromkeys([*own, *(f'group["{key}"]' for key, value in options if has_some(value))]))


def megabytes(nbytes: float) -> str:
    """In the unit that gives at least one digit before the point."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
