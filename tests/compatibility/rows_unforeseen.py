"""Item 13: loops as other people write them, none of which had been thought of when zc was written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Heads, mlp, seeded
from rows import STEPS, Script, row, several
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import zc


def heads_backward(s: Script, tasks: tuple[int, ...], step: int, microbatch: int = 0) -> None:
    x, y = s.batch(step, microbatch)
    sum((F.mse_loss(out, y[:, :4]) for out in s.model(x, tasks)), torch.zeros(())).backward()


def trainable(s: Script) -> list[nn.Parameter]:
    return [param for param in s.model.parameters() if param.requires_grad]


@row(13, "1 backward(s) on one rank alone, after model.zero_grad(set_to_none=False)")
def one_rank_after_zeros(s: Script) -> None:
    s.loss(0).backward()
    s.optimizer.step()
    for step in range(1, STEPS):
        s.model.zero_grad(set_to_none=False)
        if s.rank == step % 2:
            s.loss(step).backward()
        s.optimizer.step()


@row(13, "2 backward(s) on one rank alone, declared with no_sync, after the zero_grad of the optimizer's class"
         "(set_to_none=False)")  # fmt: skip
def one_rank_declared_after_zeros(s: Script) -> None:
    s.loss(0).backward()
    s.optimizer.step()
    for step in range(1, STEPS):
        type(s.optimizer).zero_grad(s.optimizer, set_to_none=False)
        for m in range(2 if s.rank == step % 2 else 0):
            with s.no_sync():
                s.loss(step, m).backward()
        s.optimizer.step()


@row(13, "microbatches of ranks with different tasks become zeros", make=Heads)
def zeros_of_microbatches(s: Script) -> None:
    for step in range(STEPS):
        with s.no_sync():
            heads_backward(s, (0, 1 + s.rank), step)
        s.optimizer.zero_grad(set_to_none=False)
        heads_backward(s, (0,), step, 1)
        s.optimizer.step()
        s.optimizer.zero_grad()


def _dropped(declared: bool, unscales: bool) -> Any:
    """One rank has a backward more of what all ranks drop."""

    def loop(s: Script) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(STEPS):
            with s.no_sync():
                heads_backward(s, (0, 1), step)
            if s.rank == 0:
                with s.no_sync() if declared else contextlib.nullcontext():
                    heads_backward(s, (0,), step, 1)
            s.optimizer.zero_grad()
            x, y = s.batch(step, 2)
            scaler.scale(F.mse_loss(s.model(x, (0,))[0], y[:, :4])).backward()
            s.reduced()
            if unscales:
                scaler.unscale_(s.optimizer)
            for name, param in s.model.named_parameters():
                s.note(f"{name} {step}", param.grad is None)
            s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1))
            scaler.step(s.optimizer)
            scaler.update()
            s.optimizer.zero_grad()

    return loop


_DROPPED = "one rank has a backward more, all drop them; of the next backward"
row(13, f"{_DROPPED} its norm is clipped, declared with no_sync", make=Heads)(_dropped(declared=True, unscales=False))
row(13, f"{_DROPPED} a GradScaler unscales it", make=Heads)(_dropped(declared=False, unscales=True))


@row(13, "one rank alone drops a gradient that all ranks have reduced",
     refused={"always": "RankMismatchError: what the gradients hold: some rank has cleared its gradients"})  # fmt: skip
def one_rank_drops(s: Script) -> None:
    s.loss(0).backward()
    if s.rank == 0:
        s.model[0].weight.grad = None
    s.update()


@row(13, "one rank alone zeroes a gradient that all ranks have reduced",
     refused={"always": "RankMismatchError: what the gradients hold: some rank has cleared its gradients"})  # fmt: skip
def one_rank_zeroes(s: Script) -> None:
    s.loss(0).backward()
    if s.rank == 1:
        s.model[0].bias.grad.zero_()
    s.update()


@row(13, "model.no_sync(), as DDP has it")
def no_sync_of_the_model(s: Script) -> None:
    for step in range(STEPS):
        with s.model.no_sync() if s.is_zc else contextlib.nullcontext():
            s.loss(step).backward()
        s.loss(step, 1).backward()
        s.update()


@row(13, "an optimizer that zc.compile was not given",
     refused={"always": "ZcError: zc.compile was not given this AdamW"})  # fmt: skip
def another_optimizer(s: Script) -> None:
    another = AdamW(s.model.parameters(), lr=1e-3)
    s.loss(0).backward()
    another.step()


@row(13, "a step is skipped where a gradient has an infinity on one rank (zc.grads_are_finite)")
def skipped_by_gradients(s: Script) -> None:
    for step in range(STEPS):
        (s.loss(step) * (float("inf") if step == 1 + s.rank else 1.0)).backward()
        s.reduced()
        if s.is_zc:
            is_finite = zc.grads_are_finite(s.model)
        else:
            is_finite = all(bool(p.grad.isfinite().all()) for p in trainable(s) if p.grad is not None)
        s.note(f"finite {step}", is_finite)
        if is_finite:
            s.optimizer.step()
        s.optimizer.zero_grad()


@row(13, "gradient surgery: projected gradients, by torch.autograd.backward(parameters, gradients)", make=Heads)
def surgery(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        losses = [F.mse_loss(out, y[:, :4]) for out in s.model(x, (0, 1))]
        params = [*s.model.trunk.parameters()]
        first, second = (torch.autograd.grad(loss, params, retain_graph=True) for loss in losses)
        dot = sum(((a * b).sum() for a, b in zip(first, second, strict=True)), torch.zeros(()))
        square = sum((b.square().sum() for b in second), torch.zeros(()))
        share = (dot / square).clamp(max=0.0)
        torch.autograd.backward(params, [a - share * b + b for a, b in zip(first, second, strict=True)])
        s.update()


@row(13, "gradients are masked (pruning)")
def masked(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        for k, param in enumerate(s.model.parameters()):
            param.grad.mul_((torch.rand(param.shape, generator=seeded(step, k)) < 0.5).to(s.dtype))
        s.update()


@row(13, "gradients are scaled by row")
def scaled_by_row(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        for param in s.model.parameters():
            param.grad.div_(torch.arange(1, param.shape[0] + 1, dtype=s.dtype).view(-1, *[1] * (param.dim() - 1)))
        s.update()


@row(13, "gradients fade instead of being cleared")
def fading(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        s.optimizer.step()
        for param in s.model.parameters():
            param.grad.mul_(0.5)


@row(13, "sharpness-aware minimisation: weights move up, a second backward, weights move back")
def sharpness_aware(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        grads = [s.grad(param).to(param.dtype) for param in s.model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        before = [param.detach().clone() for param in s.model.parameters()]
        with torch.no_grad():
            for param, grad in zip(s.model.parameters(), grads, strict=True):
                param.add_(grad, alpha=0.05 / norm.item())
        s.optimizer.zero_grad()
        s.loss(step).backward()
        with torch.no_grad():
            for param, value in zip(s.model.parameters(), before, strict=True):
                param.copy_(value)
        s.update()


@row(13, "norms by layer are logged after each microbatch")
def logged_by_layer(s: Script) -> None:
    for step in range(STEPS):
        for m in range(2):
            s.loss(step, m).backward()
            if not s.is_zc and m == 0:
                continue  # the mean of one microbatch is not a sum of means
            s.reduced()
            for name, param in s.model.named_parameters():
                norm = param.grad.norm()
                if m == 1:
                    s.note(f"{name} {step}", norm)
        s.update()


@row(13, "a spike of the loss is skipped, as rank 0 decides")
def spikes(s: Script) -> None:
    for step in range(STEPS):
        loss = s.loss(step)
        loss.backward()
        is_spike = torch.tensor(int(step in (1, 3)))
        if s.rank:
            is_spike.zero_()
        dist.broadcast(is_spike, 0)
        if is_spike.item():
            s.optimizer.zero_grad()
            continue
        s.update()


@row(13, "a closure that clips")
def closure_that_clips(s: Script) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            s.optimizer.zero_grad()
            loss = s.loss(step)
            loss.backward()
            s.reduced()
            s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1))
            return loss

        s.optimizer.step(closure)


@row(13, "halves of the model take turns (requires_grad_), warmup by LambdaLR", optimizer=lambda p: SGD(p, lr=1e-2))
def turns(s: Script) -> None:
    schedule = LambdaLR(s.optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(STEPS):
        s.model[0].requires_grad_(step % 2 == 0)
        s.model[2].requires_grad_(step % 2 == 1)
        s.loss(step).backward()
        s.update()
        schedule.step()


def _two(params: Any) -> list[Any]:
    listed = list(params)
    return [AdamW(listed[:2], lr=1e-3), SGD(listed[2:], lr=1e-2, momentum=0.9)]


@row(13, "alternating optimizers on one sum of gradients, only one's are cleared", optimizer=_two)
def alternating(s: Script) -> None:
    first, second = several(s.optimizer)
    for step in range(STEPS):
        s.loss(step).backward()
        chosen = first if step % 3 else second
        chosen.step()
        chosen.zero_grad()


@row(13, "slow weights every second step (lookahead), an average by _foreach_lerp_")
def lookahead(s: Script) -> None:
    params = list(s.model.parameters())
    slow, mean = ([p.detach().clone() for p in params] for _ in range(2))
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        with torch.no_grad():
            torch._foreach_lerp_(mean, params, 0.1)
            if step % 2:
                torch._foreach_lerp_(slow, params, 0.5)
                for param, value in zip(params, slow, strict=True):
                    param.copy_(value)
    for k, value in enumerate(mean):
        s.note(f"mean {k}", value)


def _batches(s: Script, step: int) -> Iterator[Tensor]:
    for m in range(3):
        if s.rank == 0 or m != 1:
            yield s.loss(step, m)


@row(13, "a microbatch whose loss is not finite is left out, on the rank that has it")
def left_out(s: Script) -> None:
    for step in range(STEPS):
        with s.no_sync():
            for loss in _batches(s, step):
                loss.backward()
        s.loss(step, 3).backward()
        s.update()


@row(13, "torch.autograd.backward of two losses with weights of their own", make=mlp)
def two_losses(s: Script) -> None:
    for step in range(STEPS):
        torch.autograd.backward([s.loss(step), s.loss(step, 1)], [torch.tensor(0.3, dtype=s.dtype), None])
        s.update()
