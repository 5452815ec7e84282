"""kill -9 while ranks save: what is newest afterwards loads, and is what was saved (200 kills: docs/checkpoints.md)."""

from __future__ import annotations

import os
from pathlib import Path

import zc
from bench.checkpoint import main

KILLS = 60 if os.environ.get("ZC_TESTS") == "full" else 4


def test_the_newest_checkpoint_always_loads(tmp_path: Path) -> None:
    report = main(["kill", "--kills", str(KILLS), "--longest-s", "0.6", "--quiet", "--out", str(tmp_path / "out")])
    assert report["newest_loaded"] == KILLS
    assert report["saves"] > 0
    if KILLS > 10:
        assert report["inside_a_save"] > 0, "no kill came while something was being written"
    assert zc.latest(tmp_path / "out" / "checkpoints") is not None
