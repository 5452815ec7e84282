"""Gathers of weights that come late on every rank, so that whoever reads without waiting reads old weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from models import mean_square, mlp, vectors
from torch import nn
from training_runs import adamw

import zc.api
from zc.engine.streams import Task, ThreadStreams
from zc.schedule.buffer import COMM, MAIN
from zc.weights.overlapped import OverlappedWeights

DIM, DEPTH, BUCKET = 32, 4, 5000  # one bucket a layer
LATE = 0.02  # seconds before each bucket's gather
VERY_LATE = 0.07  # where a single read has to come before the last one


class Delayed(ThreadStreams):
    """A stream in ``delays`` sleeps so many seconds before each of its tasks."""

    def __init__(self, delays: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.delays = dict(delays or {})

    def run_on(self, stream: str, task: Task) -> None:
        seconds = self.delays.get(stream, 0.0)

        def late() -> object:
            time.sleep(seconds)
            return task()

        super().run_on(stream, late if seconds else task)


class Late(Delayed):
    """``seconds`` go by before each bucket's gather while ``is_late``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.is_late, self._is_next, self._seconds = False, True, seconds

    def run_on(self, stream: str, task: Task) -> None:
        is_next = self.is_late and stream == COMM and self._is_next
        self.delays = {COMM: self._seconds} if is_next else {}
        self._is_next = self._is_next and not is_next
        super().run_on(stream, task)

    def record(self, event: str, stream: str) -> None:
        self._is_next = self._is_next or event.startswith("done/")  # after a bucket's last task
        super().record(event, stream)


class Careless(Late):
    """The main stream does not wait for gathers."""

    def wait(self, event: str, stream: str) -> None:
        if not (stream == MAIN and event.startswith("done/gathered")):
            super().wait(event, stream)


@contextlib.contextmanager
def late_gathers(seconds: float, kind: type[Late] = Late) -> Iterator[None]:
    """Models that are compiled inside have streams of this kind, and their gathers are late. A backward's reductions
    are on time: a sleep before each of its tasks took most of these tests' time, and shows nothing of gathers."""
    make, publish = zc.api.make_streams, OverlappedWeights.publish

    def publish_late(self: OverlappedWeights, buckets: Sequence[int]) -> None:
        streams = self.core.streams
        streams.is_late = True  # type: ignore[attr-defined]
        try:
            publish(self, buckets)
        finally:
            streams.is_late = False  # type: ignore[attr-defined]

    zc.api.make_streams = lambda device: kind(seconds)
    OverlappedWeights.publish = publish_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        zc.api.make_streams = make
        OverlappedWeights.publish = publish  # type: ignore[method-assign]


Weights = dict[str, torch.Tensor]


def train_late(
    rank: int,
    streams: type[Late],
    look: Callable[[nn.Module], None] | None = None,
    num_steps: int = 4,
    late: float = LATE,
    **options: Any,
) -> tuple[Weights, str]:
    """Weights after ``num_steps`` updates, and the explanation. ``look`` is called right after each update."""
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, DEPTH)
    batch = vectors(DIM, 8)
    with late_gathers(late if options.get("overlap_gather") else 0.0, streams):
        model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, **options)
        for step in range(num_steps):
            mean_square(model, batch(rank, step, 0)).backward()
            optimizer.step()
            if look is not None:
                look(model)
            optimizer.zero_grad()
    explanation = str(zc.explain(model))
    return {name: t.clone() for name, t in model.state_dict().items()}, explanation


def last_weight(model: nn.Module) -> nn.Parameter:
    """Of the layer that is gathered last."""
    return list(model.parameters())[-2]


