"""The order of the passes. Each is described in its own file, with its IR before and after."""

from __future__ import annotations

from zc.passes import (
    bucket_gradients,
    insert_events,
    keep_fusions,
    offload_gradients,
    outline_segments,
    place_on_streams,
    reduce_buckets,
    tag_gradients,
    verify,
    window_weights,
    write_in_place,
)
from zc.passes.base import Pass


def pipeline(*, in_place: bool, prove: bool = True, windows: bool = False) -> tuple[Pass, ...]:
    """The passes over a backward graph. ``in_place``: compute gradients in their slots where possible; ``windows``: of
    sharded weights, which are there while they are read."""
    passes = [tag_gradients.PASS, bucket_gradients.PASS]
    if in_place:
        passes.append(write_in_place.PASS)
    passes += [reduce_buckets.PASS, offload_gradients.PASS, keep_fusions.PASS]
    if windows:
        passes.append(window_weights.PASS)
    return scheduling(*passes, outline_segments.PASS, prove=prove)


def forward_pipeline(*, prove: bool = True) -> tuple[Pass, ...]:
    """The passes over a forward graph whose weights come while it reads them."""
    return scheduling(window_weights.PASS, outline_segments.PASS, prove=prove)


def scheduling(*first: Pass, prove: bool, prefix: str = "e") -> tuple[Pass, ...]:
    """The passes ``first``, and those that make a schedule of their result. ``prove``: verify it; ``prefix``: of the
    names of its events."""
    passes = (*first, place_on_streams.PASS, insert_events.with_prefix(prefix))
    return (*passes, verify.PASS) if prove else passes
