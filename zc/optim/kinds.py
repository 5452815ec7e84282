"""Decides the layout of an optimizer's parameters by its class, that is, by what its update reads.

| class | rule |
|---|---|
| torch's elementwise classes | equal shards, cut anywhere |
| declared with `elementwise` | the same, cut at multiples of its block; tried on small data by `zc.compile` |
| any other | whole parameters, each on one rank: right for every update that treats parameters one by one |
| LBFGS, SparseAdam, and classes whose update depends on all parameters together | refused |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.declared import DECLARED
from zc.optim.trials import check_elementwise, check_independent
from zc.planning.layout import Rule
from zc.planning.traits import TRAITS, Traits

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
        if traits is not None and not traits.is_elementwise:
            raise TypeError(f"torch.optim.{declared.__name__} is not elementwise, so zc.elementwise does not take it")
        if traits is None:
            DECLARED[declared] = block
        return declared

    return declare if cls is None else declare(cls)


def rule_of(optimizer: Optimizer) -> Rule:
    """The layout rule of the optimizer's class. Raises PlanError for optimizers that can't work on shards at all."""
    cls = type(optimizer)
    of_name = TRAITS.get(cls.__name__)  # whoever's it is
    if of_name is not None and of_name.refusal is not None:
        raise PlanError(f"optimizer {cls.__name__} can't work on shards: {of_name.refusal}")
    if cls in DECLARED:
        return Rule(block=DECLARED[cls])
    traits = _traits_of(cls)
    return Rule(whole=True) if traits is None else traits.rule


def try_out(optimizer: Optimizer, world_size: int, device: torch.device) -> None:
    """Tests on small data, on the masters' ``device``, what `elementwise` declared. For other classes, with several
    ranks, tests that the update treats parameters one by one. Raises PlanError; changes nothing."""
    cls = type(optimizer)
    if is_known(optimizer):
        return
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
    return traits is not None and traits.refusal is None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the class is one of torch's elementwise ones, so that buckets may be updated at different times."""
    traits = _traits_of(type(optimizer))
    return traits is not None and traits.is_elementwise


def _traits_of(cls: type[Optimizer]) -> Traits | None:
    """None: the class is not torch's own, or unknown."""
    return TRAITS.get(cls.__name__) if cls.__module__.startswith("torch.optim") else None
