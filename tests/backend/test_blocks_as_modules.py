"""A model whose blocks are compiled on their own is still a module: it can be copied, pickled, exported and closed."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zc

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(5)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zc says that it is a plain module now
        loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def exported(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (torch.ones(2, WIDTH),), strict=False).module()


def closed(model: nn.Module) -> nn.Module:
    zc.close(model)
    return model


@pytest.mark.parametrize("way", [copy.deepcopy, pickled, exported, closed], ids=lambda way: way.__name__)
def test_what_others_make_of_it_gives_the_same_numbers(way: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager")
    x = torch.randn(2, WIDTH)
    model(x).sum().backward()
    other = way(model)
    torch.testing.assert_close(other(x), plain(x))
    if way in (copy.deepcopy, pickled):
        with torch.no_grad():
            model.last.bias += 1.0
            model.blocks[0].linear.bias += 1.0
        torch.testing.assert_close(other(x), plain(x), msg="it calls the blocks of the model that it was made from")
