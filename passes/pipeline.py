"""The order of the passes. Each is described in its own file, with its IR before and after.

`zc.compile` makes the pipelines and hands them over, so that the core knows no feature that has a pass of its own.
"""

from __future__ import annotations

from torch import fx

from zc.passes import (
    bucket_gradients,
    keep_fusions,
    offload_gradients,
    outline_segments,
    reduce_buckets,
    residency,
    tag_gradients,
    window_weights,
    write_in_place,
)
from zc.passes import verify as proof
from zc.passes.base import Pass, Pipelines
from zc.passes.scheduling import scheduling
from zc.passes.verify import Findings, ProofPart, Verdict
from zc.planning.plan import Plan

PARTS: tuple[ProofPart, ...] = (residency.check,)  # of the proof, beside those that all schedules need


def verify(graph: fx.Graph, plan: Plan) -> Verdict:
    """Proves a schedule: that no two of its operations race, that no wait is too many, that each gradient arrives once,
    and that weights are there while they are read (docs/proof.md).

    The plan says which buffers other schedules share, and where slots lie. Raises RaceError naming both nodes, their
    streams and the buffer, or the wait that nothing needs, or the gradient that does not arrive once.
    """
    return proof.verify(graph, plan, PARTS)


def examine(graph: fx.Graph, plan: Plan) -> Findings:
    """Everything that `verify` would refuse, without raising."""
    return proof.examine(graph, plan, PARTS)


def pipeline(*, in_place: bool, prove: bool = True, windows: bool = False) -> tuple[Pass, ...]:
    """The passes over a backward graph. ``in_place``: compute gradients in their slots where possible; ``windows``: of
    sharded weights, which are there while they are read."""
    passes = [tag_gradients.PASS, bucket_gradients.PASS]
    passes += [write_in_place.PASS] if in_place else []
    passes += [reduce_buckets.PASS, offload_gradients.PASS, keep_fusions.PASS]
    passes += [window_weights.PASS] if windows else []
    return scheduling(*passes, outline_segments.PASS, prove=prove, parts=PARTS)


def pipelines(*, in_place: bool, prove: bool, windows: bool) -> Pipelines:
    """See `pipeline`."""
    backward = pipeline(in_place=in_place, prove=prove, windows=windows)
    forward = scheduling(window_weights.PASS, outline_segments.PASS, prove=prove, parts=PARTS)
    return Pipelines(backward, forward, offload_gradients.landing_graph, PARTS)
