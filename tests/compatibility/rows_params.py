"""Item 4: tied, frozen, unused, unfrozen and unusual parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, SEQ, VOCAB, Heads, WithUnused, batch_norm, frozen, mlp, seeded
from rows import STEPS, Row, Script, add, plain, row, sgd
from torch import Tensor, nn


def tokens(s: Script, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCAB, (2, SEQ + 1), generator=seeded(s.rank, step, 0))
    return drawn[:, :-1], drawn[:, 1:]


def language(s: Script) -> None:
    for step in range(3):
        x, y = tokens(s, step)
        F.cross_entropy(s.model(x).flatten(0, 1), y.flatten()).backward()
        s.update()


class TiedAcross(nn.Module):
    """One weight used on both sides of a graph break, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


row(4, "a weight tied across two graphs", make=TiedAcross)(plain)
# tests/distributed/test_gradients.py and test_against_ddp.py train these four
row(4, "tied embedding and head (one graph)", make=lambda: GPT(dim=16, layers=1), full_only=True)(language)
row(4, "a frozen layer", make=frozen, full_only=True)(plain)
row(4, "an unused parameter and one without elements", make=WithUnused, full_only=True)(plain)
row(4, "BatchNorm", make=batch_norm, full_only=True)(plain)


@row(4, "parameters that are unused sometimes", make=Heads)
def sometimes(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        for out in s.model(x, (step % 2, 2) if step != 3 else (1,)):
            F.mse_loss(out, y[:, :4]).backward(retain_graph=True)
        s.update()


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16, padding_idx=0), nn.Linear(16, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x * (x > VOCAB // 4)))


row(4, "an embedding with padding_idx", make=Padded)(language)


class Scalars(nn.Module):
    """0-d, 1-element and empty parameters beside a matrix, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1))
        self.empty, self.last = nn.Parameter(torch.zeros(3, 0)), nn.Linear(16, 16)
        self.list = nn.ParameterList(nn.Parameter(torch.full((16,), 0.1 * k)) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.list:
            x = x + part
        return self.last(x * self.gain + self.shift) + self.empty.sum()


row(4, "0-d, one-element and empty parameters, a ParameterList", make=Scalars)(plain)


def weight_normed() -> nn.Module:
    model = mlp()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


row(4, "a parametrised layer (weight_norm)", make=weight_normed)(plain)


def transposed() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().t())  # not contiguous
    return model


row(4, "a parameter that is not contiguous", make=transposed)(plain)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.conv(x.view(-1, 1, 4, 4))).flatten(1))


row(4, "a convolution with channels_last weights",
    make=lambda: Convolution().to(memory_format=torch.channels_last))(plain)  # fmt: skip


@row(
    4, "optimizer.add_param_group with a tensor that the model lacks", refused={"always": "PlanError: add_param_group"}
)
def add_group(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["qkv", "out"], init_lora_weights=False)
    model: nn.Module = get_peft_model(GPT(dim=16, layers=1), config)
    return model


# tests/docs trains adapters of peft: to import it takes ten times as long as the loop
@row(4, "LoRA adapters (peft), the adapter switched off and on", make=adapted, needs="peft", full_only=True)
def lora_off(s: Script) -> None:
    for step in range(3):
        x, y = tokens(s, step)
        with torch.no_grad(), s.model.disable_adapter():
            base = s.model(x)
        (F.cross_entropy(s.model(x).flatten(0, 1), y.flatten()) + F.mse_loss(s.model(x), base)).backward()
        s.update()


class Renormed(nn.Module):
    """max_norm scales rows of the weight down, in place, in the forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16, **options), nn.Linear(16, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class Holes(nn.Module):
    """Parameters that are a part of a larger tensor's memory: every second column, or row of the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(0.1 * torch.randn(16, 32)[:, ::2])
        self.turned = nn.Parameter(0.1 * torch.randn(16, 32).t()[::2])
        self.vector = nn.Parameter(torch.randn(32)[::2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.columns + (x * self.vector) @ self.turned


add(Row("parameters with holes in their memory", 4, plain, Holes))


@row(4, "an embedding with max_norm, the same tokens on all ranks", make=lambda: Renormed(max_norm=2.0))
def renormed(s: Script) -> None:
    for step in range(3):
        x = torch.randint(0, VOCAB, (2, SEQ), generator=seeded(step))
        F.cross_entropy(s.model(x).flatten(0, 1), x.flatten()).backward()
        s.update()


row(4, "an embedding with sparse gradients", make=lambda: Renormed(sparse=True), optimizer=sgd,
    refused={"always": "PlanError: sparse=True"})(language)  # fmt: skip


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.turn = nn.Linear(16, 16), nn.Parameter(torch.ones(16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x * self.turn).real)


row(4, "a complex parameter", make=Complex, refused={"always": "PlanError: dtype torch.complex64"})(plain)


def overlapping() -> nn.Module:
    model = mlp()
    model[2].weight = nn.Parameter(model[0].weight.detach()[:])  # another Parameter over the same numbers
    return model


row(4, "two parameters over one storage", make=overlapping, refused={"always": "PlanError: share a part"})(plain)


def half_held(params: Iterable[Any]) -> Any:
    return sgd(list(params)[:2])


row(4, "parameters that the optimizer lacks (two optimizers for one model)", optimizer=half_held,
    refused={"always": "PlanError: the optimizer lacks 2"})(plain)  # fmt: skip


@row(4, "model.to(dtype) after zc.compile", refused={"always": "ZcError: has left its bucket"})
def moved(s: Script) -> None:
    s.model.double()
    x, y = s.batch(0)
    F.mse_loss(s.model(x.double()), y.double()).backward()
    s.update()


@row(4, "param.data = other after zc.compile")
def new_data(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        s.model[0].weight.data = torch.full_like(s.model[0].weight, 0.01 * step)


@row(4, "param.data = other of another shape after zc.compile", refused={"always": "ZcError: has left its bucket"})
def new_shape(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    s.model[0].weight.data = torch.zeros(4, 4)
    s.optimizer.step()


@row(4, "optimizer.add_param_group with a parameter that it holds", refused={"always": "PlanError: has its place"})
def add_known(s: Script) -> None:
    s.optimizer.add_param_group({"params": [s.model[0].weight]})
