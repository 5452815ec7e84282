"""What stands in place of a method on one module object: a block's compiled call, and the guards of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from zc import torch_private


class Instead:
    """Stands in place of a method on one module object, and does what ``call`` does. Copies and pickles of the module
    have what ``copied()`` describes, as ``__reduce__`` does."""

    def __init__(self, call: Callable[..., Any], copied: Callable[[], tuple[Any, ...]]) -> None:
        self._call, self._copied = call, copied

    @torch_private.not_compiled_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copied()


def instead(module: nn.Module, name: str, call: Callable[..., Any]) -> Instead:
    """Copies have the class's method."""
    of_module = weakref.ref(module)
    return Instead(call, lambda: (getattr, (of_module(), name)))  # of the copy, whose __dict__ is still empty
