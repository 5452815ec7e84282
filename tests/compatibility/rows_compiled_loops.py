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
