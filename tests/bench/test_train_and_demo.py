"""A training run's record and the demo's verdict."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import demo, train

# --- training and the demo's verdict ---


def test_train_alone_writes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    flags = (
        "--system local --backend eager --seq 16 --layers 1 --width 24 --heads 3 --batch 2 --accum 2 --steps 7 "
        "--eval-batches 2 --lr 1e-2 --settle 3 --quiet --out"
    )
    train.main([*flags.split(), str(tmp_path)])
    run = json.loads((tmp_path / "run.json").read_text())
    record = run["ranks"][0]
    assert len(record["losses"]) == len(record["step_s"]) == len(record["grad_norms"]) == 7
    assert record["losses"][-1] < record["losses"][0]
    assert record["held_out_loss"] < record["held_out_loss_before"]
    assert record["tokens_per_step"] == 2 * 16 * 2
    assert record["peak_nbytes"] >= record["peak_steady_nbytes"] > 0
    assert record["persistent_nbytes"]["optimizer_state"] == 8 * record["num_params"]
    held = 12 * record["num_params"]  # measured: weights and two moments; gradients are gone, steps are scalars
    assert held <= record["held_nbytes"] < 1.02 * held
    assert {"torch", "python", "commit"} < set(run)


def fake_run(held_out: float) -> dict:
    rank = {
        "losses": [5.0, 3.0], "step_s": [9.0, 1.0], "held_out_loss": held_out, "tokens_per_step": 64, "num_params": 10,
        "first_step_s": 9.0, "peak_nbytes": 2_000_000, "peak_steady_nbytes": 1_000_000,
    }  # fmt: skip
    return {"world_size": 2, "ranks": [rank, {**rank, "losses": [6.0, 4.0]}]}


@pytest.mark.parametrize(
    ("eager", "compiled", "words"),
    [
        (2.40, 2.405, []),
        (2.40, 2.42, ["differ by 0.02"]),
        (2.70, 2.70, ["op by op: held-out loss 2.7000", "compiled: held-out loss 2.7000"]),
        (2.40, math.nan, ["compiled: held-out loss nan", "differ by nan"]),
    ],
)
def test_demo_fails_where_it_must(eager: float, compiled: float, words: list[str]) -> None:
    found = demo.problems({"eager": fake_run(eager), "inductor": fake_run(compiled)})
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))
