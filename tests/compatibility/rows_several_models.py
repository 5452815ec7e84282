"""Item 3: several models in one process, and averaged copies."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from models import mlp
from rows import STEPS, Script, adamw, row
from rows_structure import Wrapper
from torch.nn.parallel import DistributedDataParallel


@row(3, "two models in one process", full_only=True)
def two_models(s: Script) -> None:
    other = mlp().to(s.dtype)
    second = adamw(other.parameters())
    s.compile_too(other, second)
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(other(s.model(x)), y).backward()  # one backward through both
        s.update()
        second.step()
        second.zero_grad()
    for name, param in other.named_parameters():
        s.note(f"other {name}", param)


@row(3, "two models and optimizers in turn (a GAN's loop)")
def gan(s: Script) -> None:
    critic = mlp().to(s.dtype)
    second = adamw(critic.parameters())
    s.compile_too(critic, second)
    for step in range(STEPS):
        x, y = s.batch(step)
        (critic(s.model(x).detach()).mean() - critic(y).mean()).backward()
        second.step()
        second.zero_grad()
        (-critic(s.model(x)).mean()).backward()
        s.update()
        second.zero_grad()
    for name, param in critic.named_parameters():
        s.note(f"critic {name}", param)


@row(3, "an averaged copy (EMA by deepcopy)")
def ema(s: Script) -> None:
    average = copy.deepcopy(s.model)
    for step in range(STEPS):
        s.loss(step).backward()
        average.zero_grad()  # of the copy: the model's own gradients stay
        s.update()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), s.model.parameters(), strict=True):
                mean.lerp_(param, 0.5)
    for name, param in average.named_parameters():
        s.note(f"average {name}", param)


@row(3, "the loop calls a module around the model")
def wrapped(s: Script) -> None:
    wrapper = Wrapper(s.model)
    for step in range(STEPS):
        wrapper(*s.batch(step)).backward()
        s.update()


@row(3, "DistributedDataParallel around the compiled model", refused={"always": "PlanError: leave DDP out"})
def ddp_around(s: Script) -> None:
    DistributedDataParallel(s.model)
