"""Item 7: sums over tokens, of which ranks and microbatches have different numbers (zc.count)."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import STEPS, Script, average, row, several
from torch import Tensor

import zc


def backward(s: Script, step: int, microbatch: int = 0) -> int:
    """The sum over 1 to 5 samples; how many they are."""
    num = 1 + (s.rank + 2 * step + 3 * microbatch) % 5
    x, y = s.batch(step, microbatch, num)
    if s.is_zc:
        zc.count(s.model, num)
    F.mse_loss(s.model(x), y, reduction="sum").backward()
    return num


def divide(s: Script, num: int) -> None:
    """Plain PyTorch: the mean over ranks, and from it the mean over all samples, of which this rank has ``num``."""
    if s.is_zc:
        return
    total = torch.tensor(num)
    dist.all_reduce(total)
    for optimizer in several(s.optimizer):
        average(optimizer)
        for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            param.grad *= s.world_size / total.item()


@row(7, "sums over other numbers of samples, by zc.count")
def samples_are_counted(s: Script) -> None:
    for step in range(STEPS):
        divide(s, backward(s, step) + backward(s, step, 1))
        s.update()


@row(7, "zc.count, clipping, microbatches in no_sync")
def counted_and_clipped(s: Script) -> None:
    for step in range(STEPS):
        num = 0
        for microbatch in range(3):
            with s.no_sync() if microbatch < 2 else contextlib.nullcontext():
                num += backward(s, step, microbatch)
        divide(s, num)
        s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.05))
        s.update()


@row(7, "zc.count where ranks have other numbers of microbatches")
def counted_apart(s: Script) -> None:
    for step in range(STEPS):
        nums = [backward(s, step, microbatch) for microbatch in range(1 + (s.rank + step) % 2)]
        divide(s, sum(nums))
        s.update()


@row(
    7, "zc.count forgotten in a microbatch of one rank",
    refused={"always": "ZcError: zc.count must be called once for each backward of an update"},
)  # fmt: skip
def counted_once(s: Script) -> None:
    for step in range(STEPS):
        backward(s, step)
        if s.rank == 0 and s.is_zc:
            zc.count(s.model, 4)
        loss: Tensor = s.loss(step, 1)
        loss.backward()
        s.update()
