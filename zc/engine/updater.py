"""Who updates the masters, and how new weights reach the model. The optimizer calls it around its class's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zc.errors import PlanError

if TYPE_CHECKING:
    from zc.engine.program import Program
    from zc.engine.runtime import Runtime


class Updater:
    """The step of the class updates masters on the device, and gathers follow it. Another one is
    `zc.offload.host_step.HostStep`."""

    moves_slices = False  # True: slices of masters may change their place in a step

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def programs(self) -> list[Program]:
        """The schedules of its own that have run so far, for explain."""
        return []

    def before(self, changed: tuple[int, ...]) -> None:
        """Called before the step of the class. ``changed``: the buckets that it will update."""

    def after(self, changed: tuple[int, ...]) -> None:
        """Called after that step. Brings the new weights to the model."""
        self.publish(changed)

    def publish(self, changed: tuple[int, ...]) -> None:
        """Brings to the model what a method of the class has written into the masters of these buckets."""
        self.runtime.weights.publish(changed)

    def publish_loaded(self, buckets: tuple[int, ...]) -> None:
        """Brings to the model masters that were loaded, and waits, so that the caller may read the weights."""
        self.runtime.weights.publish(buckets, is_exact=True)
        self.runtime.weights.synchronize()

    def take_loaded_state(self, buckets: Sequence[int]) -> None:
        """Called after the optimizer's state was loaded."""

    def flush(self, take_over_writes: Callable[[], None]) -> None:
        """See `zc.flush_state`."""
        raise PlanError("zc.flush_state is for offload='disk', and this model was compiled without")
