"""Streams for schedules that run in one thread."""

from __future__ import annotations

from typing import Any

import torch

from zc.engine.ledger import Clock


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
