"""Puts the features of a model together: what `zc.compile` hands to its ranks and its engine, which import none of
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zc.engine import owners
from zc.engine.agreement import Agreement
from zc.engine.announcements import Announcements
from zc.engine.core import Features
from zc.passes.pipeline import pipelines
from zc.planning.plan import Plan
from zc.ranks.control import Parts
from zc.ranks.neighbours import find_hosts
from zc.ranks.watch import Watch

if TYPE_CHECKING:
    from zc.config import Config

# one line for each feature: without it the rest works
RANKS = Parts(
    find_hosts=find_hosts,
    watch_of=Watch.of_this_process,
)


def features_of(plan: Plan, config: Config) -> Features:
    """Those of a model with this plan."""
    from zc.weights import OPERATIONS, make_weights  # late: these are the longest chains of imports

    return Features(
        pipelines(in_place=config.write_in_place, prove=config.verify, windows=bool(plan.sharded)),
        make_weights,
        {**owners.OPERATIONS, **OPERATIONS},
        owners.gather_whole,
        make_agreement=Announcements if plan.num_ranks > 1 else Agreement,
    )
