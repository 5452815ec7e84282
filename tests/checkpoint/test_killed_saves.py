"""kill -9 while ranks save, and two jobs that save one name: what is there loads, and is what one job saved.

By default a few; ``ZC_TESTS=full`` runs the 200 kills and 20 runs of docs/checkpoints.md.
"""

from __future__ import annotations

from pathlib import Path

from tiers import FULL

import zc
from bench.checkpoint import main

KILLS, RUNS = (200, 20) if FULL else (4, 1)


def test_the_newest_checkpoint_always_loads(tmp_path: Path) -> None:
    report = main(["kill", "--kills", str(KILLS), "--longest-s", "0.6", "--quiet", "--out", str(tmp_path / "out")])
    assert report["newest_loaded"] == KILLS
    assert report["saves"] > 0
    if KILLS > 10:
        assert report["inside_a_save"] > 0, "no kill came while something was being written"
    assert zc.latest(tmp_path / "out" / "checkpoints") is not None


def test_two_jobs_save_one_name(tmp_path: Path) -> None:
    """A mixture of both loaded, or a folder without .metadata was offered."""
    report = main(["jobs", "--runs", str(RUNS), "--quiet", "--out", str(tmp_path / "out")])
    assert report["refused"] == report["names"] == 3 * RUNS
