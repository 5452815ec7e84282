"""The gathers of a pass (stage 3), as a proved schedule that runs piece by piece, one piece before each use.

`zc.planning.residency` plans where each bucket lies. Bucket 3 is read first, then bucket 2::

       comm | gather(3, "arena[0]", src="weight[3]", extent=(0, 4096))          piece 0
       comm | gather(2, "arena[0]", src="weight[2]", extent=(4096, 8192))
    compute | read_weights("arena[0]", 0, (3,), spans=((0, 4096),))
    compute | free_weights(3, "arena[0]", 0, 4096)                              piece 1
    compute | read_weights("arena[0]", 1, (2,), spans=((4096, 8192),))
    compute | free_weights(2, "arena[0]", 4096, 8192)                           the rest

Between two pieces run the graphs that read: schedules of their own, on the same streams, which touch neither the arena
nor the shards. They add order and take none away, so the proof of all pieces in a row holds for them. Their events have
other names.
"""

from __future__ import annotations

from torch import fx

from zc.planning.plan import Plan
from zc.planning.residency import Residency
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import FreeWeights, ReadWeights, gather_node

ARENA = Buffer("arena", 0)
PREFIX = "w"  # of the names of its events


def weights_graph(plan: Plan, residency: Residency) -> fx.Graph:
    """The gathers, reads and frees of a plan of residency, in its order. ``meta["uses"]`` of the output tells the proof
    which buckets each use reads."""
    graph = fx.Graph()
    for use, piece in enumerate(residency.pieces):
        for bucket, start, stop in piece.frees:
            put(graph, FreeWeights(bucket, ARENA, start, stop))
        for bucket, start, stop in piece.gathers:
            put(graph, gather_node(plan, bucket, ARENA, (start, stop)))
        if use < len(residency.uses):
            spans = tuple((start, stop) for _, start, stop in piece.reads)
            put(graph, ReadWeights(ARENA, use, tuple(bucket for bucket, _, _ in piece.reads), spans=spans))
    graph.output(()).meta["uses"] = residency.uses
    return graph
