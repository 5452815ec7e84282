"""Puts the features of one model together: what `zc.compile` hands to the engine, which imports none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zc.engine import owners, weight_operations
from zc.engine.features import Features
from zc.passes.pipeline import pipelines
from zc.planning.hops import Way
from zc.ranks.encoded import encoded

if TYPE_CHECKING:
    from zc.config import Config
    from zc.planning.plan import Plan


def features_of(plan: Plan, config: Config) -> Features:
    """Those of a model with this plan."""
    from zc.weights import make_weights  # late: these are the longest chains of imports

    return Features(
        pipelines(in_place=config.write_in_place, prove=config.verify, windows=bool(plan.sharded)),
        make_weights,
        {**owners.OPERATIONS, **weight_operations.OPERATIONS},
        owners.gather_whole,
        {Way.ENCODED: encoded},
    )
