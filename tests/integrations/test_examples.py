"""docs/examples as docs/integrations.md says to run them: under torchrun, once from the start and once resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import TOLERANCE, furthest
from tiers import full_only

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "with_accelerate": ["accelerate"],
    "with_trainer": ["transformers", "accelerate"],
    "with_sft": ["trl", "datasets"],
    "with_lightning": ["lightning"],
    "with_fabric": ["lightning"],
    "uneven_and_traced": [],
}


def _launch(name: str, *argv: str) -> str:
    for package in NEEDS[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-integrations")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(ROOT / "docs" / "examples" / f"{name}.py"), "--cpu", *argv],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


@full_only
@pytest.mark.parametrize("name", [name for name in NEEDS if name != "with_sft"])
def test_it_runs(tmp_path: Path, name: str) -> None:
    _launch(name, "--out", str(tmp_path))
    if name == "uneven_and_traced":
        text = (tmp_path / "rank0.json").read_text()
        assert "zc comm | launch_reduce bucket 0 (2.bias, ...)" in text
    else:
        _launch(name, "--out", str(tmp_path), "--resume")


@full_only
def test_trl_s_trainer_ends_with_ddp_s_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ends = {}
    for kind in ("ddp", "zc"):
        flags = ["--out", str(tmp_path / kind), *(["--ddp"] if kind == "ddp" else [])]
        _launch("with_sft", *flags)
        ends[kind] = load_file(tmp_path / kind / "model" / "model.safetensors")
    _launch("with_sft", "--out", str(tmp_path / "zc"), "--resume")
    again = load_file(tmp_path / "zc" / "model" / "model.safetensors")
    assert furthest(ends["zc"], ends["ddp"]) < TOLERANCE
    assert furthest(again, ends["zc"]) == 0, "a run that was resumed is another one"
    assert (tmp_path / "zc" / "checkpoint-2" / "zc").is_dir()
    assert all(value.dtype == torch.float32 for value in again.values())


def test_the_page_shows_the_scripts() -> None:
    """docs/integrations.md names every script, and each named line stands in it."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    for name in NEEDS:
        assert f"(examples/{name}.py)" in page, name
