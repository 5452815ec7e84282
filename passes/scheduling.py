"""The passes that make a schedule of a graph, and prove it."""

from __future__ import annotations

from collections.abc import Sequence

from zc.passes import insert_events, place_on_streams, verify
from zc.passes.base import Pass
from zc.passes.verify import Part


def scheduling(*first: Pass, prove: bool, prefix: str = "e", parts: Sequence[Part] = ()) -> tuple[Pass, ...]:
    """The passes ``first``, and those that make a schedule of their result. ``prove``: verify it; ``prefix``: of the
    names of its events; ``parts``: of the proof, that features bring."""
    passes = (*first, place_on_streams.PASS, insert_events.with_prefix(prefix))
    return (*passes, verify.with_parts(parts)) if prove else passes
