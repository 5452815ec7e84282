"""The pair of ranks that the GPU tests use does its jobs, and a bad job costs one test. On CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from two_ranks import TwoRanks


@pytest.fixture
def pair() -> Iterator[TwoRanks]:
    pair = TwoRanks("gloo", limit_s=100.0)
    yield pair
    pair.close()


def _sum(rank: int, start: float) -> tuple[float, int]:
    x = torch.full((1,), start + rank)
    dist.all_reduce(x)
    return float(x), os.getpid()


def _fail_on(rank: int, bad_rank: int) -> None:
    if rank == bad_rank:
        raise KeyError("some name")
    time.sleep(100)


def _sleep(rank: int) -> None:
    time.sleep(100)


def test_the_same_processes_do_one_job_after_another_and_new_ones_after_a_bad_job(pair: TwoRanks) -> None:
    (first, process), (other, _) = pair.run(_sum, 1.0)
    assert (first, other) == (3.0, 3.0)
    assert pair.run(_sum, 2.0)[0] == (5.0, process)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0: Traceback.*KeyError: 'some name'"):
        pair.run(_fail_on, 0)
    (again, another), _ = pair.run(_sum, 1.0)
    assert again == 3.0
    assert another != process
    pair.limit_s = 1.0
    with pytest.raises(pytest.fail.Exception, match="no end in 1 s"):
        pair.run(_sleep)
