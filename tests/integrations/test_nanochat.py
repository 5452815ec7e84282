"""nanochat's base_train, whose optimizer stacks groups, compiles its kernels and communicates in its own step: with 4
changed lines it has the losses of its own distributed run.

Its code is not part of this repository: ``ZC_NANOCHAT`` names the folder of a checkout (github.com/karpathy/nanochat,
seen with commit 92d63d4) and turns the test on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import patience

ROOT, SCRIPTS = Path(__file__).resolve().parents[2], Path(__file__).parent / "scripts"
CHECKOUT = os.environ.get("ZC_NANOCHAT")
OPTIONS = (
    "--device-type cpu --depth 2 --aspect-ratio 32 --head-dim 32 --max-seq-len 64 --window-pattern L "
    "--device-batch-size 2 --total-batch-size 512 --num-iterations 8 --warmup-steps 2 --matrix-lr 0.2 "
    "--embedding-lr 3 --unembedding-lr 0.1 --eval-every 4 --eval-tokens 1024 --core-metric-every -1 --sample-every -1"
)


def with_zc(text: str) -> str:
    """base_train with its 4 changed lines."""
    changes = [
        (r"(?m)^import wandb$", "import wandb\nimport zc, nanochat.optim"),
        (r"(?m)^(from nanochat\.flash_attention .*)$", r"\1\nnanochat.optim.dist = zc.one_rank"),
        (r"(?m)^model = torch\.compile\(.*\n", ""),
        (r"(?m)^if resuming:\n    optimizer", "model, optimizer = zc.compile(model, optimizer)\n\\g<0>"),
    ]
    for pattern, line in changes:
        text, count = re.subn(pattern, line, text, count=1)
        assert count == 1, f"base_train has no line {pattern}"
    return text


def _run(folder: Path, script: str, port: int, **env: str) -> list[float]:
    ranks = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    path = os.pathsep.join((str(ROOT), str(folder / "nanochat")))
    env = {
        **os.environ, "PYTHONPATH": path, "NANOCHAT_BASE_DIR": str(folder / "base"), "NANOCHAT_DTYPE": "float32",
        "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", **env,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *ranks, str(SCRIPTS / "nanochat_ranks.py"), script, *OPTIONS.split(), "--model-tag", "a"],
        cwd=folder / "nanochat", env=env, capture_output=True, text=True, timeout=600 * patience(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [float(value) for value in re.findall(r"(?:loss|Validation bpb): ([0-9.]+)", done.stdout)]


@pytest.mark.skipif(CHECKOUT is None, reason="ZC_NANOCHAT names no checkout of nanochat")
def test_base_train_has_the_losses_of_its_own_run(tmp_path: Path) -> None:
    for package in ("pyarrow", "rustbpe", "tiktoken", "wandb"):
        pytest.importorskip(package)
    assert CHECKOUT is not None
    shutil.copytree(CHECKOUT, tmp_path / "nanochat", ignore=shutil.ignore_patterns(".git"))
    (tmp_path / "base").mkdir()
    env = os.environ | {"PYTHONPATH": str(tmp_path / "nanochat"), "NANOCHAT_BASE_DIR": str(tmp_path / "base")}
    subprocess.run([sys.executable, str(SCRIPTS / "nanochat_data.py")], env=env, check=True, timeout=300)
    original = tmp_path / "nanochat" / "scripts" / "base_train.py"
    (original.parent / "with_zc.py").write_text(with_zc(original.read_text()))
    own = _run(tmp_path, "scripts/base_train.py", 29571, NANOCHAT_FUTURES="1")
    ours = _run(tmp_path, "scripts/with_zc.py", 29572)
    assert len(own) == len(ours) == 8 + 3, "losses of 8 updates, 3 evaluations"
    assert own[-2] < own[1] - 0.1, "it learns"
    assert max(abs(a - b) for a, b in zip(own, ours, strict=True)) <= 1.1e-6, (own, ours)  # printed with 6 digits
