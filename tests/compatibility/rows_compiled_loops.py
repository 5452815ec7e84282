"""Loops whose author calls torch.compile on more than the model."""

from __future__ import annotations

import torch
from rows import STEPS, Script, row


@row(13, "the whole training step under the author's own torch.compile")
def compiled_step(s: Script) -> None:
    def step(number: int) -> None:
        s.loss(number).backward()
        s.update()

    if s.is_zc:
        step = torch.compile(step, backend="aot_eager")
    for number in range(STEPS):
        step(number)


@row(13, "forward and backward under the author's own torch.compile, the optimizer's step under another")
def compiled_parts(s: Script) -> None:
    def passes(number: int) -> None:
        s.loss(number).backward()

    def update() -> None:
        s.optimizer.step()

    if s.is_zc:
        passes, update = (torch.compile(part, backend="aot_eager") for part in (passes, update))
    for number in range(STEPS):
        passes(number)
        update()
        s.optimizer.zero_grad()
