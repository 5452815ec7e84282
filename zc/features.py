"""Puts the features of a model together: what `zc.compile` hands to its ranks and its engine, which import none of
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zc.engine import owners
from zc.engine.agreement import Agreement
from zc.engine.announcements import Announcements
from zc.engine.core import Features
from zc.passes.pipeline import pipelines
from zc.planning.plan import Plan, Way
from zc.ranks.control import Parts
from zc.ranks.encoded import encoded
from zc.ranks.levels import open_levels
from zc.ranks.neighbours import by_memory, find_hosts
from zc.ranks.replicas import between_replicas, split
from zc.ranks.routes import MakeRoute
from zc.ranks.watch import Watch

if TYPE_CHECKING:
    from zc.config import Config

# one line for each feature: without it the rest works
RANKS = Parts(
    find_hosts=find_hosts,
    open_levels=open_levels,
    split=split,
    watch_of=Watch.of_this_process,
)
ROUTES: dict[Way, MakeRoute] = {
    Way.ENCODED: encoded,
    Way.MEMORY: by_memory,
    Way.SHARDS: by_memory,
    Way.REPLICAS: between_replicas,
}


def features_of(plan: Plan, config: Config) -> Features:
    """Those of a model with this plan."""
    from zc.weights import make_weights  # late: these are the longest chains of imports

    return Features(
        pipelines(in_place=config.write_in_place, prove=config.verify, windows=bool(plan.sharded)),
        make_weights,
        owners.OPERATIONS,
        owners.gather_whole,
        ROUTES,
        make_agreement=Announcements if plan.num_ranks > 1 else Agreement,
    )
