"""The order of the passes. Each is described in its own file, with its IR before and after."""

from __future__ import annotations

from zc.passes import (
    bucket_gradients,
    insert_events,
    offload_gradients,
    outline_segments,
    place_on_streams,
    reduce_buckets,
    tag_gradients,
    verify,
    write_in_place,
)
from zc.passes.base import Pass

PIPELINE: tuple[Pass, ...] = (
    tag_gradients.PASS,
    bucket_gradients.PASS,
    write_in_place.PASS,
    reduce_buckets.PASS,
    offload_gradients.PASS,
    outline_segments.PASS,
    place_on_streams.PASS,
    insert_events.PASS,
    verify.PASS,
)
