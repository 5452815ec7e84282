"""Which of the caller's optimizers updates which parameter, and by which rule.

`zc.compile` takes one optimizer, or several in a list, a tuple or a dict, and returns the same object. Each may wrap
another optimizer over the same parameters (SAM, Lookahead): then the innermost is what zc updates, and the methods of
the wrapper are the caller's code.

The rule is the layout of an optimizer's parameters. Its class decides it, that is, what its update reads:

| class | rule |
|---|---|
| torch's elementwise classes | equal shards, cut anywhere |
| declared with `elementwise` | the same, cut at multiples of its block; tried on small data by `zc.compile` |
| any other | whole parameters, each on one rank: right for every update that treats parameters one by one |
| LBFGS, SparseAdam, and classes whose update depends on all parameters together | refused |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.trials import check_elementwise, check_independent, check_positions
from zc.planning.layout import Rule
from zc.planning.traits import TRAITS, Traits

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

    Raises PlanError if one holds several optimizers that share its parameters, or is a ZeroRedundancyOptimizer.
    """
    if type(optimizer) in DECLARED:  # it updates parameters itself
        return optimizer
    _refuse_zero_redundancy(optimizer)
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


def _refuse_zero_redundancy(optimizer: Optimizer) -> None:
    """Raises PlanError for the optimizer by which torch.distributed.optim shards states itself."""
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        inside = getattr(optimizer, "optim", None)
        name = "AdamW" if inside is None else type(inside).__name__
        raise PlanError(
            f"{type(optimizer).__name__} shards the states of its optimizer over ranks and sends weights itself, as zc "
            f"does: give zc.compile the optimizer that it was made of, {name}(model.parameters(), ...)"
        )


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


Class = TypeVar("Class", bound=type[Optimizer])


@overload
def elementwise(cls: Class, *, block: int = 1) -> Class: ...
@overload
def elementwise(cls: None = None, *, block: int = 1) -> Callable[[Class], Class]: ...
def elementwise(cls: Class | None = None, *, block: int = 1) -> Class | Callable[[Class], Class]:
    """Declares that an optimizer class updates each element only from that element's value, gradient and state.

    Its parameters then get equal shards, like those of torch's AdamW. Without the declaration, each parameter stays
    whole on one rank. Use ``zc.elementwise(Lion)``, or ``@zc.elementwise`` above the class. Returns the class.

    `zc.compile` tests the declaration: with the options of each group it updates a small matrix as a whole and in
    slices, and compares weights and states. A subclass needs its own declaration.

    Args:
        block: how many elements share something, counted from a parameter's first element: 256 for an 8-bit AdamW with
            one scale per 256 elements. Shards are cut at multiples of it. If such a class keeps small tensors in fp32,
            it keeps small slices in fp32 as well.

    Raises:
        TypeError: ``cls`` is not an optimizer class, or ``block`` is not a whole number of at least 1.
        PlanError (from `zc.compile`): updating slices differs from updating the whole, or can't be tried. Nothing has
            changed.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise TypeError(f"block must be a whole number of at least 1, got {block!r}")

    def declare(declared: Class) -> Class:
        if not isinstance(declared, type) or not issubclass(declared, Optimizer):
            raise TypeError(f"zc.elementwise takes a class of optimizers (a torch.optim.Optimizer), got {declared!r}")
        traits = _traits_of(declared)
        if traits is _UNKNOWN:
            DECLARED[declared] = block
        elif not traits.is_elementwise:
            raise TypeError(f"torch.optim.{declared.__name__} is not elementwise, so zc.elementwise does not take it")
        return declared

    return declare if cls is None else declare(cls)


def rule_of(optimizer: Optimizer) -> Rule:
    """The layout rule of the optimizer's class. Raises PlanError for optimizers that can't work on shards at all."""
    cls = type(optimizer)
    of_name = TRAITS.get(cls.__name__)  # whoever's it is
    if of_name is not None and of_name.refusal is not None:
        raise PlanError(f"optimizer {cls.__name__} can't work on shards: {of_name.refusal}")
    return Rule(block=DECLARED[cls]) if cls in DECLARED else _traits_of(cls).rule


def try_out(optimizer: Optimizer, world_size: int, device: torch.device) -> None:
    """Tries on small data, on the masters' ``device``, what `elementwise` declared. For other classes, with several
    ranks, tries that the update treats parameters one by one; for all, that none goes by a parameter's position.
    Raises PlanError; changes nothing."""
    cls = type(optimizer)
    if is_known(optimizer):
        return
    if world_size > 1:
        check_positions(optimizer, device)
    if cls in DECLARED:
        check_elementwise(optimizer, DECLARED[cls], device)
    elif world_size > 1:
        check_independent(optimizer, device)


def note_of(optimizer: Optimizer) -> str | None:
    """The note on the layout of an optimizer that zc does not know."""
    if is_known(optimizer) or type(optimizer) in DECLARED:
        return None
    name = type(optimizer).__name__
    return (
        f"{name} may read whole parameters, so each parameter stays whole on one rank; if its update is elementwise, "
        f"say so: zc.elementwise({name})"
    )


def is_known(optimizer: Optimizer) -> bool:
    """Whether the class is torch's own."""
    traits = _traits_of(type(optimizer))
    return traits is not _UNKNOWN and traits.refusal is None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the class is one of torch's elementwise ones, so that buckets may be updated at different times."""
    return _traits_of(type(optimizer)).is_elementwise


def shape_of_state(optimizer: Optimizer, key: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the tensor ``key`` in the state of a parameter of this ``shape``. None: the class is not torch's, or
    keeps no tensor of this name."""
    return _traits_of(type(optimizer)).shape_of(key, shape)


def _traits_of(cls: type[Optimizer]) -> Traits:
    return TRAITS.get(cls.__name__, _UNKNOWN) if cls.__module__.startswith("torch.optim") else _UNKNOWN


_UNKNOWN = Traits(None, rule=Rule(whole=True))  # of a class that is not torch's own, or that `TRAITS` lacks
DECLARED: weakref.WeakKeyDictionary[type[Optimizer], int] = weakref.WeakKeyDictionary()
