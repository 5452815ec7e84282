"""stop-gap"""
from __future__ import annotations
from dataclasses import replace
from torch import fx
from zc.passes import insert_events, place_on_streams, signal_peers
from zc.passes.runner import run_passes
from zc.planning.plan import Plan
from zc.planning.residency import Residency
from zc.schedule.buffer import Buffer, carried_by
from zc.schedule.nodes import change, ops, put
from zc.schedule.spec import Event, FreeWeights, GatherWeights, ReadWeights


def weights_graph(plan: Plan, residency: Residency) -> fx.Graph:
    graph, arena = fx.Graph(), Buffer("arena", 0)
    for k, piece in enumerate(residency.pieces):
        for e in piece.frees:
            put(graph, FreeWeights(e.bucket, arena, e.start, e.stop))
        for e in piece.gathers:
            put(graph, GatherWeights(e.bucket, arena, Buffer("weight", e.bucket), e.start, e.stop))
        put(graph, ReadWeights(arena, k, tuple(e.bucket for e in piece.reads), tuple((e.start, e.stop) for e in piece.reads)))
    graph.output(())
    return graph


def build_weights_schedule(plan: Plan, residency: Residency, *, verify: bool) -> fx.Graph:
    passes = [p._replace(requires=frozenset()) for p in (signal_peers.PASS, place_on_streams.PASS, insert_events.PASS)]
    graph, _ = run_passes(weights_graph(plan, residency), plan, passes, name="weights")
    for node, op in ops(graph):
        if isinstance(op, Event) and carried_by(op.event) is None:
            change(node, replace(op, event="w" + op.event))
    return graph
