"""Weights that can't be read now: not yet (``overlap_gather``), or not here (stage 3, ``shard_frozen``); and what the
nodes do that say when sharded weights are read, and when their bytes are free.

These nodes do nearly nothing: they stand for the reads of the graphs around them, so that the proof sees these. How
weights are gathered is an operation of the core (`zc.engine.operations.gather`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zc.engine.buffers import Accumulators, Function
from zc.engine.weights import Weights
from zc.log import log
from zc.schedule import spec
from zc.schedule.spec import Op, Spans
from zc.weights.overlapped import OverlappedWeights

if TYPE_CHECKING:
    from zc.engine.core import Core


def make_weights(core: Core) -> Weights:
    """The way in which this model's plan keeps weights."""
    if core.plan.sharded:
        from zc.weights.sharded_weights import ShardedWeights  # no other plan needs its planner and its passes

        return ShardedWeights(core)
    return OverlappedWeights(core) if core.plan.overlap_gather else Weights(core)


def free_weights(accs: Accumulators, bucket: int, buffer: str, start: int, stop: int) -> None:
    log.debug("bucket %d: its weights are gone", bucket)


def read_weights(accs: Accumulators, buffer: str, use: int, buckets: Sequence[int], spans: Spans | None) -> None:
    """Nothing to do: the graph whose window this is reads them now."""


def take_weights(accs: Accumulators, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    return accs.on_take(places)


OPERATIONS: dict[type[Op], Function] = {
    spec.TakeWeights: take_weights, spec.ReadWeights: read_weights, spec.FreeWeights: free_weights,
}  # fmt: skip
