"""A parameter with 0 dimensions: all of its state has 0 dimensions, and the count of steps is no part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zc


class Scaled(nn.Module):
    """One number that trains: one of two ranks owns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale - 1.0).square().mean()


def compiled() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Scaled()
    zc.compile(model, optimizer := torch.optim.Adam(model.parameters(), lr=0.1), backend="eager")
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(torch.ones(3)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _resume(rank: int, world_size: int, way: str, folder: str) -> float:
    """Two updates, out and in by ``way``, one update: the number then."""
    model, optimizer = compiled()
    train(model, optimizer, 2)
    zc.save(folder, model, optimizer)
    again, its_optimizer = compiled()
    if way == "load":
        zc.load(folder, again, its_optimizer)
    else:
        with zc.whole_parameters(model):
            again.load_state_dict(model.state_dict())
        if way == "whole":
            states = [zc.full_optimizer_state(model, optimizer)]
            dist.broadcast_object_list(states)
            its_optimizer.load_state_dict(states[0])
        else:
            set_optimizer_state_dict(again, its_optimizer, get_optimizer_state_dict(model, optimizer))
    train(again, its_optimizer, 1)
    return float(again.scale.detach())


@pytest.mark.parametrize("way", ["load", "whole", "parts"])
def test_training_goes_on(way: str, tmp_path: Path) -> None:
    plain = Scaled()
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.1), 3)
    assert run_ranks(_resume, 2, way, str(tmp_path / "saved")) == [float(plain.scale.detach())] * 2
