"""A rank that stands still or ends inside a save or a load: a RankLostError on the others, no wait without end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import RanksFailed, run_ranks
from save_and_load import Job
from tiers import full_only
from training_runs import message_of

import zc
from zc.checkpoint.files import Reader, Writer

IN = {"save": (Writer, "write_data"), "asynchronous save": (Writer, "write_data"), "load": (Reader, "read_data")}


def _stopped(rank: int, world_size: int, what: str, how: int, folder: Path) -> Any:
    """Rank 1 gets the signal inside DCP, and is woken when rank 0 has been told."""
    os.environ["ZC_RANK_TIMEOUT"] = "3"
    try:
        model, optimizer = Job("mlp").compiled()
    finally:
        del os.environ["ZC_RANK_TIMEOUT"]
    zc.save(folder / "good", model, optimizer)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    kind, method = IN[what]
    inside = getattr(kind, method)

    def hit(*args: Any) -> Any:
        os.kill(os.getpid(), how)
        return inside(*args)

    def run() -> None:
        if what == "load":
            zc.load(folder / "good", model, optimizer)
        else:
            zc.save(folder / "next", model, optimizer, asynchronous=what != "save").wait()

    if rank == 1:
        setattr(kind, method, hit)
    try:
        said = message_of(run)
    finally:
        setattr(kind, method, inside)
        if rank == 0 and how == signal.SIGSTOP:
            os.kill(pids[1], signal.SIGCONT)
    if how == signal.SIGKILL:
        raise AssertionError(": ".join(said))  # a result would wait for rank 1's
    for thread in threading.enumerate():
        if thread.name == "zc call" and rank == 0:  # in it DCP goes on, and would make the folder visible
            thread.join(20)
    return said


@pytest.mark.parametrize("what", ["save", *(pytest.param(what, marks=full_only) for what in list(IN)[1:])])
def test_a_rank_that_is_stopped(what: str, tmp_path: Path) -> None:
    """The others waited in DCP's gather_object. It hears of it when it wakes, and nothing becomes visible then."""
    for kind, text in run_ranks(_stopped, 2, what, signal.SIGSTOP, tmp_path, timeout=60):
        assert kind == "RankLostError" and "rank 1 has not answered" in text, (kind, text)
        assert f"{'loading' if what == 'load' else 'saving'} {tmp_path}" in text
    assert zc.latest(tmp_path) == tmp_path / "good"


@pytest.mark.parametrize("what", [pytest.param("save", marks=full_only), "load"])
def test_a_rank_that_is_killed(what: str, tmp_path: Path) -> None:
    """gloo's own "Connection closed by peer" names an address."""
    with pytest.raises(RanksFailed) as raised:
        run_ranks(_stopped, 2, what, signal.SIGKILL, tmp_path, timeout=60)
    assert "RankLostError: rank 1 has not answered" in raised.value.errors[0]
    assert zc.latest(tmp_path) == tmp_path / "good"


def _gathers(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 is elsewhere while rank 0 gathers the optimizer's state."""
    os.environ["ZC_RANK_TIMEOUT"] = "3"
    try:
        model, optimizer = Job("mlp").compiled()
    finally:
        del os.environ["ZC_RANK_TIMEOUT"]
    if rank == 1:
        return message_of(dist.barrier)
    said = message_of(lambda: zc.full_optimizer_state(model, optimizer))
    dist.barrier()
    return said


@full_only
def test_a_rank_that_gathers_alone() -> None:
    kind, text = run_ranks(_gathers, 2, timeout=60)[0]
    assert kind == "RankMismatchError" and "torch.distributed.barrier" in text, (kind, text)
