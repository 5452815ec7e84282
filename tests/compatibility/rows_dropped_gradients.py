"""Item 7: gradients that are dropped, by whatever way, and ranks that differ between two updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

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


def model(s: Script) -> None:
    s.model.zero_grad()


def optimizer_class(s: Script) -> None:
    type(s.optimizer).zero_grad(s.optimizer)


@row(7, "a backward raises after all gradients and is caught, then model.zero_grad()")
def caught_after_all(s: Script) -> None:
    _caught(s, fails_after_all, model)


@row(7, "a backward raises half-way and is caught, then model.zero_grad()")
def caught_half_way(s: Script) -> None:
    _caught(s, fails_half_way, model)


@row(7, "a backward raises half-way and is caught, then .grad = None of what the optimizer holds")
def caught_then_slices(s: Script) -> None:
    _caught(s, fails_half_way, slices_by_hand)


def _caught(s: Script, fail: Callable[[Script, int], None], clear: Callable[[Script], None]) -> None:
    for step in range(STEPS):
        if step % 2:
            fail(s, step)
            clear(s)
        s.loss(step).backward()
        s.update()


@row(7, "the second backward raises and is caught, then param.grad = None")
def second_raises(s: Script) -> None:
    _second(s, by_hand)


@row(7, "the second backward raises and is caught, then the zero_grad of the optimizer's class")
def second_raises_then_class(s: Script) -> None:
    _second(s, optimizer_class)


def _second(s: Script, clear: Callable[[Script], None]) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        if step == 1:
            fails_after_all(s, step)
            clear(s)
            continue
        s.update()


@row(7, "gradients cleared by the zero_grad of the optimizer's class")
def cleared_by_class(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.loss(step, 1).backward()
        s.optimizer.step()
        optimizer_class(s)


@row(7, "a skipped step, by .grad = None of what the optimizer holds")
def skipped_by_slices(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        if step % 2:
            s.optimizer.step()
        slices_by_hand(s)


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


@row(
    7,
    "the second backward raises and nothing is cleared",
    refused={"always": "ZcError: a backward or a reduction raised"},
)
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


@row(7, "some of what the optimizer holds loses its .grad")
def some_params(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
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
