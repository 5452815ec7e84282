"""How hooks and Dynamo's caches refer to a compiled model without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from zc.engine.core import Core

T = TypeVar("T")


class Part:
    """A part of a compiled model. It refers to the model's `Core` weakly, and is used only while the model lives."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    @property
    def core(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core


def weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """A function that calls ``method`` while its object lives, and does nothing later. For hooks, above all those on
    tensors: Python's collector does not look into them, so a cycle through them would keep a dropped model for ever.

    Dynamo compiles none of it: in a loop that the caller has compiled, a backward is a graph break, and Dynamo would
    compile each frame that its hooks run.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> T | None:
        alive = reference()
        return None if alive is None else alive(*args)

    disabled: Callable[..., T | None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled
