"""`zc.whole_parameters` between the backwards of an update, of which ranks make other numbers: it waits for all ranks,
and what they bring before and after it is in the update."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from harness import run_cases
from models import Heads, seeded
from oracle import worst
from torch import Tensor, nn
from torch.optim import SGD

import zc

STEPS = 4
WAYS: list[tuple[int, dict[str, Any]]] = [
    (3, {}),
    (3, {"backend": "aot_eager"}),
    (3, {"offload": "cpu"}),
    (1, {"shard_frozen": True}),
    (2, {"shard_frozen": True}),
]


def _made(dtype: torch.dtype) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = Heads().to(dtype)
    next(model.parameters()).requires_grad_(False)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _loss(model: nn.Module, rank: int, step: int, k: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, 16, generator=seeded(rank, step, k)).to(dtype)
    return torch.stack([out.square().mean() for out in model(x, (k % 3,))]).sum()


def _backwards(rank: int, step: int) -> tuple[range, range]:
    """Before and after."""
    before = 1 + (rank + step) % 2
    return range(before), range(before, before + (rank + step // 2) % 2)


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def _in_one_process(world_size: int) -> dict[str, Tensor]:
    model, optimizer = _made(torch.float64)
    for step in range(STEPS):
        for part in (0, 1):
            for rank in range(world_size):
                for k in _backwards(rank, step)[part]:
                    (_loss(model, rank, step, k, torch.float64) / world_size).backward()
            if part == 0:
                _clamp(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _train(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> float:
    model, optimizer = _made(torch.float32)
    options = {"bucket_nbytes": 1024, "backend": "eager", **options}
    model, optimizer = zc.compile(model, optimizer, stage=stage, **options)  # type: ignore[assignment]
    for step in range(STEPS):
        before, after = _backwards(rank, step)
        for k in before:
            with zc.no_sync(model) if k % 2 else contextlib.nullcontext():
                _loss(model, rank, step, k, torch.float32).backward()
        with zc.whole_parameters(model):
            _clamp(model)
        for k in after:
            _loss(model, rank, step, k, torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zc.whole_parameters(model):
        return worst({name: p.detach().clone() for name, p in model.named_parameters()}, _in_one_process(world_size))[0]


@pytest.mark.filterwarnings("ignore:zc")
def test_all_backwards_of_all_ranks_are_in_the_update() -> None:
    for (stage, options), differences in run_cases(_train, 2, WAYS):
        assert max(differences) < 1e-5, (stage, options, differences)
