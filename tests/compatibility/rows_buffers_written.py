"""Buffers that a forward reads and then writes: running statistics, codebooks, caches, a state that stays from call to
call. A backward is made of the values of before the write, as in eager PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Stack
from rows import DIM, Script, plain, row, sgd
from torch import Tensor, nn


class State(nn.Module):
    """Eager autograd saves what is derived of the state; a compiled graph may save the state and derive that anew."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("state", torch.linspace(-1, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) * (2 * self.state + 1))
        with torch.no_grad():
            self.state.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return self.last(y)  # type: ignore[no-any-return]


class Statistics(nn.Module):
    """A normalisation by running statistics, which it updates afterwards."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("mean", torch.linspace(-1, 1, DIM))
        self.register_buffer("var", torch.linspace(0.5, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        normal = (y - self.mean) / (self.var + 1e-5).sqrt()
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
            self.var.lerp_(y.var(0), 0.1)
        return self.last(normal.relu())  # type: ignore[no-any-return]


class Codebook(nn.Module):
    """Vector quantisation whose codes follow their members."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("codes", torch.randn(8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        nearest = ((y.detach()[:, None] - self.codes) ** 2).sum(-1).argmin(-1)
        code = self.codes[nearest]
        commitment = F.mse_loss(y, code)
        with torch.no_grad():
            one_hot = F.one_hot(nearest, 8).to(y.dtype)
            self.codes.mul_(0.9).add_((one_hot.T @ y) / (one_hot.sum(0)[:, None] + 1), alpha=0.1)
        return self.last(y + (code - y).detach()) * (1 + commitment)  # type: ignore[no-any-return]


class Cache(nn.Module):
    """Attention to the last calls; written by ``.data``, which autograd does not count."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("cache", torch.linspace(-1, 1, 4 * DIM).view(4, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y, cache = self.first(x), self.cache.clone()
        read = torch.softmax(y @ cache.T, -1) @ cache
        self.cache.data[1:] = cache[:-1]
        self.cache.data[0] = y.detach()[0]
        return self.last(y + read)  # type: ignore[no-any-return]


class Scaled(torch.autograd.Function):
    """A gradient by the largest one so far, as float8 has it: the backward writes that buffer."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, largest: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(largest)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (largest,) = ctx.saved_tensors
        largest.copy_(torch.maximum(largest, grad.abs().amax()))
        return grad / (1 + 100 * largest), None


class Afterwards(State):
    """Buffers are written where Dynamo compiles nothing, by ``.data``, as MoCo's queue. Eager autograd saves what is
    derived of the state, and the scale itself: its backward reads the new scale. It writes the largest gradient."""

    scale: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, DIM))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x) * self.scale * (2 * self.state + 1))
        y = Scaled.apply(y, self.largest)
        self.write(y.detach())
        return self.last(y)  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def write(self, y: Tensor) -> None:
        for buffer in (self.state, self.scale):
            buffer.data.mul_(0.9).add_(y.mean(0), alpha=0.1)


class Both(State):
    def forward(self, x: Tensor) -> Tensor:
        self.state.mul_(0.9)
        return self.last(Scaled.apply(self.first(x), self.state))  # type: ignore[no-any-return]


def _add(name: str, make: type[nn.Module], **more: Any) -> None:
    def seeded_model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    # ranks differ in what they write, and the oracle broadcasts nothing
    options = {"broadcast_buffers": False}
    title = f"a forward that reads a buffer and then writes it: {name}"
    row(3, title, make=seeded_model, options=options, **more)(plain)


_add("a state", State)
_add("running statistics", Statistics)
_add("a codebook", Codebook)
_add("a cache, by .data", Cache)
_add("a state, after a graph break", Afterwards)
_add("a state, in the backward, too", Both, refused={"compiled": "ZcError: Let each write a buffer of its own"})


class Noisy(nn.Module):
    """A block with a state, several of which are compiled as one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = State()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return Stack(*(Noisy() for _ in range(4)))


@row(3, "blocks that read a buffer and then write it, two forwards before their backwards", make=blocks, optimizer=sgd,
     options={"broadcast_buffers": False})  # fmt: skip
def twice(s: Script) -> None:
    for step in range(4):
        losses = [s.loss(step, microbatch) for microbatch in range(2)]
        for loss in losses:
            loss.backward()
        s.update()
