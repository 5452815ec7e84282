"""Item 5: activation checkpointing."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
from rows import Script, plain, row, sgd
from rows_params import language, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

# tests/distributed/test_gradients.py trains both
row(5, "checkpointing, non-reentrant", make=lambda: GPT(dim=16, layers=2, use_checkpoint=True), full_only=True)(
    language
)
row(5, "checkpointing, reentrant", make=lambda: GPT(16, 2, use_checkpoint=True, reentrant=True), full_only=True)(
    language
)


def _keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(F.gelu(x)))

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)
        return self.last(checkpoint(self.part, self.first(x), use_reentrant=False, context_fn=contexts))


row(5, "checkpointing, selective (context_fn)", make=Selective)(plain)


class TiedInCheckpoints(nn.Module):
    """One layer inside two checkpoints and outside of them ("computed twice": deepspeed#988, deepspeed#7780)."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.first, self.shared = reentrant, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: F.gelu(self.shared(x)), x, use_reentrant=self.reentrant)
        return self.shared(x)


row(5, "a layer shared by checkpoints, reentrant", make=lambda: TiedInCheckpoints(True))(plain)


@row(5, "checkpointing, reentrant, several backwards a step",
     make=lambda: GPT(dim=16, layers=1, use_checkpoint=True, reentrant=True))  # fmt: skip
def checkpoint_backwards(s: Script) -> None:
    for step in range(3):
        for m in range(2):
            x, y = tokens(s, 10 * step + m)
            F.cross_entropy(s.model(x).flatten(0, 1), y.flatten()).backward()
        s.update()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]


row(5, "checkpoint_sequential", make=Sequences)(plain)


class CheckpointedEager(TiedInCheckpoints):
    """A checkpoint around a part that does not compile."""

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return F.gelu(self.shared(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(checkpoint(self.outside, self.first(x), use_reentrant=self.reentrant))


row(5, "a checkpoint around an eager part, reentrant", make=lambda: CheckpointedEager(True))(plain)


@row(5, "autocast to bf16 with checkpointing", optimizer=sgd, oracle_dtype=torch.float32, tolerance=2e-3,
     make=lambda: TiedInCheckpoints(False))  # fmt: skip
def autocast_checkpoint(s: Script) -> None:
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = s.loss(step)
        loss.backward()
        s.update()
