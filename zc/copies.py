"""A compiled model that is pickled whole (``torch.save(model)``) loads as a plain module, with a warning.

A loaded DDP module reduces again; a compiled model can't without its optimizer. Its pickle contains an object that
warns when it is loaded, even if zc is not installed. A deepcopy, such as an averaged copy, is a plain module as well,
without a warning.
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
from zc.torch_private import not_compiled_alone

_NAME = "_zc_compiled"
_TEXT = (
    "zc: this module was saved whole (torch.save(model)) while it was compiled by zc, and is a plain module now: over "
    "several ranks nothing reduces its gradients until zc.compile(model, optimizer) is called. zc.save keeps what "
    "training needs, model.state_dict() the weights alone"
)


class _Mark:
    """Marks a compiled model, in its ``__dict__``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return warnings.warn, (_TEXT,)  # returns None


class Instead:
    """Replaces a method on one module object. Copies and pickles of the module have the class's method."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = weakref.ref(module), name, call

    @not_compiled_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), self._name)  # of the copy, whose __dict__ is still empty


class NotForDDP:
    """Raises when DistributedDataParallel reads it, which it does first. Copies of the model may go into DDP."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise PlanError(
            "DistributedDataParallel was given a model that zc has compiled, whose gradients are averaged over the "
            "ranks already: leave DDP out (zc.close(model) makes a plain module of it again)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return frozenset, ()


class NoSync:
    """``model.no_sync()`` of a compiled model, as in DistributedDataParallel. On a copy it does nothing."""

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[None] | None]) -> None:
        self._begin = begin

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self._begin() or contextlib.nullcontext()

    def __reduce__(self) -> Any:  # deepcopy uses it, too
        return partial, (contextlib.nullcontext,)


def mark(model: nn.Module) -> None:
    setattr(model, _NAME, _Mark())


def unmark(model: nn.Module) -> None:
    """Removes everything that `mark` and `zc.guards.install` added to the model."""
    for module in model.modules():
        for name in [n for n, value in vars(module).items() if isinstance(value, (_Mark, Instead, NoSync, NotForDDP))]:
            del vars(module)[name]
