"""Planted divergences: each rank leaves a file, and ``python -m zc diff`` names the first difference with its line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import diverging_loops
import pytest
import torch.distributed as dist
from diverging_loops import CASES, Loop, line_of, model_of
from harness import run_ranks
from models import Heads
from training_runs import message_of

import zc
from zc.diverged import command
from zc.diverged.files import read

AT_ONCE = 8  # pairs of ranks in one job: they wait, most of the time


def _pairs(rank: int, world_size: int, cases: Sequence[tuple[str, int, int]], folder: str) -> tuple[str, str]:
    """Job: each pair of ranks runs one case, and leaves its files in a folder of its own."""
    # a rank that stands in a collective of its own gets no verdict, but an error of the network
    limit = timedelta(seconds=10)
    groups = [dist.new_group([first, first + 1], timeout=limit) for first in range(0, world_size, 2)]
    name, stage, odd = cases[rank // 2]
    os.environ.update(ZC_RANK_TIMEOUT="1", ZC_DIVERGED_DIR=f"{folder}/{name}-{stage}-{odd}")
    group = groups[rank // 2]
    model, optimizer = model_of(Heads, stage, group)
    loop = Loop(model, optimizer, rank % 2 == odd, group, f"{folder}/saved-{rank // 2}")
    kind, text = message_of(lambda: getattr(diverging_loops, name)(loop))
    return kind, text


@pytest.mark.parametrize("start", range(0, len(CASES), AT_ONCE))
def test_the_first_difference_is_named_with_the_users_line(start: int, tmp_path: Path) -> None:
    chosen = CASES[start : start + AT_ONCE]
    named = [(run.__name__, stage, odd) for run, stage, odd in chosen]
    raised = run_ranks(_pairs, 2 * len(chosen), named, str(tmp_path), timeout=90.0)
    wrong = []
    for at, (run, stage, odd) in enumerate(chosen):
        where = f"{run.__name__}, stage {stage}, rank {odd} is odd"
        try:
            text, is_different = command.report(read(tmp_path / f"{run.__name__}-{stage}-{odd}"))
        except zc.ZcError as error:
            wrong.append(f"{where}: {error!r}; {raised[2 * at : 2 * at + 2]}")
            continue
        first = re.search(r"First difference: .*?\n\n", text, flags=re.S)
        line = f"{diverging_loops.__file__}:{line_of(run)} in {run.__name__}"
        if not is_different or first is None or line not in first[0]:
            wrong.append(f"{where}: not {line} in\n{text}\n{raised[2 * at : 2 * at + 2]}")
    assert not wrong, "\n\n".join(wrong)
