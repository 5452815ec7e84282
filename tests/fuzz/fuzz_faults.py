"""Faults that the fuzzer has to find: negative controls, put into each rank before its programs run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def loses_microbatches() -> Iterator[None]:
    """What a block of zc.no_sync ends with, no gradient outlives: deepspeed#7985's fault, from the other side."""
    import zc

    whole = zc.no_sync

    @contextlib.contextmanager
    def forgetful(model):  # type: ignore[no-untyped-def]
        with whole(model):
            yield
        model.zero_grad()

    zc.no_sync = forgetful
    try:
        yield
    finally:
        zc.no_sync = whole


@contextlib.contextmanager
def clips_too_little() -> Iterator[None]:
    """zc.clip_grad_norm_ leaves the gradients twice as long as it was told; the norm that it returns is right."""
    import zc

    right = zc.clip_grad_norm_
    zc.clip_grad_norm_ = lambda model, max_norm: right(model, 2 * max_norm)
    try:
        yield
    finally:
        zc.clip_grad_norm_ = right
