"""What an optimizer's update reads, by its class: that decides the layout of its parameters.

| class | rule |
|---|---|
| torch's elementwise ones | equal shards, cut anywhere |
| declared with `elementwise` | the same, at multiples of its block; tried on small data at `zc.compile` |
| any other | whole parameters, each on one rank: right for every update that treats parameters one by one |
| LBFGS, SparseAdam, and what depends on all parameters together | refused |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.optim.trials import check_elementwise, check_independent
from zc.planning.layout import Rule

Class = TypeVar("Class", bound=type[Optimizer])

# Elementwise: each element's update reads that element's gradient and state alone, so a shard may cut a parameter
# anywhere.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD",
)  # fmt: skip
WHOLE = ("Muon", "Adafactor")  # torch's own that read matrices
REFUSED = {
    "LBFGS": "it evaluates its closure several times, and keeps one history over all parameters. Use a first-order "
    "optimizer here, or DistributedDataParallel for LBFGS",
    "SparseAdam": "it takes sparse gradients, zc reduces dense ones. Use Adam, and embeddings made with sparse=False",
}
_DECLARED: weakref.WeakKeyDictionary[type[Optimizer], int] = weakref.WeakKeyDictionary()  # class -> block


@overload
def elementwise(cls: Class, *, block: int = 1) -> Class: ...
@overload
def elementwise(cls: None = None, *, block: int = 1) -> Callable[[Class], Class]: ...
def elementwise(cls: Class | None = None, *, block: int = 1) -> Class | Callable[[Class], Class]:
    """Declares that an optimizer class, which zc does not know, updates each element from that element's value,
    gradient and state alone. Its parameters then get equal shards, as those of torch's AdamW, where whole parameters
    would stay on one rank. ``zc.elementwise(Lion)``, or ``@zc.elementwise`` above the class; it gives the class back.

    `zc.compile` tries it: with the options of each group it updates a small matrix as a whole and in slices, and
    compares weights and states. A subclass needs a declaration of its own.

    Args:
        block: elements that share something, counted from a parameter's first element: 256 for an 8-bit AdamW whose
            state has a scale for each 256. Shards are cut at multiples of it. What such a class keeps in fp32 because
            it is small, it keeps so for small slices as well.

    Raises:
        TypeError: ``cls`` is no optimizer class, or ``block`` no whole number of at least 1. PlanError (from
        `zc.compile`): the update of slices is not that of the whole, or can't be tried; nothing has changed.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise TypeError(f"block must be a whole number of at least 1, got {block!r}")

    def declare(given: Class) -> Class:
        if not isinstance(given, type) or not issubclass(given, Optimizer):
            raise TypeError(f"zc.elementwise takes a class of optimizers (a torch.optim.Optimizer), got {given!r}")
        if _is_torchs(given, (*WHOLE, *REFUSED)):
            raise TypeError(f"torch.optim.{given.__name__} is not elementwise, so zc.elementwise does not take it")
        if not _is_torchs(given, ELEMENTWISE):
            _DECLARED[given] = block
        return given

    return declare if cls is None else declare(cls)


def rule_of(optimizer: Optimizer) -> Rule:
    """The rule of its class. Raises PlanError for optimizers that can't work on shards at all."""
    cls = type(optimizer)
    if cls.__name__ in REFUSED:
        raise PlanError(f"optimizer {cls.__name__} can't work on shards: {REFUSED[cls.__name__]}")
    if _is_torchs(cls, ELEMENTWISE):
        return Rule()
    if cls in _DECLARED:
        return Rule(block=_DECLARED[cls])
    return Rule(whole=True, cost="newton_schulz" if _is_torchs(cls, ("Muon",)) else "elements")


def try_out(optimizer: Optimizer, world_size: int, device: torch.device) -> None:
    """On small data on ``device``, where the masters will be: what `elementwise` has declared of it, and, where there
    are several ranks, that it treats parameters one by one. Raises PlanError; changes nothing."""
    cls = type(optimizer)
    if is_known(optimizer):
        return
    if cls in _DECLARED:
        check_elementwise(optimizer, _DECLARED[cls], device)
    elif world_size > 1:
        check_independent(optimizer, device)


def note_of(optimizer: Optimizer) -> str | None:
    """What explain says of the layout of an optimizer that zc does not know."""
    if is_known(optimizer) or type(optimizer) in _DECLARED:
        return None
    name = type(optimizer).__name__
    return (
        f"{name} may read whole parameters, so each parameter stays whole on one rank; if its update is elementwise, "
        f"say so: zc.elementwise({name})"
    )


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's own."""
    return _is_torchs(type(optimizer), (*ELEMENTWISE, *WHOLE))


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's elementwise ones: a copy may update some parameters now and others later."""
    return _is_torchs(type(optimizer), ELEMENTWISE)


def _is_torchs(cls: type[Optimizer], names: tuple[str, ...]) -> bool:
    return cls.__module__.startswith("torch.optim") and cls.__name__ in names
