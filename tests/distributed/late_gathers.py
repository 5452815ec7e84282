"""Gathers of weights that come late on every rank, so that whoever reads without waiting reads old weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import zc.api
from zc.engine.overlap_gather import WeightGather
from zc.engine.streams import Task, ThreadStreams
from zc.schedule.buffer import COMM


class Late(ThreadStreams):
    """``seconds`` go by before each bucket's gather while ``is_late``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.is_late, self._is_next, self._seconds = False, True, seconds

    def run_on(self, stream: str, task: Task) -> None:
        is_next = self.is_late and stream == COMM and self._is_next
        self._delays = {COMM: self._seconds} if is_next else {}
        self._is_next = self._is_next and not is_next
        super().run_on(stream, task)

    def record(self, event: str, stream: str) -> None:
        self._is_next = self._is_next or event.startswith("done/")  # behind a bucket's last task
        super().record(event, stream)


@contextlib.contextmanager
def late_gathers(seconds: float, kind: type[Late] = Late) -> Iterator[None]:
    """Models that are compiled inside have streams of this kind, and their gathers are late. A backward's reductions
    are on time: a sleep before each of its tasks took most of these tests' time, and shows nothing of gathers."""
    make, publish = zc.api.make_streams, WeightGather.publish

    def publish_late(self: WeightGather, buckets: Sequence[int]) -> None:
        streams = self._found().streams
        streams.is_late = True  # type: ignore[attr-defined]
        try:
            publish(self, buckets)
        finally:
            streams.is_late = False  # type: ignore[attr-defined]

    zc.api.make_streams = lambda device: kind(seconds)
    WeightGather.publish = publish_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        zc.api.make_streams = make
        WeightGather.publish = publish  # type: ignore[method-assign]
