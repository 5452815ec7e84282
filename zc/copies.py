"""A compiled model that is pickled whole (``torch.save(model)``) comes back as a plain module, and says so.

A DDP module that is loaded reduces again; this one can't, without its optimizer. What is pickled in its place warns
when it is loaded, and needs no zc for that. A deepcopy is a plain module as well, as an averaged copy should be, and
says nothing.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn

from zc.errors import PlanError

_NAME = "_zc_compiled"
_TEXT = (
    "zc: this module was saved whole (torch.save(model)) while it was compiled by zc, and is a plain module now: over "
    "several ranks nothing reduces its gradients until zc.compile(model, optimizer) is called. zc.save keeps what "
    "training needs, model.state_dict() the weights alone"
)


class _Mark:
    """What stands in a compiled model's ``__dict__``; no one else knows it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return warnings.warn, (_TEXT,)  # returns None


class Instead:
    """What one module object has in place of a method of its class. A copy or a pickle of it has the class's."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = weakref.ref(module), name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), self._name)  # of the copy, which is on its way and has nothing of its own yet


class NotForDDP:
    """What DistributedDataParallel goes through first of all, of a compiled model. A copy of the model it may take."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise PlanError(
            "DistributedDataParallel was given a model that zc has compiled, whose gradients are averaged over the "
            "ranks already: leave DDP out (zc.close(model) makes a plain module of it again)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return frozenset, ()


class NoSync:
    """``model.no_sync()`` of a compiled model, as DistributedDataParallel has it. That of a copy does nothing."""

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[None] | None]) -> None:
        self._begin = begin

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self._begin() or contextlib.nullcontext()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext

    def __reduce__(self) -> Any:
        return partial, (contextlib.nullcontext,)


def mark(model: nn.Module) -> None:
    setattr(model, _NAME, _Mark())


def unmark(model: nn.Module) -> None:
    """The model's objects have nothing more of a compiled one."""
    for module in model.modules():
        for name in [n for n, value in vars(module).items() if isinstance(value, (_Mark, Instead, NoSync, NotForDDP))]:
            del vars(module)[name]
