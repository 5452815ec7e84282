"""What loops ask of parameters without reading an element, to print a model or to compare shapes and dtypes; and
torch.func through the model, where their bytes come inside of a transform."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import seeded
from rows import STEPS, Script, row, sgd
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen layer with two low-rank updates in dictionaries, as peft has them, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.gain = nn.Linear(16, 16), nn.Parameter(torch.ones(16))
        generator = seeded(3)
        self.down = nn.ParameterDict({name: torch.randn(4, 16, generator=generator) / 8 for name in ("a", "b")})
        self.up = nn.ParameterDict({name: torch.randn(16, 4, generator=generator) / 8 for name in ("a", "b")})
        self.is_adapted = True
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.is_adapted:
            for name in self.down:
                y = y + x @ self.down[name].T.to(x.dtype) @ self.up[name].t()
        return y * self.gain.expand_as(y)


@row(4, "a model with ParameterDicts is printed, its parameters and views of them are asked for shapes and dtypes",
     make=Adapted)  # fmt: skip
def asked(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        text = str(s.model)
        assert "Parameter containing: [torch." in text and "of size 4x16" in text, text
        for param in s.model.parameters():
            dtype = torch.result_type(param, torch.ones(2))
            assert param.T.shape == param.shape[::-1] and param[0].shape == param.shape[1:] and dtype == s.dtype
            assert param.is_signed() and param.dim_order() == tuple(range(param.dim()))
            assert param.data.view(-1).dim() == 1


@row(4, "an adapter is switched off for a reference without gradients in each step", make=Adapted, optimizer=sgd)
def switched_off(s: Script) -> None:
    module = s.model
    for step in range(STEPS):
        x, y = s.batch(step)
        str(module)  # peft looks for layers this way
        module.is_adapted = False
        with torch.no_grad():
            reference = module(x)
        module.is_adapted = True
        (F.mse_loss(module(x), y) + F.mse_loss(module(x), reference)).backward()
        s.update()


def vera() -> Any:
    from peft import VeraConfig, get_peft_model

    net = nn.Sequential()
    net.add_module("inner", nn.Linear(16, 16))
    net.add_module("last", nn.Linear(16, 16))
    return get_peft_model(net, VeraConfig(target_modules=["inner"], r=4, vera_dropout=0.0))  # type: ignore[arg-type]


@row(4, "peft's VeRA with disable_adapter for a reference in each step", make=vera, optimizer=sgd, needs="peft")
def vera_off(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        with s.model.disable_adapter(), torch.no_grad():
            reference = s.model(x)
        out = s.model(x)
        (F.mse_loss(out, y) + F.mse_loss(out, reference)).backward()
        s.update()


@row(3, "torch.func.jvp through the model: a penalty on the derivative along the input")
def along_input(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        out, along = torch.func.jvp(lambda x: s.model(x), (x,), (torch.ones_like(x),))
        (F.mse_loss(out, y) + along.pow(2).mean()).backward()
        s.update()


@row(3, "torch.func.vmap(grad) through the model: a penalty on the input's gradient of each sample")
def grads_of_samples(s: Script) -> None:
    def energy(x: Tensor) -> Tensor:
        return s.model(x[None]).pow(2).sum()

    for step in range(STEPS):
        x, _ = s.batch(step)
        (s.loss(step) + torch.func.vmap(torch.func.grad(energy))(x).pow(2).mean()).backward()
        s.update()
