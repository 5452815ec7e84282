"""Ranks that are out of step abandon their groups, since no exchange completes there. A program that catches the error
and compiles again closes them: each has threads and connections."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import torch
import torch.distributed as dist
from harness import run_ranks

import zc

ROUNDS = 4


def _num_groups(rank: int, world_size: int) -> list[int]:
    """After each round, in which this rank's model fails."""
    numbers = []
    with mock.patch.dict(os.environ, {"ZC_RANK_TIMEOUT": "2"}):
        for _ in range(ROUNDS):
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = zc.compile(model, optimizer, backend="eager")  # type: ignore[assignment]
            has_stepped = False
            with contextlib.suppress(zc.RankMismatchError):
                model(torch.ones(2, 8)).sum().backward()
                if rank == 1:
                    zc.clip_grad_norm_(model, 1.0)
                optimizer.step()
                has_stepped = True
            assert not has_stepped
            numbers.append(len(dist.distributed_c10d._world.pg_map))
    return numbers


def test_a_program_that_goes_on_closes_them() -> None:
    for numbers in run_ranks(_num_groups, 2):
        assert numbers == [numbers[0]] * ROUNDS, numbers
