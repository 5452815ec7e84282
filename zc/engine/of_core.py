"""The parts of a compiled model's engine that must not keep the model alive: hooks and Dynamo's caches hold them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from zc.planning.layout import Slot
from zc.planning.plan import MOVED, Bucket

if TYPE_CHECKING:
    from zc.engine.core import Core


class OfCore:
    """Has the model's `Core` as long as somebody else holds it."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    @property
    def core(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core


def params_in(core: Core, bucket: Bucket) -> Iterator[tuple[Slot, nn.Parameter]]:
    """The parameters that lie in a bucket, without those that have moved to another one."""
    for slot in bucket.slots:
        if slot.name != MOVED:
            yield slot, core.placed[slot.name]


def every_bucket(core: Core) -> list[int]:
    """Those whose weights are sharded."""
    return [bucket.index for bucket in core.plan.sharded]
