"""Public reports of norms and gradients that went wrong with offload, each with what it looks like
when the code under it is broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Heads, seeded
from torch import nn

import zc

DIM, TASKS = 16, 3


def data(rank: int, task: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(rank, 7, task)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, 4, generator=generator)


def build(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Heads(DIM, TASKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zc.compile(model, optimizer, backend="eager", bucket_nbytes=2000, offload="cpu", **options)


def one_process(tasks: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Mean gradients over two ranks in float64, plain PyTorch."""
    torch.manual_seed(0)
    model = Heads(DIM, TASKS).double()
    for rank in range(2):
        for task in tasks:
            x, y = (t.double() for t in data(rank, task))
            (nn.functional.mse_loss(model(x, (task,))[0], y) / 2).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def joint(grads: dict[str, torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()])))


def edited(rank: int, world_size: int, mode: str, fault: str | None) -> tuple[float, float, bool]:
    """Job: the norm, the norm after one gradient was scaled by hand, and whether the update took the scaled one."""
    model, optimizer = build(offload_accumulate=mode)
    shards = zc.registry.sharded(model).grad_shards
    if fault == "the norm is kept":  # deepspeed#7302
        shards._norms = type("Stale", (dict,), {"clear": lambda self: None})()
    if fault == "host memory is not told":  # deepspeed#7292: clipped on one copy, updated from the other
        shards.scale_grad = lambda name, factor: [shard.mul_(factor) for shard in shards.copies(name)[1:]]
    for task in range(TASKS):
        x, y = data(rank, task)
        nn.functional.mse_loss(model(x, (task,))[0], y).backward()
    first = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    bias = model.heads[0].bias
    before = bias.detach().clone()
    for param in model.parameters():
        param.grad.mul_(0.0 if param is bias else 0.5)
    second = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    return first, second, torch.equal(bias, before)


@pytest.mark.parametrize("mode", ["cpu", "device"])
def test_ds7302_the_norm_is_that_of_the_gradients_as_they_are_now(mode: str) -> None:
    """deepspeed#7302, deepspeed#7292: with offload, gradients that the script had changed were reported with their old
    norm."""
    grads = one_process((0, 1, 2))
    changed = {n: g * (0.0 if n == "heads.0.bias" else 0.5) for n, g in grads.items()}
    for first, second, stays in run_ranks(edited, 2, mode, None):
        assert first == pytest.approx(joint(grads), rel=1e-6)
        assert second == pytest.approx(joint(changed), rel=1e-6)
        assert stays, "the update of a gradient of zeros moved something"
    _, second, _ = run_ranks(edited, 2, mode, "the norm is kept")[0]
    assert second != pytest.approx(joint(changed), rel=1e-2)
    if mode == "device":
        assert not run_ranks(edited, 2, mode, "host memory is not told")[0][2]
