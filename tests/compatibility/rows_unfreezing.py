"""Item 4: layers that are frozen and unfrozen between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from models import PartlyEager, frozen, mlp
from rows import Script, row, sgd
from torch import nn

import zc


@row(4, "a layer frozen and unfrozen again between steps", make=lambda: mlp(depth=3))
def frozen_for_a_while(s: Script) -> None:
    for step in range(6):
        if step in (2, 4):
            s.model[2].requires_grad_(step == 4)
        s.loss(step).backward()
        s.update()


def unfreeze(s: Script, layer: nn.Module, **group: Any) -> None:
    """``group``: options of a new group for its parameters, which the optimizer lacks."""
    layer.requires_grad_(True)
    if group:
        s.optimizer.add_param_group({"params": list(layer.parameters()), **group})
    if s.is_zc:
        zc.recompile(s.model)


@row(4, "a layer unfrozen: add_param_group, zc.recompile(model)", make=frozen)
def unfrozen(s: Script) -> None:
    for step in range(6):
        if step == 3:
            unfreeze(s, s.model[2], lr=3e-3)
        s.loss(step).backward()
        s.update()


def _unfreezing(s: Script) -> Iterator[int]:
    """Steps, with two layers frozen at first."""
    for k in (2, 0):
        s.model[k].requires_grad_(False)
    for step in range(6):
        if step in (2, 4):
            unfreeze(s, s.model[2 if step == 2 else 0])
        yield step


@row(4, "layers unfrozen one after the other, evaluated between", make=lambda: mlp(depth=3), optimizer=sgd)
def gradual_evaluated(s: Script) -> None:
    for step in _unfreezing(s):
        s.loss(step).backward()
        s.update()
        with torch.no_grad():
            s.note(f"held out {step}", s.loss(100 + step))


@row(4, "a layer unfrozen, the others frozen, evaluated between", make=frozen)
def unfrozen_alone(s: Script) -> None:
    for step in range(6):
        if step == 3:
            unfreeze(s, s.model[2], lr=1e-3)
            s.model[0].requires_grad_(False)
            s.model[4].requires_grad_(False)
        s.loss(step).backward()
        s.update()
        with torch.no_grad():
            s.note(f"held out {step}", s.loss(100 + step))


def partly_frozen() -> nn.Module:
    model = PartlyEager()
    model.eager.requires_grad_(False)
    return model


@row(4, "an eager layer unfrozen, then trained alone by backward(inputs=...)", make=partly_frozen)
def unfrozen_eager(s: Script) -> None:
    for step in range(6):
        if step == 2:
            unfreeze(s, s.model.eager, lr=1e-3)
        s.loss(step).backward(
            inputs=[p for p in (s.model if step < 2 else s.model.eager).parameters() if p.requires_grad]
        )
        s.update()


@row(4, "a layer unfrozen without zc.recompile", make=frozen, refused={"always": "ZcError: zc.recompile"})
def unfrozen_silently(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    s.model[2].requires_grad_(True)
    s.loss(1).backward()
    s.update()
