"""The base class of what hooks and Dynamo's caches may hold without keeping the model alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zc.engine.core import Core


class Part:
    """A part of a compiled model. It refers to the model's `Core` weakly, and is used only while the model lives."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    @property
    def core(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core
