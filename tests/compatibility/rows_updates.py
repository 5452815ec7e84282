"""Item 2: what people write between a forward and the next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import Broken
from rows import STEPS, Script, plain, row
from torch import Tensor, nn

row(2, "the plain loop")(plain)


# the row of a varying number of microbatches has several, and test_against_ddp.py declares them
@row(2, "several backwards a step", full_only=True)
def several_backwards(s: Script) -> None:
    for step in range(STEPS):
        for m in range(3):
            (s.loss(step, m) / 3).backward()
        s.update()


@row(2, "microbatches declared with no_sync", full_only=True)
def declared(s: Script) -> None:
    for step in range(STEPS):
        with s.no_sync():
            for m in range(2):
                (s.loss(step, m) / 3).backward()
        (s.loss(step, 2) / 3).backward()
        s.update()


@row(2, "no_sync around every microbatch")
def declared_all(s: Script) -> None:
    for step in range(STEPS):
        with s.no_sync():
            for m in range(2):
                s.loss(step, m).backward()
        s.update()


@row(2, "backward of a non-scalar output")
def non_scalar(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        s.model(x).backward(y)
        s.update()


@row(2, "retain_graph=True, two losses of one forward")
def retain_graph(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        out = s.model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        out.abs().mean().backward()
        s.update()


@row(2, "a step without a backward")
def nothing_to_do(s: Script) -> None:
    s.update()
    plain(s)
    s.update()
    s.update()


@row(2, "two steps on one gradient")
def two_steps(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.optimizer.step()
        s.update()


class Raises(torch.autograd.Function):
    """The identity, whose backward raises while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if Raises.armed:
            raise FloatingPointError("in the middle of a backward")
        return grad


class Faulty(Broken):
    """Raises in its backward between two parts that have a gradient already and two that have none."""

    @torch.compiler.disable
    def fault(self, x: Tensor) -> Tensor:
        return Raises.apply(x)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.fault(self.shared(F.gelu(self.first(x))))
        return self.last(F.gelu(self.shared(x)))


@row(2, "an exception in the middle of a backward", make=Faulty)
def exception(s: Script) -> None:
    for step in range(STEPS):
        Raises.armed = step % 2 == 1
        try:
            s.loss(step).backward()
            s.optimizer.step()
        except FloatingPointError:
            pass
        s.optimizer.zero_grad()
    Raises.armed = False


@row(2, "an exception in the forward")
def exception_forward(s: Script) -> None:
    for step in range(STEPS):
        try:
            s.model(torch.zeros(2, 3, dtype=s.dtype))
        except RuntimeError:
            s.note(f"raised {step}", 1.0)
        s.loss(step).backward()
        s.update()


@row(2, "evaluation between a forward and its backward")
def evaluation_inside(s: Script) -> None:
    for step in range(STEPS):
        loss = s.loss(step)
        with torch.no_grad():
            s.note(f"held out {step}", s.loss(100 + step))
        loss.backward()
        s.update()


@row(2, "inference_mode between steps")
def inference(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        with torch.inference_mode():
            s.note(f"held out {step}", s.loss(100 + step))


class Dropping(nn.Module):
    """Dropout of everything in training, of nothing in evaluation: which mode it is shows in the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.drop(x))


@row(2, "model.eval() and model.train()", make=Dropping)
def modes(s: Script) -> None:
    for step in range(STEPS):
        s.model.train(step % 2 == 0)
        s.loss(step).backward()
        s.update()


@row(2, "gradients of a backward in evaluation mode are used", make=Dropping)
def eval_backward(s: Script) -> None:
    s.model.eval()
    plain(s)


@row(2, "weights changed by hand between steps (clamped)")
def by_hand(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        with torch.no_grad():
            for param in s.model.parameters():
                param.clamp_(-0.2, 0.2)


@row(2, "a regulariser on parameters in the loop")
def regulariser(s: Script) -> None:
    for step in range(STEPS):
        penalty = sum(p.square().sum() for p in s.model.parameters())
        (s.loss(step) + 0.01 * penalty).backward()
        s.update()


@row(2, "a varying number of microbatches")
def varying_microbatches(s: Script) -> None:
    for step in range(STEPS):
        for m in range((3, 1, 4, 2, 1)[step]):
            s.loss(step, m).backward()
        s.update()


@row(2, "load_state_dict between steps", full_only=True)
def load_between(s: Script) -> None:
    state = {name: value.clone() for name, value in s.model.state_dict().items()}
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        if step == 2:
            s.model.load_state_dict(state)


@row(2, "a layer initialised anew between steps")
def initialised_anew(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        if step == 2:
            nn.init.constant_(s.model[2].weight, 0.05)
