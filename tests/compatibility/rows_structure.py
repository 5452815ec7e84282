"""Item 3: what stands inside models, and several models at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Broken, InsideAndOutside, ManyGraphs, PartlyEager, Stack, mlp
from rows import STEPS, Script, plain, row
from torch import Tensor, nn

import zc

# tests/distributed/test_against_ddp.py trains these four
row(3, "a graph break, a layer used on both sides", make=Broken, full_only=True)(plain)
row(3, "a layer under torch.compiler.disable", make=PartlyEager, full_only=True)(plain)
row(3, "a layer used inside and outside compiled code", make=InsideAndOutside, full_only=True)(plain)
row(3, "twelve blocks of one class compiled apart", make=ManyGraphs, full_only=True)(plain)


class Squash(torch.autograd.Function):
    """tanh with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class LinearFunction(torch.autograd.Function):
    """x w^T, with the weight's gradient computed by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class CustomFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return LinearFunction.apply(Squash.apply(self.first(x)), self.weight)  # type: ignore


row(3, "custom autograd.Functions", make=CustomFunctions)(plain)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.inner(F.gelu(self.inner(x)))))


row(3, "a module called twice in one forward", make=CalledTwice)(plain)


class DataDependent(nn.Module):
    """Takes a branch by a value, so Dynamo breaks the graph; ranks take the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.yes, self.no = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        return self.yes(x) if flag.item() > 0 else self.no(x)


@row(3, "a branch taken by a value", make=DataDependent)
def branch(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(s.model(x, torch.tensor(step % 2)), y).backward()
        s.update()


@row(3, "a varying last batch")
def last_batch(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step, num=4 if step % 2 == 0 else 3).backward()
        s.update()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + F.gelu(self.mix(x)).cumsum(1) / (1 + torch.arange(x.shape[1]))[:, None]
        return self.head(x)


@row(3, "dynamic sequence lengths, at most 2 graphs", make=Sequences)
def dynamic_lengths(s: Script) -> None:
    for step, length in enumerate((7, 9, 12, 5, 16, 11, 8)):
        tokens = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(step + 50 * s.rank))
        F.cross_entropy(s.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        s.update()
    if s.is_zc and s.backend != "eager":
        names = [name for name in zc.explain(s.model).sections if name.startswith("schedule backward")]
        assert len(names) <= 2, f"a recompile storm: {names}"


@row(3, "a part that the user has torch.compiled", make=lambda: mlp(depth=3))
def inner_compile(s: Script) -> None:
    s.model[2].compile(backend="aot_eager")
    plain(s)


@row(3, "submodules called from the loop")
def submodules(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(s.model[2](s.model[1](s.model[0](x))), y).backward()
        s.update()


class Residual(nn.Module):
    """Residual additions: an activation feeds two consumers, and its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Stepwise(nn.Module):
    """A GRU cell over time: one parameter in many places of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        for _ in range(3):
            hidden = self.cell(x, hidden)
        return self.head(hidden)


row(3, "a recurrent cell stepped in the forward", make=Stepwise)(plain)


class Flattened(nn.Module):
    """As many scripts have it, for cuDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        output: Tensor = self.head(self.rnn(x.view(-1, 4, 4))[0][:, -1])
        return output


row(3, "an LSTM, flatten_parameters() in the forward", make=Flattened)(plain)


@row(3, "truncated back-propagation through time", make=lambda: nn.GRUCell(16, 16))
def truncated(s: Script) -> None:
    hidden = torch.zeros(4, 16, dtype=s.dtype)
    for step in range(STEPS):
        x, y = s.batch(step)
        hidden = s.model(x, hidden.detach())
        F.mse_loss(hidden, y).backward()
        s.update()


class Wrapper(nn.Module):
    """What Lightning and the like do: the loop calls a module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


@row(3, "the caller compiles model and loss together (torch.compile)")
def compiled_around(s: Script) -> None:
    loss = torch.compile(lambda x, y: F.mse_loss(s.model(x), y), backend="aot_eager")
    for step in range(STEPS):
        loss(*s.batch(step)).backward()
        s.update()


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="aot_eager")
    return model


row(3, "model.compile() before zc.compile", make=compiled_in_place)(plain)
row(3, "torch.compile(model) given to zc.compile", make=lambda: torch.compile(mlp()),  # type: ignore[arg-type]
    refused={"always": "PlanError: OptimizedModule"})(plain)  # fmt: skip


class FrozenTrunk(nn.Module):
    """A trunk under no_grad, trainable by its flags; a buffer that counts; a batched head; nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: dict[str, Any], *, scale: float) -> dict[str, tuple[Tensor, ...]]:
        self.calls += 1
        with torch.no_grad():
            x = self.trunk(batch["x"])
        return {"out": (torch.vmap(self.head)(x) * scale, x)}


@row(3, "a trunk under no_grad, a counting buffer, vmap, nested containers", make=FrozenTrunk)
def frozen_trunk(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(s.model({"x": x}, scale=2.0)["out"][0], y).backward()
        s.update()
    s.note("calls", s.model.calls)


class Routed(nn.Module):
    """Experts by name, one for each row's remainder: what a batch leaves out gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("a", "b", "c")})

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        return torch.stack([self.experts[name](x[k]) for k, name in enumerate(names)])


@row(3, "a ModuleDict routed by name", make=Routed)
def routed(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(s.model(x, list(("aabb", "abab", "cccc", "bcbc", "abca")[step])), y).backward()
        s.update()
