"""Item 5: activation checkpointing, autocast, fp16 with a GradScaler, bf16 parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, mlp
from rows import Script, plain, row, sgd
from rows_params import language
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zc

row(5, "checkpointing, non-reentrant", make=lambda: GPT(dim=16, layers=2, use_checkpoint=True))(language)
row(5, "checkpointing, reentrant", make=lambda: GPT(dim=16, layers=2, use_checkpoint=True, reentrant=True))(language)


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
    """One layer inside two checkpoints and outside of them ("computed twice": DS#988, DS#7780)."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.first, self.shared = reentrant, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: F.gelu(self.shared(x)), x, use_reentrant=self.reentrant)
        return self.shared(x)


row(5, "a layer shared by checkpoints, non-reentrant", make=lambda: TiedInCheckpoints(False))(plain)
row(5, "a layer shared by checkpoints, reentrant", make=lambda: TiedInCheckpoints(True))(plain)


@row(5, "autocast to bf16", optimizer=sgd, oracle_dtype=torch.float32, tolerance=2e-3,
     note="bf16 rounds at other places in compiled code")  # fmt: skip
def autocast(s: Script) -> None:
    for step in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = s.loss(step)
        loss.backward()
        s.update()


@row(5, "autocast to bf16, backward inside", optimizer=sgd, oracle_dtype=torch.float32, tolerance=2e-3)
def autocast_inside(s: Script) -> None:
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s.loss(step).backward()
        s.update()


def fp16_loss(s: Script, step: int, microbatch: int = 0) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return s.loss(step, microbatch)


def scaler_of(s: Script, scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


FP16: dict[str, Any] = {"optimizer": sgd, "oracle_dtype": torch.float32, "tolerance": 2e-3}


@row(5, "fp16 with a GradScaler", **FP16)
def scaled(s: Script) -> None:
    scaler = scaler_of(s)
    for step in range(5):
        scaler.scale(fp16_loss(s, step)).backward()
        s.reduced()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
    s.note("scale", scaler.get_scale())


@row(5, "fp16 with a GradScaler, unscaled and clipped", **FP16)
def scaled_clipped(s: Script) -> None:
    scaler = scaler_of(s)
    for step in range(5):
        for m in range(2):
            scaler.scale(fp16_loss(s, step, m)).backward()
        s.reduced()
        scaler.unscale_(s.optimizer)
        s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.05))
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()


@row(5, "fp16 overflow in one element of one rank: no rank steps", **FP16)
def overflow(s: Script) -> None:
    scaler = scaler_of(s)
    for step in range(5):
        x, y = s.batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(s.model(x), y)
        if step in (1, 2):
            loss = loss + s.model[2 * (step - 1)].bias[3] * (float("inf") if s.rank == step - 1 else 0.0)
        before = [p.detach().clone() for p in s.model.parameters()]
        scaler.scale(loss).backward()
        s.reduced()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
        same = all(torch.equal(b, p) for b, p in zip(before, s.model.parameters(), strict=True))
        assert same == (step in (1, 2)), f"step {step}: a skipped step changes nothing (DS#8432)"
    s.note("scale", scaler.get_scale())
    if s.is_zc:
        assert "no rank takes that step" in zc.explain(s.model).sections["notes"], "a skipped step is announced (I10)"


@row(5, "bf16 parameters from the caller", make=lambda: mlp().bfloat16(), refused={}, optimizer=sgd,
     oracle_dtype=torch.float32, tolerance=2e-2, note="against fp32")  # fmt: skip
def bf16_params(s: Script) -> None:
    for step in range(5):
        x, y = s.batch(step)
        dtype = next(s.model.parameters()).dtype
        F.mse_loss(s.model(x.to(dtype)).float(), y).backward()
        s.update()
