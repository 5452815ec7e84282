"""`zc.join`: ranks with different numbers of batches, against DDP's own Join and against one process in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from models import CASES
from oracle import weights, worst
from tiers import COMPILED
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import zc

CASE = CASES["mlp"]
MAX_NORM = 0.05


def _batches(rank: int, counts: tuple[int, ...]) -> list[Any]:
    return [CASE.batch(rank, step, 0) for step in range(counts[rank])]


def _optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def _joined(
    rank: int, world_size: int, counts: tuple[int, ...], microbatches: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = CASE.model()
    model, optimizer = zc.compile(model, _optimizer(model), bucket_nbytes=512, **options)
    num_batches = 0
    for number, batch in enumerate(zc.join(model, _batches(rank, counts), microbatches=microbatches), 1):
        num_batches += 1
        if batch is not None:
            (CASE.loss(model, batch) / microbatches).backward()
        if number % microbatches == 0:
            zc.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), num_batches


def _ddp_joined(rank: int, world_size: int, counts: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(CASE.model())
    optimizer = _optimizer(model)
    with Join([model]):
        for batch in _batches(rank, counts):
            CASE.loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model.module)


def _in_one_process(counts: tuple[int, ...], microbatches: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = CASE.model().double()
    optimizer = _optimizer(model)
    for first in range(0, max(counts), microbatches):
        for rank in range(len(counts)):
            for batch in _batches(rank, counts)[first : first + microbatches]:
                exact = tuple(t.double() if t.is_floating_point() else t for t in batch)
                (CASE.loss(model, exact) / microbatches / len(counts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    ("counts", "microbatches", "options"),
    [
        ((5, 2), 1, {"backend": "aot_eager", "stage": 2}),
        ((1, 4), 1, {"backend": "eager", "stage": 2, "overlap_gather": True}),
        ((0, 3), 1, {"backend": "eager", "stage": 1}),
        ((5, 2), 2, {"backend": COMPILED, "stage": 1}),
        ((3, 8), 3, {"backend": "eager", "stage": 2}),
    ],
)
def test_ranks_end_together(counts: tuple[int, ...], microbatches: int, options: dict[str, Any]) -> None:
    wanted = _in_one_process(counts, microbatches)
    updates = -(-max(counts) // microbatches)
    for trained, num_batches in run_ranks(_joined, 2, counts, microbatches, options):
        assert num_batches == updates * microbatches
        assert worst(trained, wanted)[0] < 2e-5, worst(trained, wanted)
    if microbatches == 1:
        ddp = run_ranks(_ddp_joined, 2, counts)[0]
        assert worst(wanted, ddp)[0] < 2e-5, worst(wanted, ddp)


def _with_nothing(rank: int, world_size: int) -> tuple[list[Any], str]:
    model = CASE.model()
    zc.compile(model, _optimizer(model), backend="eager")
    try:
        zc.join(model, [], microbatches=0)
    except zc.PlanError as error:
        for ddps in (model.join, lambda: Join([model])):
            with pytest.raises(zc.ZcError, match=r"zc\.join\(model, loader\)"):
                ddps()
        with pytest.raises(TypeError):  # a copy is a plain module
            Join([copy.deepcopy(model)])  # type: ignore[list-item]
        return list(zc.join(model, [])), str(error)
    return [], ""


def test_no_rank_has_data() -> None:
    for result, error in run_ranks(_with_nothing, 2):
        assert result == []
        assert error == "microbatches must be a whole number of at least 1, got 0"


def _buffers(rank: int, world_size: int, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model, optimizer = zc.compile(model, _optimizer(model), backend="eager")
    own = torch.zeros(4)
    for number, batch in enumerate(zc.join(model, range(counts[rank]))):
        if batch is not None:
            torch.manual_seed(10 * number + rank)
            model(torch.randn(5, 3)).square().sum().backward()
            own = model[1].running_mean.clone()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3))
    return model[1].running_mean.clone(), own


def test_buffers_stay_those_of_rank_0() -> None:
    """On all ranks those of rank 0's last forward, also where another rank has forwards after it."""
    for (counts,), ((first, own), (other, _)) in run_cases(_buffers, 2, [((1, 4),), ((4, 1),), ((0, 3),)]):
        assert torch.equal(first, own) and torch.equal(other, own), counts
        assert torch.equal(own, torch.zeros(4)) == (counts[0] == 0)
