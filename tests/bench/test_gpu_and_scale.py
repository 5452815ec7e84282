"""What `make gpu-bench` and bench.scale do that needs no GPU: a refusal, and the modelled cost of many ranks."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

import zc
from bench import cases, gpu, kernels, scale
from bench.report import rows


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch.cuda.is_available\(\) is False: nothing is measured"):
        gpu.main(["--csv", str(tmp_path / "gpu.csv")])
    assert not (tmp_path / "gpu.csv").exists()


def test_a_loss_that_departs_from_the_floors_takes_the_time_away() -> None:
    ok = {"case": "llama-0.3b-512-ga1", "status": "ok"}
    floor = ok | {"provider": gpu.FLOOR, "loss_before": "10.5", "loss_after_5": "9.0"}
    ours = ok | {"provider": "zc stage 2", "network": "", "loss_before": "10.5", "loss_after_5": "9.5"}
    assert gpu.depart(ours, [floor]) == "loss after 5 updates is 9.50000, the floor's is 9.00000"
    paced = ours | {"network": "zero"}
    assert gpu.depart(paced, [floor]) is None, "the other ranks' updates are made up"
    assert gpu.depart(paced | {"loss_before": "10.9"}, [floor]) is not None
    sharded = paced | {"provider": "FSDP2 + compile", "loss_before": "10.9"}
    assert gpu.depart(sharded, [floor]) is None, "so are the other ranks' weights"
    assert gpu.depart(sharded | {"network": ""}, [floor]) is not None
    assert gpu.depart(ours | {"case": "another"}, [floor]) == "no floor to compare its losses with"


def test_what_is_measured_is_this_checkout_installed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU machine that has torch alone, zc was skipped as not installed."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cases.version_of(cases.PROVIDERS["zc stage 2"]) == zc.__version__
    assert cases.version_of(cases.PROVIDERS["DeepSpeed ZeRO-2 + compile"]) is None


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
