"""Weights that can't be read now: not yet (``overlap_gather``), or not here (stage 3, ``shard_frozen``).

How they are gathered is an operation of the core (`zc.engine.operations.gather`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zc.engine.weights import Weights
from zc.weights.overlapped import OverlappedWeights

if TYPE_CHECKING:
    from zc.engine.core import Core


def make_weights(core: Core) -> Weights:
    """The way in which this model's plan keeps weights."""
    if core.plan.sharded:
        from zc.weights.sharded_weights import ShardedWeights  # no other plan needs its planner and its passes

        return ShardedWeights(core)
    return OverlappedWeights(core) if core.plan.overlap_gather else Weights(core)
