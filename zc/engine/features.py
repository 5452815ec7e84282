"""What features decide in a model's engine: `Features`, and each optimizer's `Updater`. `zc.compile` puts them together
(`zc.features`) and hands them over, so that nothing here knows which features there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from zc.engine.agreement import Agreement
from zc.errors import PlanError

if TYPE_CHECKING:
    from zc.engine.buffers import Buffers, Function
    from zc.engine.core import Core
    from zc.engine.program import Program
    from zc.engine.runtime import Runtime
    from zc.engine.weights import Weights
    from zc.passes.base import Pipelines
    from zc.planning.plan import Plan, Way
    from zc.ranks.group import Group
    from zc.ranks.routes import MakeRoute
    from zc.schedule.spec import Op

# The gradients of the parameters that this rank updates, by bucket: of optimizers that read whole ones
GatherWhole = Callable[["Plan", "Buffers", "Group", Sequence[int]], dict[int, Tensor]]


class Features(NamedTuple):
    """``pipelines``: the passes. ``make_weights``: how weights reach those who read them. ``operations``: the functions
    of kinds of nodes that only some feature's schedules have. ``gather_whole``: None if no optimizer needs it.
    ``routes``: of the ways in which a feature makes gradients and weights travel. ``make_agreement``: how ranks come to
    reduce the same."""

    pipelines: Pipelines
    make_weights: Callable[[Core], Weights]
    operations: Mapping[type[Op], Function] = {}
    gather_whole: GatherWhole | None = None
    routes: Mapping[Way, MakeRoute] = {}
    make_agreement: Callable[[Core], Agreement] = Agreement


class Updater:
    """Who updates an optimizer's masters, and how new weights reach the model. The optimizer calls it around its
    class's step, which here updates masters on the device; gathers follow it. Another one is
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
        self.runtime.weights.publish(changed)

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
