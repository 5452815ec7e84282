"""Streams that run schedules in one thread, and streams that are late."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from zc.engine.ledger import Clock
from zc.engine.streams import Task, ThreadStreams


class Inline:
    """Every stream is the calling thread."""

    clock = Clock(torch.device("cpu"))

    def run_on(self, stream: str, task: Any) -> None:
        task()

    def record(self, event: str, stream: str) -> None:
        pass

    wait = record

    def mark(self) -> None:
        pass

    def hand_to_main(self, tensors: Any, marks: Any) -> None:
        pass


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
