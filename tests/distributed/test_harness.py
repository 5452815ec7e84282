"""The harness itself: a test of distributed code is worth what its harness does when the code under it hangs."""

from __future__ import annotations

import os
import time
from unittest import mock

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, patience, probed, run_ranks
from tiers import full_only


def _pid_and_sum(rank: int, world_size: int, factor: float) -> tuple[int, float, float, int]:
    value = torch.tensor(factor * (rank + 1))
    dist.all_reduce(value)
    return os.getpid(), value.item(), torch.rand(()).item(), hash("rank")


def _raises_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("rank one's own words")
    return rank


def _rank_0_waits_for_ever(rank: int, world_size: int) -> int:
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    return rank


def _rank_0_waits_for_a_failed_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own words")
    dist.recv(torch.zeros(1), src=1)


def _dies(rank: int, world_size: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os._exit(7)


def test_processes_stay_and_each_job_starts_the_same() -> None:
    """`import torch` is paid once; group and seed are fresh, so no test depends on the one before it. Python's hash
    seed differs between ranks, as between processes of a launcher: an order that depends on it shows."""
    first = run_ranks(_pid_and_sum, 2, 1.0)
    second = run_ranks(_pid_and_sum, 2, 10.0)
    assert [r[0] for r in first] == [r[0] for r in second] and first[0][0] != first[1][0]
    assert [r[1] for r in first] == [3.0, 3.0] and [r[1] for r in second] == [30.0, 30.0]
    assert len({r[2] for r in first + second}) == 1
    assert first[0][3] != first[1][3]


def test_an_exception_names_its_rank_and_keeps_the_pool() -> None:
    """A traceback without its rank says nothing; and a rank that raised can go on with the next job."""
    with pytest.raises(RanksFailed, match="rank one's own words") as failed:
        run_ranks(_raises_on_rank_1, 2)
    assert list(failed.value.errors) == [1] and "_raises_on_rank_1" in failed.value.errors[1]
    assert [r[1] for r in run_ranks(_pid_and_sum, 2, 1.0)] == [3.0, 3.0]


def test_a_hang_is_killed_named_and_the_pool_rebuilt() -> None:
    """A collective that one rank never enters hangs the others: the test ends, and shows where they wait."""
    run_ranks(_pid_and_sum, 2, 1.0)
    before = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"timed out after \d+ s; ranks that had not finished: \[0\], finished: \[1\]"
    ) as failed:
        run_ranks(_rank_0_waits_for_ever, 2, timeout=3)
    assert "_rank_0_waits_for_ever" in failed.value.errors[0], "the stack of the waiting rank"
    assert time.monotonic() - before < 60 * patience()
    assert [r[1] for r in run_ranks(_pid_and_sum, 2, 1.0)] == [3.0, 3.0]


def test_limits_grow_with_what_the_machine_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for an idle machine makes false failures on a loaded one."""
    monkeypatch.delenv("ZC_PATIENCE", raising=False)
    cores = len(os.sched_getaffinity(0))
    for load, expected in ((0.0, 1.0), (cores, 1.0), (5.0 * cores, 5.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert patience() == expected
    monkeypatch.setenv("ZC_PATIENCE", "3")
    assert patience() == 3.0
    with pytest.raises(RanksFailed, match="timed out after 3 s"):
        run_ranks(_rank_0_waits_for_ever, 2, timeout=1)


def _probes_the_processor(rank: int, world_size: int) -> tuple[str, int]:
    """What Inductor takes the processor for, and how often it starts a C++ compiler to find out."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.cpp_builder import CppBuilder

    with mock.patch.object(CppBuilder, "build", autospec=True) as build:
        return str(cpu_vec_isa.pick_vec_isa()), build.call_count


@full_only
def test_what_inductor_finds_out_about_the_processor_is_no_job_s_time() -> None:
    """The probes of torch 2.11 take two minutes on a loaded machine: a job's whole limit."""
    harness.shutdown()  # ranks that have not asked before
    (name, times), _ = run_ranks(_probes_the_processor, 2)
    assert times == 0
    assert name != "INVALID_VEC_ISA" or not any(probed().iterdir())


def test_a_rank_that_fails_lets_the_others_go_at_once() -> None:
    """Its group is closed, so who waits for it raises too: no test waits for a timeout when an error is known."""
    run_ranks(_pid_and_sum, 2, 1.0)  # starts the processes where the test before has ended them
    before = time.monotonic()
    with pytest.raises(RanksFailed, match="rank one's own words") as failed:
        run_ranks(_rank_0_waits_for_a_failed_one, 2)
    assert sorted(failed.value.errors) == [0, 1]
    assert time.monotonic() - before < 40 * patience(), "it waited for the time limit"


def test_a_rank_that_dies_is_named() -> None:
    """A crash in C++ has no traceback: the exit code and the last output must do."""
    with pytest.raises(RanksFailed, match="exit code 7") as failed:
        run_ranks(_dies, 2)
    assert "last words" in failed.value.errors[1]
