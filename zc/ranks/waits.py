"""For which rank a thread waits, and when: noted only while somebody asks, as the clock does (`zc.engine.ledger`).

The host waits where ranks are on CPUs. Elsewhere a device's stream waits by itself, and nothing is noted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

_OF_THREAD = threading.local()


class WaitForRank(NamedTuple):
    """``rank``: its number in the default group; None: a collective, which does not tell whose part came last, or what
    another thread waits for. The times are of time.perf_counter_ns()."""

    rank: int | None
    start: int
    stop: int


@contextlib.contextmanager
def noting_waits() -> Iterator[list[WaitForRank]]:
    """Inside, the waits of this thread come into the list, in their order."""
    before, waits = getattr(_OF_THREAD, "waits", None), list[WaitForRank]()
    _OF_THREAD.waits = waits
    try:
        yield waits
    finally:
        _OF_THREAD.waits = before


def note_wait(rank: int | None, start: int) -> None:
    """A wait for ``rank`` that began at ``start`` and ends now."""
    waits: list[WaitForRank] | None = getattr(_OF_THREAD, "waits", None)
    if waits is not None:
        waits.append(WaitForRank(rank, start, time.perf_counter_ns()))
