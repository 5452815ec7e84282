"""What `make gpu-bench` and bench.scale do that needs no GPU: a refusal, and the modelled cost of many ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import gpu, kernels, scale
from bench.report import rows


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch.cuda.is_available\(\) is False: nothing is measured"):
        gpu.main(["--csv", str(tmp_path / "gpu.csv")])
    assert not (tmp_path / "gpu.csv").exists()


def test_every_kernel_is_timed_and_one_that_is_wrong_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; a GPU runs the same cases with more rivals."""
    results = list(kernels.rows([1], 2, torch.device("cpu")))
    names = {str(row["case"]).split()[0] for row in results}
    assert names == {"flatten_cast", "accumulate_cast", "reduce_rows", "sums_of_squares"}
    assert all(row["note"] == "" and float(str(row["p50_ms"])) > 0 for row in results)
    written = [gpu.as_row(row) for row in results]
    assert {row["status"] for row in written} == {"ok"} and set(written[0]) <= set(rows.COLUMNS)
    monkeypatch.setattr(kernels.kernels, "reduce_rows", lambda *args, **options: None)
    with pytest.raises(SystemExit, match=r"reduce_rows .* gives a wrong result: no number"):
        list(kernels.rows([1], 2, torch.device("cpu"), only="reduce_rows"))


def test_the_plan_at_many_ranks() -> None:
    points = list(scale.plan_points("llama-0.3b", [8, 4096]))
    nbytes = {p.x: p.value for p in points if p.kind.startswith("persistent")}
    with torch.device("meta"):
        from bench.cases.models import GPTConfig, make_model

        numel = sum(p.numel() for p in make_model("llama-0.3b", GPTConfig(vocab=32768), 0, "meta").parameters())
    assert nbytes[8] == pytest.approx(numel * (2 + 16 / 8) / 1e6, rel=1e-3)
    assert nbytes[4096] == pytest.approx(numel * 2 / 1e6, rel=0.02)  # and padding
    counts = {p.series: p.value for p in points if p.kind == "number of buckets"}
    assert counts == {"llama-0.3b, by default": 24, "llama-0.3b, of 25 MiB": 24}, "a small model keeps 25 MiB"
    wire = {(p.series, p.x): p.value for p in points if p.kind == "modelled communication"}
    both_ways = 2 * numel * 2 * 7 / 8 / 45e9 * 1e3  # bf16 gradients out, bf16 weights in
    assert both_ways < wire["native, 400g", 8] < 1.1 * both_ways
    assert wire["exact, 400g", 4096] > wire["native, 400g", 4096]  # one message a peer against a tree's levels
