"""Updates that change other buckets each time, as with layer drop, or a head for each task: the numbers are those of
one process, and no schedule is made for a set of buckets."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import worst
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import zc

DIM, DEPTH, UPDATES = 16, 6, 14
BUCKET = 4 * (DIM * DIM + DIM)  # a layer
SHARD_NBYTES = 4 * 160  # of a layer with padding, on each of two ranks


class Dropped(nn.Module):
    """Runs the layers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(DEPTH))

    def forward(self, x: Tensor, layers: list[int]) -> Tensor:
        for k in layers:
            x = torch.tanh(self.layers[k](x))
        return x.square().mean()


def _sgd(model: nn.Module) -> Optimizer:
    """Its momentum and weight decay would move what has no gradient."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _drawn(world_size: int) -> list[list[list[int]]]:
    """[update][rank]: the layers that run."""
    draw = random.Random(7)
    return [[sorted(draw.sample(range(DEPTH), 2)) for _ in range(world_size)] for _ in range(UPDATES)]


def _batch(rank: int, update: int) -> Tensor:
    return torch.randn(3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * update + rank))


def _in_one_process(world_size: int) -> dict[str, Tensor]:
    """Plain PyTorch in float64: the mean over the ranks' losses."""
    torch.manual_seed(0)
    model = Dropped().double()
    optimizer = _sgd(model)
    for update, drawn in enumerate(_drawn(world_size)):
        for rank, layers in enumerate(drawn):
            (model(_batch(rank, update), layers) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def _train(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, int, list[int]]:
    """The largest difference from one process, the number of schedules for updates, and the bytes that each update sent
    to gather weights."""
    torch.manual_seed(0)
    model: nn.Module = Dropped()
    model, optimizer = zc.compile(model, _sgd(model), backend="eager", bucket_nbytes=BUCKET, **options)
    compiled = zc.registry.sharded(model)
    assert len(compiled.runtime.plan.buckets) == DEPTH
    num_sent = []
    for update, drawn in enumerate(_drawn(world_size)):
        model(_batch(rank, update).float(), drawn[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_sent.append(compiled.runtime.ledger.last.nbytes_sent["gather weights"])
    updates = sum(len(each.updater.programs) for each in compiled.optimizers)
    programs = len(compiled.runtime.weights.programs) + updates
    with zc.whole_parameters(model):
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return worst(weights, _in_one_process(world_size))[0], programs, num_sent


# with overlap_gather a schedule waits for one bucket; stage 3 gathers each bucket for code that is not compiled
CASES = [
    ({"stage": 1}, 1),
    ({"stage": 2}, 1),
    ({"stage": 2, "reduce": "native"}, 1),
    ({"stage": 2, "overlap_gather": True}, 1 + DEPTH),
    ({"stage": 1, "offload": "cpu"}, 1),
    ({"stage": 2, "offload": "cpu"}, 1),
    ({"stage": 3, "offload": "cpu"}, 1 + DEPTH),
]


@pytest.mark.filterwarnings("ignore:zc")
@pytest.mark.parametrize(("options", "num_programs"), CASES, ids=[str(options) for options, _ in CASES])
def test_no_schedule_is_made_for_a_set_of_buckets(options: dict[str, Any], num_programs: int) -> None:
    changed = [{k for layers in drawn for k in layers} for drawn in _drawn(2)]
    assert len({frozenset(each) for each in changed}) > UPDATES // 2, "nearly every update has another one"
    for difference, programs, num_sent in run_ranks(_train, 2, options):
        assert difference < 1e-6
        assert programs == num_programs
        if options["stage"] < 3 and "overlap_gather" not in options:
            assert num_sent == [SHARD_NBYTES * len(each) for each in changed], "and only what has changed is gathered"
