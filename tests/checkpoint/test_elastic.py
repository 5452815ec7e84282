"""Two torchrun agents lose a rank, then one of the two: minutes long, so only with ZC_TESTS=full."""

from __future__ import annotations

from pathlib import Path

from tiers import full_only

from bench.elastic import main

pytestmark = full_only


def test_a_job_outlives_a_rank_and_an_agent(tmp_path: Path) -> None:
    report = main(["--steps", "40", "--quiet", "--out", str(tmp_path / "out")])
    first, second = report["restarts"][:2]
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert report["differs"][2] == 0.0
