"""What ranks tell each other around a backward: as little as it takes, and never so that one waits for ever."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from models import Broken, mlp
from torch import nn
from training_runs import sgd

import zc
from zc.engine.announcements import Announcements
from zc.ranks.journal import FOLD, Record

STEPS = 3


def _said(rank: int, world_size: int, make: Any, stage: int, backend: str) -> list[tuple[list[str], bool]]:
    """Job: of each update, the first words of its announcements, and whether all buckets were reduced before step()."""
    torch.manual_seed(0)
    model: nn.Module = make()
    model, optimizer = zc.compile(model, sgd(model), stage=stage, backend=backend, bucket_nbytes=64)
    runtime = zc.registry.sharded(model).runtime
    said: list[str] = []
    announce = Announcements.announce

    def listening(self: Announcements, what: str, *rest: Any) -> Any:
        said.append(what.split(" ")[0])
        return announce(self, what, *rest)

    rounds: list[tuple[list[str], bool]] = []
    with mock.patch.object(Announcements, "announce", listening):
        for _ in range(STEPS):
            said.clear()
            model(torch.ones(2, 16)).sum().backward()
            runtime.streams.join_main()
            reduced = runtime.accumulators.num_reductions.keys() == set(range(len(runtime.plan.buckets)))
            optimizer.step()
            optimizer.zero_grad()
            rounds.append((list(said), reduced))
    return rounds


@pytest.mark.parametrize(("make", "backend"), [(mlp, "eager"), (mlp, "aot_eager"), (Broken, "aot_eager")])
def test_one_announcement_a_backward(make: Any, backend: str) -> None:
    """Stage 1: one, whatever comes in, hooks and broken graphs too; from the second update on all buckets overlap with
    the backward. Whoever knows that all parameters have a gradient asks nobody at its end."""
    for result in run_ranks(_said, 2, make, 1, backend):
        is_known = (make, backend) == (mlp, "aot_eager")
        wanted = ["reduce", "finish"] if is_known else ["reduce", "end", "finish"]
        assert [said for said, _ in result] == [wanted] * STEPS
        assert all(reduced for _, reduced in result[1:])


def test_the_journal_of_a_loop_that_never_steps_does_not_grow() -> None:
    """Ranks fold at the same entries, so checksums of the same exchanges are the same, and a difference in one that was
    folded is still seen."""
    mine, theirs, other = Record(0, []), Record(0, []), Record(0, [])
    for k in range(5 * FOLD):
        entry = ("reduce", k % 7)
        mine = mine.with_entry(entry)
        theirs = theirs.with_entry(entry)
        other = other.with_entry(("reduce", 3) if k == 5 else entry)
    assert len(mine.entries) <= 2 * FOLD and mine.total == 5 * FOLD
    assert mine == theirs
    assert mine.sums != other.sums and mine.folded == other.folded
