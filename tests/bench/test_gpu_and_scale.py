"""What `make gpu-bench` and bench.scale do that needs no GPU: order, gate, rows, the modelled cost of many ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, scale
from bench.cases import CASES, PROVIDERS


def fake_run(cell: Any, session: str, expected: object, args: argparse.Namespace) -> dict[str, Any]:
    return {"status": "ok", "network": cell.network, "p50_ms": "1"}


def test_cells_run_in_order_once_and_only_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.run, "run_once", fake_run)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 1000.0)
    known = [
        {"session": "s", "case": c.case, "provider": c.provider, "network": c.paced[0] if c.paced else ""}
        for c in gpu.CELLS[:3]
    ]
    made = list(gpu.step_rows(1061.0, "s", known))
    shown = [gpu.Cell(r["case"], r["provider"], (r["network"], 8) if r["network"] else None) for r in made]
    assert shown == gpu.CELLS[3:]
    assert len(list(gpu.step_rows(1061.0, "another", known))) == len(gpu.CELLS)
    assert list(gpu.step_rows(1059.0, "s", known)) == []
    assert all(c.case in CASES and c.provider in PROVIDERS for c in gpu.CELLS)


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch.cuda.is_available\(\) is False: nothing is measured"):
        gpu.main(["--csv", str(tmp_path / "gpu.csv")])
    assert not (tmp_path / "gpu.csv").exists()


def test_a_real_rank_is_compared_with_the_floor() -> None:
    floor = {
        "case": "c",
        "provider": gpu.FLOOR,
        "status": "ok",
        "network": "",
        "loss_before": "9.0",
        "loss_after_5": "5.0",
    }
    near = floor | {"provider": "zc stage 2", "loss_after_5": "5.02"}
    assert gpu.depart(near, [floor]) is None
    assert gpu.depart(floor, []) is None
    far = near | {"loss_after_5": "5.04"}
    assert gpu.depart(far, [floor]) == "loss after 5 updates is 5.04000, the floor's is 5.00000"
    paced = far | {"network": "nvlink"}  # its other ranks are made up: only the loss before an update can be right
    assert gpu.depart(paced, [floor]) is None
    wrong = gpu.depart(paced | {"loss_before": "9.04"}, [floor])
    assert wrong == "loss before any update is 9.04000, the floor's is 9.00000"
    assert gpu.depart(near, [floor | {"case": "other"}]) == "no floor to compare its losses with"


def test_the_plan_at_many_ranks() -> None:
    points = list(scale.plan_points("llama-0.3b", [8, 4096]))
    held = {p.x: p.value for p in points if p.kind.startswith("persistent")}
    with torch.device("meta"):
        from bench.cases.models import GPTConfig, make_model

        numel = sum(p.numel() for p in make_model("llama-0.3b", GPTConfig(vocab=32768), 0, "meta").parameters())
    assert held[8] == pytest.approx(numel * (2 + 16 / 8) / 1e6, rel=1e-3)
    assert held[4096] == pytest.approx(numel * 2 / 1e6, rel=0.02)  # and padding
    counts = {p.series: p.value for p in points if p.kind == "number of buckets"}
    assert counts == {"llama-0.3b, by default": 24, "llama-0.3b, of 25 MiB": 24}, "a small model keeps 25 MiB"
    wire = {(p.series, p.x): p.value for p in points if p.kind == "modelled communication"}
    both_ways = 2 * numel * 2 * 7 / 8 / 45e9 * 1e3  # bf16 gradients out, bf16 weights in
    assert both_ways < wire["native, 400g", 8] < 1.1 * both_ways
    assert wire["exact, 400g", 4096] > wire["native, 400g", 4096]  # one message a peer against a tree's levels
