"""What features decide in a model's engine. `zc.compile` puts it together (`zc.features`) and hands it over, so that
nothing here knows which features there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from zc.engine.agreement import Agreement

if TYPE_CHECKING:
    from zc.engine.buffers import Accumulators, Buffers, Function
    from zc.engine.core import Core
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
    make_agreement: Callable[[Accumulators, Group], Agreement] = Agreement
