"""Item 7: gradients that are dropped, by whatever way, and ranks that differ between two updates."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from rows import STEPS, Script, row
from rows_precision import FP16, scaler_of
from torch import Tensor


class TripError(RuntimeError):
    """What a backward of these loops raises (an out-of-memory error, say)."""


def trip(_: Tensor) -> None:
    raise TripError


def fails_after_all(s: Script, step: int) -> None:
    """A backward that raises when the model's gradients have been made."""
    x, y = s.batch(step, 7)
    x.requires_grad_().register_hook(trip)
    with contextlib.suppress(TripError):
        F.mse_loss(s.model(x), y).backward()


def fails_half_way(s: Script, step: int) -> None:
    """A backward that raises when some gradients have been made, outside of compiled code."""
    x, y = s.batch(step, 7)
    hidden = s.model[1](s.model[0](x))
    hidden.register_hook(trip)
    with contextlib.suppress(TripError):
        F.mse_loss(s.model[2](hidden), y).backward()


def by_hand(s: Script) -> None:
    for param in s.model.parameters():
        param.grad = None


def slices_by_hand(s: Script) -> None:
    for group in s.optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


WAYS = {
    "model.zero_grad()": lambda s: s.model.zero_grad(),
    "param.grad = None": by_hand,
    "optimizer.zero_grad()": lambda s: s.optimizer.zero_grad(),
    "the zero_grad of the optimizer's class": lambda s: type(s.optimizer).zero_grad(s.optimizer),
    ".grad = None of what the optimizer holds": slices_by_hand,
}


def add_rows() -> None:
    for name, clear in WAYS.items():
        for where, fail in (("after all gradients", fails_after_all), ("half-way", fails_half_way)):
            if where == "half-way" or "optimizer" not in name:
                row(7, f"a backward raises {where} and is caught, then {name}")(_caught(fail, clear))
        row(7, f"the second backward raises and is caught, then {name}")(_second(clear))
        row(7, f"gradients cleared by {name}")(_cleared(clear))
        row(7, f"a skipped step, by {name}")(_skipped(clear))


def _caught(fail: Any, clear: Any) -> Any:
    def loop(s: Script) -> None:
        for step in range(STEPS):
            if step % 2:
                fail(s, step)
                clear(s)
            s.loss(step).backward()
            s.update()

    return loop


def _second(clear: Any) -> Any:
    def loop(s: Script) -> None:
        for step in range(STEPS):
            s.loss(step).backward()
            if step == 1:
                fails_after_all(s, step)
                clear(s)
                continue
            s.update()

    return loop


def _cleared(clear: Any) -> Any:
    def loop(s: Script) -> None:
        for step in range(STEPS):
            s.loss(step).backward()
            s.loss(step, 1).backward()
            s.optimizer.step()
            clear(s)

    return loop


def _skipped(clear: Any) -> Any:
    def loop(s: Script) -> None:
        for step in range(STEPS):
            s.loss(step).backward()
            if step % 2:
                s.optimizer.step()
            clear(s)

    return loop


add_rows()


def fails_on_ranks_apart(s: Script) -> None:
    """A backward that raises before any gradient on rank 0, and when some were made on the others."""
    if s.rank > 0:
        fails_half_way(s, 0)
    else:
        out = s.model(s.batch(0, 7)[0])
        out.register_hook(trip)
        with contextlib.suppress(TripError):
            out.sum().backward()


@row(7, "a backward raises before any gradient on one rank, half-way on another, then optimizer.zero_grad()")
def raised_apart(s: Script) -> None:
    for step in range(STEPS):
        fails_on_ranks_apart(s)
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.update()


@row(7, "a backward raises before any gradient on one rank, half-way on another, then .grad = None by hand",
     refused={"eager": "RankMismatchError: what the gradients hold"})  # fmt: skip
def raised_apart_by_hand(s: Script) -> None:
    fails_on_ranks_apart(s)
    slices_by_hand(s)
    s.loss(0).backward()
    s.update()


@row(7, "the second backward raises and nothing is cleared", refused={"always": "ZcError: a backward raised"})
def raised_and_kept(s: Script) -> None:
    s.loss(0).backward()
    fails_half_way(s, 0)
    s.update()


@row(7, "zero_grad(set_to_none=False) of the optimizer's class")
def zeros_of_class(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        if step % 2:
            s.optimizer.step()
        type(s.optimizer).zero_grad(s.optimizer, set_to_none=False)


@row(7, "some of what the optimizer holds loses its .grad",
     refused={"always": "ZcError: the optimizer's own tensor of"})  # fmt: skip
def some_slices(s: Script) -> None:
    s.loss(0).backward()
    params = s.optimizer.param_groups[0]["params"]
    params[0].grad = None
    s.update()


@row(7, "a norm read before a GradScaler's step that one rank's overflow skips", **FP16)
def norm_then_overflow(s: Script) -> None:
    scaler = scaler_of(s)
    for step in range(STEPS):
        x, y = s.batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(s.model(x), y)
        if step == 1:
            loss = loss + s.model[0].bias[3] * (float("inf") if s.rank == 0 else 0.0)
        scaler.scale(loss).backward()
        s.reduced()
        for param in s.model.parameters():
            param.grad.norm()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
    s.note("scale", scaler.get_scale())
