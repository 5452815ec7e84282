"""Parameters that replace others under their name after zc.compile: a new layer, one tensor, a resized embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT, VOCAB, Block, frozen, mlp, seeded
from rows import DIM, Row, Script, add, row
from rows_params import tokens
from torch import nn

import zc


def replace(s: Script, path: str, module: nn.Module, **group: Any) -> None:
    """Puts ``module`` in the place ``path``, and its parameters into the optimizer."""
    s.model.set_submodule(path, module.to(s.dtype))
    s.optimizer.add_param_group({"params": list(module.parameters()), **group})
    if s.is_zc:
        zc.recompile(s.model)


def _linear(seed: int, out: int = DIM) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(DIM, out)


@row(4, "a layer replaced under its name, add_param_group, zc.recompile(model)", make=lambda: mlp(depth=3))
def replaced(s: Script) -> None:
    for step in range(6):
        if step == 3:
            replace(s, "4", _linear(7), lr=3e-3)
        s.loss(step).backward()
        s.update()


@row(4, "a layer replaced twice, evaluated between", make=lambda: mlp(depth=3))
def replaced_twice(s: Script) -> None:
    for step in range(6):
        if step in (1, 4):
            replace(s, "2", _linear(step))
        s.loss(step).backward()
        s.update()
        with torch.no_grad():
            s.note(f"held out {step}", s.loss(100 + step))


@row(4, "a layer replaced before the first step", make=lambda: mlp(depth=3))
def replaced_first(s: Script) -> None:
    replace(s, "0", _linear(7))
    for step in range(3):
        s.loss(step).backward()
        s.update()


class Words(nn.Module):
    """An embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(10, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(F.gelu(self.hidden(self.embed(x))))
        return out

    def resize(self, num: int) -> None:
        """As transformers' resize_token_embeddings does."""
        old = self.embed.weight
        embed = nn.Embedding(num, DIM, dtype=old.dtype)
        with torch.no_grad():
            embed.weight[:10] = old
            embed.weight[10:] = 0.1
        self.embed, self.head = embed, nn.Linear(DIM, num, bias=False)
        self.head.weight = embed.weight


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words()


@row(4, "tied embeddings resized, add_param_group, zc.recompile(model)", make=words)
def resized(s: Script) -> None:
    for step in range(6):
        if step == 3:
            with zc.whole_parameters(s.model) if s.is_zc else torch.no_grad():
                s.model.resize(13)
            s.optimizer.add_param_group({"params": [s.model.embed.weight]})
            if s.is_zc:
                zc.recompile(s.model)
        tokens = torch.randint(0, 10 if step < 3 else 13, (6,), generator=seeded(s.rank, step))
        F.cross_entropy(s.model(tokens), tokens.flip(0)).backward()
        s.update()


@row(
    4, "a layer replaced after a backward, before the step", make=lambda: mlp(depth=3), options={"bucket_nbytes": 4096}
)
def replaced_with_gradients(s: Script) -> None:
    for step in range(4):
        s.loss(step).backward()
        if step == 1:
            replace(s, "2", _linear(7))
            s.loss(step, 1).backward()
        s.update()


@row(4, "one tensor of a layer replaced (setattr)", make=lambda: mlp(depth=3), options={"bucket_nbytes": 4096})
def tensor_replaced(s: Script) -> None:
    for step in range(6):
        if step == 2:
            s.model[2].weight = nn.Parameter(_linear(7).weight.detach().to(s.dtype))
            s.optimizer.add_param_group({"params": [s.model[2].weight]})
            if s.is_zc:
                zc.recompile(s.model)
        s.loss(step).backward()
        s.update()


@row(4, "a layer replaced, and put back later", make=lambda: mlp(depth=3), options={"bucket_nbytes": 1500})
def put_back(s: Script) -> None:
    """By then ranks have other elements of it, and its state is whole once more. The other one begins anew."""
    old, new = s.model[2], _linear(7)
    for step in range(8):
        if step == 2:
            replace(s, "2", new)
        if step in (3, 4, 6):
            s.model[2] = {3: nn.Identity(), 4: old, 6: new}[step]
            for param in new.parameters() if step == 6 else ():
                del s.optimizer.state[param]
            if s.is_zc:
                zc.recompile(s.model)
        s.loss(step).backward()
        s.update()


@row(4, "a frozen layer replaced by one that trains", make=frozen)
def frozen_replaced(s: Script) -> None:
    for step in range(6):
        if step == 3:
            replace(s, "2", _linear(7))
        s.loss(step).backward()
        s.update()


@row(4, "a layer replaced by a frozen one", make=lambda: mlp(depth=3))
def replaced_by_frozen(s: Script) -> None:
    for step in range(6):
        if step == 3:
            s.model[2] = _linear(7 + s.rank).requires_grad_(False).to(s.dtype)
            if s.is_zc:
                zc.recompile(s.model)
            else:
                for tensor in s.model[2].parameters():
                    dist.broadcast(tensor.data, 0)
        s.loss(step).backward()
        s.update()


def _in_blocks(s: Script, path: str, module: Callable[[], nn.Module]) -> None:
    for step in range(5):
        if step == 2:
            torch.manual_seed(7)
            replace(s, path, module())
        x, y = tokens(s, step)
        F.cross_entropy(s.model(x).flatten(0, 1), y.flatten()).backward()
        s.update()


for words_of, path, module in (
    ("a layer of one block", "blocks.1.attention.out", lambda: nn.Linear(16, 16)),
    ("a whole block", "blocks.2", lambda: Block(16)),
    ("the head of a model with blocks", "head", lambda: nn.Linear(16, VOCAB, bias=False)),
):
    loop = partial(_in_blocks, path=path, module=module)
    add(Row(f"{words_of} replaced, zc.recompile(model)", 4, loop, lambda: GPT(dim=16, layers=4)))
    add(
        Row(
            f"overlap_gather: {words_of} replaced",
            4,
            loop,
            lambda: GPT(dim=16, layers=4),
            options={"overlap_gather": True},
        )
    )
add(
    Row(
        "overlap_gather: a layer replaced twice",
        4,
        replaced_twice,
        lambda: mlp(depth=3),
        options={"overlap_gather": True},
    )
)
add(
    Row(
        "shard_frozen: a frozen layer replaced by one that trains",
        4,
        frozen_replaced,
        frozen,
        options={"shard_frozen": True},
    )
)


@row(
    4,
    "a layer replaced under its name without zc.recompile",
    make=lambda: mlp(depth=3),
    refused={"always": "ZcError: parameter 4.weight is another one"},
)
def replaced_silently(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    s.model[4] = _linear(7)
    s.loss(1).backward()
    s.update()
