"""zc.compile on ranks with other models, options or groups: one error on every rank, before anything has changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import run_cases, run_ranks
from models import mlp
from torch import nn
from torch.optim import AdamW
from training_runs import adamw, message_of

import zc


def _differ(rank: int, world_size: int, what: str) -> dict[str, Any]:
    model: nn.Module = mlp()
    options: dict[str, Any] = {}
    if what == "shape" and rank == 1:
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
    elif what == "frozen" and rank == 1:
        model[2].bias.requires_grad_(False)
    elif what == "dtype" and rank == 1:
        model[2].bfloat16()
    elif what == "extra" and rank == 1:
        model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    elif what == "option":
        options["bucket_nbytes"] = 1000 + rank
    elif what == "registration":
        model = nn.Module()
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            model.register_parameter(name, nn.Parameter(torch.zeros(2)))
    optimizer = adamw(model)
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    raised = message_of(lambda: zc.compile(model, optimizer, backend="eager", **options))
    return {"raised": raised, "unchanged": [(id(p), p.data_ptr()) for p in model.parameters()] == before}


DIFFERENCES = {
    "shape": ["2.weight", "(16, 16)", "(8, 16)"],
    "frozen": ["2.bias", "requires_grad"],
    "dtype": ["2.weight", "torch.bfloat16"],
    "extra": ["extra"],
    "option": ["bucket_nbytes", "1000", "1001"],
    "registration": ["a (2,)", "b (2,)"],
}


def test_ranks_that_differ() -> None:
    """deepspeed#2343, deepspeed#545, pytorch#150074: named on every rank, in seconds, not a hang in some later
    collective."""
    for what, ranks in run_cases(_differ, 2, DIFFERENCES, timeout=60):
        for seen in ranks:
            kind, text = seen["raised"]
            assert kind == "RankMismatchError", (kind, text)
            assert all(word in text for word in DIFFERENCES[what]) and "rank 1" in text, text
            assert seen["unchanged"], what


def _one_rank_is_refused(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1's optimizer lacks a parameter; rank 0's is fine."""
    model = mlp()
    optimizer = adamw(model) if rank == 0 else AdamW(model[0].parameters())
    return message_of(lambda: zc.compile(model, optimizer, backend="eager"))


def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    """Local checks come before the first collective; the ranks that pass them must not wait for ever."""
    results = run_ranks(_one_rank_is_refused, 2, timeout=60)
    assert results[1][0] == "PlanError" and results[0][0] in ("RankMismatchError", "PlanError")


def _outside_the_group(rank: int, world_size: int) -> tuple[str, str]:
    group = dist.new_group([0])
    model = mlp()
    return message_of(lambda: zc.compile(model, adamw(model), backend="eager", group=group))


def test_a_rank_outside_the_group() -> None:
    """Otherwise it trains alone beside the others."""
    results = run_ranks(_outside_the_group, 2, timeout=60)
    assert results[0] == ("", "") and results[1][0] == "PlanError" and "not a member" in results[1][1]
