"""The page says how long the exchanges of the clocked step waited for other ranks, and for which of them."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import zc
from zc.planning.plan import Plan
from zc.ranks.exchanges import WaitForRank
from zc.registry import sharded
from zc.report.html import text_of_waits

LATE, LATE_S = 2, 0.3


def waits_of_a_clocked_step(rank: int, world_size: int, memory: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Job: rank 2 comes late to each backward."""
    os.environ["ZC_HOST_MEMORY"] = str(int(memory))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, bucket_nbytes=300, **options)
    for _ in range(8):
        loss = model(torch.ones(2, 8)).square().mean()
        dist.barrier()  # else another rank may be later, on a busy machine
        if rank == LATE:
            time.sleep(LATE_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step = sharded(model).runtime.streams.clock.step()
    assert step is not None
    by_rank: Counter[int | None] = Counter()
    reduced_with: set[int | None] = set()
    for span in step.spans:
        if span.name.startswith(("reduce", "take", "finish")):
            reduced_with.update(wait.rank for wait in span.waits)
        assert all(span.start <= wait.start <= wait.stop <= span.stop for wait in span.waits), span
        for wait in span.waits:
            by_rank[wait.rank] += wait.stop - wait.start
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        zc.explain(model, format="html", path=page)
        waits = {"waits": dict(by_rank), "reduced_with": reduced_with - {None}}
        return {**waits, "page": page.read_text(), "plan": sharded(model).runtime.plan}


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (True, {"backend": "eager"}),
        (False, {"backend": "eager"}),
        (False, {"backend": "eager", "reduce_dtype": torch.int8}),
        (False, {"backend": "aot_eager", "stage": 1}),
    ],
)
def test_the_late_rank_is_named(memory: bool, options: dict[str, Any]) -> None:
    ranks = run_ranks(waits_of_a_clocked_step, 3, memory, options)
    plan: Plan = ranks[0]["plan"]
    assert plan.topology.reads_memory == memory and len(plan.buckets) > 1
    for rank, result in enumerate(ranks):
        waits = result["waits"]
        # announcements by messages are a collective; where the comm stream waits for it, it has the wait
        collective = waits.pop(None, 0.0)
        assert result["reduced_with"] == set(waits) == {0, 1, 2} - {rank}, "each reduction is with both other ranks"
        if rank != LATE:
            page, other = result["page"], 1 - rank
            assert waits[LATE] + collective > waits[other]
            whom = "" if collective else r", [\d.]+ ms of them for rank 2;"
            assert re.search(rf"exchanges waited [\d.]+ ms for other ranks{whom}", page)
            assert 'class="wait"' in page and "there it waits for other ranks" in page


def test_what_it_says() -> None:
    assert text_of_waits([]) == "" == text_of_waits([WaitForRank(1, 5.0, 5.1)])
    waits = [WaitForRank(1, 0.0, 300.0), WaitForRank(3, 300.0, 2_000.0), WaitForRank(1, 2_000.0, 2_100.0)]
    assert text_of_waits(waits) == "2.1 ms for other ranks, 1.7 ms of them for rank 3"
    assert text_of_waits([WaitForRank(None, 0.0, 40.0)]) == "40 µs for other ranks", "a collective does not tell whose"
