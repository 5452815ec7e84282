"""Weights that the model's own code writes in a forward or backward, the same on all ranks, and tensors that outlive
`zc.whole_parameters`. In stage 3, and with shard_frozen, a weight has its bytes only while it is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import mlp
from rows import DIM, STEPS, Row, Script, add, plain, row, sgd
from torch import Tensor, nn

import zc

ITEM = 15


@torch.no_grad()
def clamp(weight: nn.Parameter) -> None:
    weight.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def replace_data(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


def mask_array(weight: nn.Parameter) -> None:
    weight.detach().numpy()[::2] *= 0.5


class Writing(nn.Module):
    """Writes its first weight before it reads it. ``is_outside``: in a function that is not compiled."""

    def __init__(self, write: Callable[[nn.Parameter], None], *, is_outside: bool = True) -> None:
        super().__init__()
        self.net = mlp()
        self.write = torch.compiler.disable(write) if is_outside else write  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.net[0].weight)
        out: Tensor = self.net(x)
        return out


for _name, _write in {
    "param.clamp_()": clamp, "param.data.clamp_()": clamp_data, "param.data = other": replace_data,
    "its array": mask_array,
}.items():  # fmt: skip
    add(Row(f"a weight written in forward: {_name}", ITEM, plain, partial(Writing, _write), sgd))
for _name, _write in {"param.data.clamp_()": clamp_data, "param.data = other": replace_data}.items():
    _make: Any = partial(Writing, _write, is_outside=False)
    add(Row(f"a weight written in forward, compiled: {_name}", ITEM, plain, _make, sgd))


class WrittenInBackward(nn.Module):
    """A hook on the output clamps a weight: the backward goes on with it, and so does the update."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return self._hook(out)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def _hook(self, out: Tensor) -> Tensor:
        weight = self.net[0].weight
        if out.requires_grad:
            out.register_hook(lambda _: clamp_data(weight))  # type: ignore[no-untyped-call]
        return out


add(Row("a weight written in a hook of the backward", ITEM, plain, WrittenInBackward, sgd))


class Momentum(nn.Module):
    """A momentum encoder (MoCo): frozen weights follow others in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(), mlp()
        self.key.requires_grad_(False)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    @torch.no_grad()
    def _follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        self._follow()
        with torch.no_grad():
            key = self.key(x)
        out: Tensor = self.query(x) + 0.1 * key
        return out


for _name, _options in {"": {}, ", shard_frozen": {"shard_frozen": True}}.items():
    add(Row(f"a momentum encoder updated in forward{_name}", ITEM, plain, Momentum, sgd, options=_options))


@row(ITEM, "a weight written in a forward without gradients, then two forwards", make=lambda: Writing(halve_once))
def written_in_evaluation(s: Script) -> None:
    for step in range(3):
        s.model.eval()
        with torch.no_grad():
            s.note(f"evaluated {step}", s.model(s.batch(0)[0]).mean())
            s.note(f"again {step}", s.model(s.batch(0)[0]).mean())
        s.model.train()
        s.loss(step).backward()
        s.update()


def halve_once(weight: nn.Parameter) -> None:
    weight.data[:2].clamp_(-0.05, 0.05)  # elements of one rank alone


@row(ITEM, "zc.whole_parameters: its state_dict is read after an update", optimizer=sgd)
def state_outlives(s: Script) -> None:
    for step in range(STEPS):
        with _whole(s):
            state = {name: value.detach() for name, value in s.model.state_dict().items()}
            if s.stage != 3:  # they share memory with the parameters, which the update writes
                state = {name: value.clone() for name, value in state.items()}
        s.loss(step).backward()
        s.update()
        s.note(f"state {step}", sum(value.double().sum() for value in state.values()))


@row(ITEM, "zc.whole_parameters: param.data = other, which the loop keeps", optimizer=sgd)
def data_given(s: Script) -> None:
    given = torch.full((DIM, DIM), 0.01, dtype=s.dtype)
    with _whole(s):
        weight = next(p for p in s.model.parameters() if p.shape == given.shape)
        weight.data = given if s.is_zc else given.clone()
    for step in range(3):
        s.loss(step).backward()
        s.update()
    s.note("given", given.sum())


@row(ITEM, "zc.whole_parameters: a loss and a penalty of inside, their backward after it", optimizer=sgd)
def loss_outlives(s: Script) -> None:
    for step in range(STEPS):
        with _whole(s):
            loss = s.loss(step) + 0.1 * sum((p * p).sum() for p in s.model.parameters())
        loss.backward()
        s.update()


def _whole(s: Script) -> Any:
    return zc.whole_parameters(s.model) if s.is_zc else torch.enable_grad()


@row(ITEM, "the forward returns views of a weight", make=lambda: Returning(), optimizer=sgd)
def returned(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        out, view, alone = s.model(x)
        s.note(f"detached {step}", alone.double().norm())
        (F.mse_loss(out, y) + 0.1 * view.square().mean()).backward()
        s.update()


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.net[0].weight
        return self.net(x), weight[:3].t(), weight.detach()
