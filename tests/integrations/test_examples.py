"""docs/examples as docs/integrations.md says to run them: on two ranks, once from the start and once resumed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from launched import TOLERANCE, furthest, torchrun
from tiers import full_only

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NEEDS = {
    "with_accelerate": ["accelerate"],
    "with_trainer": ["transformers", "accelerate"],
    "with_sft": ["trl", "datasets"],
    "with_lightning": ["lightning"],
    "with_fabric": ["lightning"],
}


def _main(rank: int, world_size: int, name: str, argv: list[str]) -> None:
    with torchrun(rank, world_size):
        before, sys.argv = sys.argv, [name, "--cpu", *argv]
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            sys.argv = before


def _launch(name: str, *argv: str) -> None:
    for package in NEEDS[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-integrations")
    run_ranks(_main, 2, name, list(argv), timeout=900.0)


def _by_torchrun(name: str, *argv: str) -> None:
    """A script that makes its own process group."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*launcher, str(EXAMPLES / f"{name}.py"), "--cpu", *argv],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


@full_only
@pytest.mark.parametrize("name", ["with_accelerate", "with_trainer", "with_lightning", "with_fabric"])
def test_it_runs_and_resumes(tmp_path: Path, name: str) -> None:
    _launch(name, "--out", str(tmp_path))
    _launch(name, "--out", str(tmp_path), "--resume")


@full_only
def test_ranks_end_together_and_the_trace_has_names(tmp_path: Path) -> None:
    _by_torchrun("uneven_and_traced", "--out", str(tmp_path))
    for rank in range(2):
        text = (tmp_path / f"rank{rank}.json").read_text()
        reduced = re.findall(r"zc comm \| (\w+) bucket 0 \(2\.bias, \.\.\.\)", text)
        assert "reduce" in reduced or "take" in reduced  # by memory, or messages
        assert "zc comm | gather bucket 0 (2.bias, ...)" in text


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


def test_the_page_names_the_scripts() -> None:
    """docs/integrations.md names every script of a framework; tests/docs has the others."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    for path in sorted(EXAMPLES.glob("with_*.py")):
        assert f"(examples/{path.name})" in page, path.name
