"""Item 2: gradients cleared or dropped between a forward and the next."""

from __future__ import annotations

import torch.nn.functional as F
from models import Heads, PartlyEager
from rows import STEPS, Script, row


@row(2, "zero_grad(set_to_none=False)", make=PartlyEager)
def zeros(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=False)


@row(2, "model.zero_grad between forward and backward")
def zero_between(s: Script) -> None:
    for step in range(STEPS):
        loss = s.loss(step)
        s.model.zero_grad()
        loss.backward()
        s.optimizer.step()


@row(2, "model.zero_grad(set_to_none=False)", make=PartlyEager)
def zeros_of_model(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.optimizer.step()
        s.model.zero_grad(set_to_none=False)


@row(2, "param.grad = None by hand for every parameter")
def none_by_hand(s: Script) -> None:
    for step in range(STEPS):
        for param in s.model.parameters():
            param.grad = None
        s.loss(step).backward()
        s.optimizer.step()


@row(2, "param.grad = None by hand for one parameter, before the step")
def none_for_one(s: Script) -> None:
    for step in range(STEPS):
        for m in range(2):
            s.loss(step, m).backward()
        s.model[0].weight.grad = None
        s.update()


@row(2, "param.grad = None for one parameter, between two backwards")
def none_between(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step, 0).backward()
        s.model[2].weight.grad = None
        s.loss(step, 1).backward()
        s.update()


@row(2, "no zero_grad: gradients go on adding up")
def no_zero_grad(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.optimizer.step()


@row(2, "a skipped step: zero_grad without step")
def skipped(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        if step % 2 == 0:
            s.optimizer.step()
        s.optimizer.zero_grad()


@row(2, "zero_grad of one submodule, the others go on adding up")
def zero_of_part(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.optimizer.step()
        s.model[2].zero_grad()


@row(2, "zero_grad(set_to_none=False), heads that go unused", make=Heads)
def zeros_unused(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        for out in s.model(x, ((0, 1), (2,), (1,), (0,), (2, 1))[step]):
            F.mse_loss(out, y[:, :4]).backward(retain_graph=True)
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=False)
