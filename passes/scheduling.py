"""The passes that make a schedule of a graph, and prove it."""

from __future__ import annotations

from zc.passes import insert_events, place_on_streams, verify
from zc.passes.base import Pass


def scheduling(*first: Pass, prove: bool, prefix: str = "e") -> tuple[Pass, ...]:
    """The passes ``first``, and those that make a schedule of their result. ``prove``: verify it; ``prefix``: of the
    names of its events."""
    passes = (*first, place_on_streams.PASS, insert_events.with_prefix(prefix))
    return (*passes, verify.PASS) if prove else passes
