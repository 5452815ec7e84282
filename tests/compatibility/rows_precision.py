"""Item 5: activation checkpointing, autocast, fp16 with a GradScaler, bf16 parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from models import mlp
from rows import Script, row, sgd
from torch import Tensor
from torch.optim import Optimizer, RMSprop

import zc


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
        s.synchronize()
        same = all(torch.equal(b, p) for b, p in zip(before, s.model.parameters(), strict=True))
        assert same == (step in (1, 2)), f"step {step}: a skipped step changes nothing (deepspeed#8432)"
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


BF16: dict[str, Any] = {
    "make": lambda: mlp().bfloat16(), "optimizer": sgd, "oracle_dtype": torch.float32, "tolerance": 2e-2,
}  # fmt: skip


def narrow_loss(s: Script, step: int, microbatch: int = 0) -> Tensor:
    x, y = s.batch(step, microbatch)
    return F.mse_loss(s.model(x.to(next(s.model.parameters()).dtype)).to(y.dtype), y)


@row(5, "bf16 parameters changed by hand between steps", note="against fp32", **BF16)
def bf16_by_hand(s: Script) -> None:
    for step in range(5):
        narrow_loss(s, step).backward()
        s.update()
        if step == 2:
            with torch.no_grad():
                for param in s.model.parameters():
                    param.mul_(0.5)


@row(5, "bf16 parameters, load_state_dict between steps", note="against fp32", **BF16)
def bf16_load(s: Script) -> None:
    state = {name: value.clone() for name, value in s.model.state_dict().items()}
    for step in range(5):
        narrow_loss(s, step).backward()
        s.update()
        if step == 2:
            s.model.load_state_dict({name: value * 0.5 for name, value in state.items()})


def rmsprop(params: Iterable[Any]) -> Optimizer:
    return RMSprop(params, lr=1e-3)


def wgan(s: Script) -> None:
    """The critic's loop of WGAN (Arjovsky et al., arXiv:1701.07875, algorithm 1)."""
    for step in range(5):
        narrow_loss(s, step).backward()
        s.update()
        for param in s.model.parameters():
            param.data.clamp_(-0.1, 0.1)


def swapped(s: Script) -> None:
    """Averaged weights are swapped in to evaluate, and back; the last ones stay in."""
    average = [torch.zeros_like(param, dtype=s.dtype) for param in s.model.parameters()]
    for step in range(5):
        narrow_loss(s, step).backward()
        s.update()
        before = [param.data.clone() for param in s.model.parameters()]
        for param, mean in zip(s.model.parameters(), average, strict=True):
            mean.lerp_(param.detach().to(mean.dtype), 0.5)
            param.data.copy_(mean)
        s.note(f"evaluated {step}", narrow_loss(s, step, 1))
        for param, value in zip(s.model.parameters(), before, strict=True):
            if step != 3:
                param.data.copy_(value)


row(4, "param.data.clamp_ after each step (WGAN)", optimizer=rmsprop)(wgan)
row(4, "param.data.clamp_ after each step (WGAN), param_dtype=torch.bfloat16", optimizer=rmsprop, note="against fp32",
    options={"param_dtype": torch.bfloat16}, oracle_dtype=torch.float32, tolerance=2e-2)(wgan)  # fmt: skip
row(4, "averaged weights swapped in through param.data", optimizer=sgd)(swapped)
row(4, "averaged weights swapped in through param.data, offload", optimizer=sgd, options={"offload": "cpu"})(swapped)


@row(5, "fp16 parameters with a GradScaler", note="against fp32", **{**BF16, "make": lambda: mlp().half()})
def fp16_params(s: Script) -> None:
    scaler = scaler_of(s, 128.0)
    for step in range(5):
        scaler.scale(narrow_loss(s, step)).backward()
        s.reduced()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()


@row(5, "fp16 overflow in one microbatch of one rank", **FP16)
def overflow_microbatch(s: Script) -> None:
    scaler = scaler_of(s)
    for step in range(4):
        for m in range(2):
            loss = fp16_loss(s, step, m)
            if (step, m, s.rank) == (1, 0, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        s.reduced()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
    s.note("scale", scaler.get_scale())
