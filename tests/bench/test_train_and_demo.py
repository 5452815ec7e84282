"""A training run's record and the demo's verdict."""

from __future__ import annotations

import inspect
import io
import json
import math
import subprocess
import sys
import threading
import time
from itertools import groupby
from pathlib import Path

import pytest
import torch
from rich.console import Console

import zc
from bench import baton, demo, demo_check, train
from bench.report.progress import Progress

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
    assert len(record["cpu_s"]) == 7 and 0 <= record["added_nbytes"] < record["peak_steady_nbytes"]
    persistent = 12 * record["num_params"]  # measured: weights and two moments; gradients are gone, steps are scalars
    assert persistent <= record["held_nbytes"] < 1.02 * persistent
    assert {"torch", "python", "commit"} < set(run)


def fake_run(held_out: float, step_s: tuple[float, ...] = (9.0, 1.0), **kinds: int) -> dict:
    kinds = kinds or {"params": 40, "gradients": 40, "optimizer_state": 80}
    rank = {
        "losses": [5.0, 3.0], "step_s": list(step_s), "cpu_s": list(step_s), "held_out_loss": held_out,
        "tokens_per_step": 64, "num_params": 10_000_000, "first_step_s": step_s[0], "added_nbytes": 7_000_000,
        "persistent_nbytes": {kind: n * 1_000_000 for kind, n in kinds.items()},
    }  # fmt: skip
    rank["held_nbytes"] = sum(n for kind, n in rank["persistent_nbytes"].items() if kind != "acc")
    return {"world_size": 2, "ranks": [rank, {**rank, "losses": [6.0, 4.0]}]}


def test_a_shard_of_the_weights_is_no_gradient() -> None:
    by_kind = demo.held_by_kind(fake_run(2.0, params=0, weight=10, master_shard=20, optimizer_state=40))
    assert [nbytes // 1_000_000 for nbytes in by_kind.values()] == [10, 20, 40, 0]


MOST = demo.LARGEST_LOSS


@pytest.mark.parametrize(
    ("ddp", "eager", "compiled", "words"),
    [
        (4.38, 4.40, 4.405, []),
        (4.40, 4.40, 4.50, ["compiled and DDP, op by op: losses differ by 0.10", "and zc, op by op: losses differ"]),
        (4.31, 4.38, 4.40, ["compiled and DDP, op by op: losses differ by 0.09"]),
        (MOST - 0.01, MOST, MOST, [f"zc, op by op: held-out loss {MOST}", f"zc, compiled: held-out loss {MOST}"]),
        (4.40, 4.40, math.nan, ["zc, compiled: held-out loss nan", "DDP, op by op: losses differ by nan", "by nan"]),
    ],
)
def test_demo_fails_where_it_must(ddp: float, eager: float, compiled: float, words: list[str]) -> None:
    runs = {name: fake_run(loss) for name, loss in zip(demo.NAMES, (ddp, eager, compiled), strict=True)}
    lines = demo.problems(runs, "bf16")
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_the_demo_trains_in_the_fast_dtype() -> None:
    """In fp32 where a matmul in bf16 has no instructions of its own; losses may differ by less there."""
    bf16_s, losses = 1.0, dict(zip(demo.NAMES, (4.40, 4.41, 4.41), strict=True))
    for fp32_s, expected in ((1.5, "bf16"), (0.5, "bf16"), (0.02, "fp32")):
        assert demo.fast_dtype(lambda dtype, s=fp32_s: bf16_s if dtype == torch.bfloat16 else s) == expected
    assert demo.fast_dtype() in demo.DTYPES
    runs = {name: fake_run(loss) for name, loss in losses.items()}
    assert demo.problems(runs, "bf16") == [] != demo.problems(runs, "fp32")
    assert "casts" in demo.causes(fake_runs(), "bf16")[0] and "casts" not in demo.causes(fake_runs(), "fp32")[0]


def test_the_demo_ends_with_a_check_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for make, dtype in ((demo_check.make_bf16, torch.bfloat16), (demo_check.make_fp32, None)):
        given = make()
        assert given.keys() <= inspect.signature(zc.check).parameters.keys() | {"param_dtype"}
        assert given["param_dtype"] is dtype and len(given["batches"]) == given["microbatches"]
    assert given["step"](given["model"], given["batches"][0]).item() == pytest.approx(math.log(4096), abs=0.3)
    # the status of the command is the demo's
    args, _ = demo.parse(["--stage", "3", "--ranks", "4"])
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert demo.check_on_one_device(args, "fp32") == []
    assert demo.check_on_one_device(args, "fp32") == ["zc.check ended with status 1; what it found is above"]
    assert commands[0][1:] == ["-m", "zc", "check", "bench.demo_check:make_fp32", "--ranks", "4", "--stage", "3"]


def fake_runs() -> dict[str, dict]:
    """Three turns after the steps that are skipped; in the second one the machine is ten times slower."""
    turns = [1.0] * 5 + [10.0] * 5 + [1.0] * 5
    sharded = {"flat_param": 20, "master_shard": 20, "acc": 40, "optimizer_state": 40}
    return {
        demo.DDP: fake_run(2.4, (2.0,) * 5 + tuple(1.2 * s for s in turns)),
        demo.EAGER: fake_run(2.4, (3.0,) * 5 + tuple(1.1 * s for s in turns), **sharded),
        demo.COMPILED: fake_run(2.41, (30.0,) * 5 + tuple(turns), **sharded),
    }


def test_the_demo_s_table(tmp_path: Path) -> None:
    """Ratios are those of turns; gradients that were cleared are not held; a peak is what is held and what is added."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo.table(fake_runs(), 3, "bf16"))
    text = console.export_text()
    assert "zc stage 3" in text and max(map(len, text.splitlines())) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["tokens/s"] == ["53", "58", "64", "1.20", "1.10"]
    assert cells["gradients, MB"] == ["40.0", "0.0", "0.0", "0.00", ""]
    assert cells["held by a rank, MB"] == ["160.0", "80.0", "80.0", "0.50", "1.00"]
    assert cells["peak of a step, MB"] == ["167.0", "87.0", "87.0", "0.52", "1.00"]
    assert cells["first step, s"] == ["2.0", "3.0", "30.0", "15.00", "10.00"]
    assert cells["held-out loss, nats"][-2:] == ["+0.0100", "+0.0100"]
    speed, _, memory, *_ = demo.causes(fake_runs(), "bf16")
    assert "1.10 of zc op by op: Inductor fuses" in speed and "1.20 of DDP" in speed
    words = "with DDP, 4 weights + 8 optimizer state + 4 gradients; with zc, 2 weights + 2 fp32 masters + 4 opt"
    assert words in memory
    demo.draw(fake_runs(), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_gains_nothing_is_not_praised() -> None:
    runs = fake_runs()
    runs[demo.COMPILED], runs[demo.EAGER] = runs[demo.EAGER], runs[demo.COMPILED]
    assert "0.91 of zc op by op: compiling gained nothing" in demo.causes(runs, "bf16")[0]
    for rank in runs[demo.COMPILED]["ranks"]:  # it took longer, but not of the processor
        rank["cpu_s"] = [0.5 * seconds for seconds in rank["cpu_s"]]
    assert "0.91 of zc op by op in 0.55 of its CPU time: other programs" in demo.causes(runs, "bf16")[0]


# --- jobs in turn ---


def job(store: baton.TCPStore, number: int, log: list[str]) -> None:
    """Two ranks of a job of six steps, as threads; each writes what it does."""

    def rank(r: int) -> None:
        with baton.InTurn(baton.Seat(store.port, number, 2, 3), "job", r, 2) as progress:
            for step in range(6):
                log.append(f"{number}:{step}")
                time.sleep(0.01 * r)
                progress.update(1.0, 1.0, 1.0)
            log.append(f"{number}:end")

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)


def test_one_job_works_at_a_time() -> None:
    store, log = baton.new_store(), []
    jobs = [threading.Thread(target=job, args=(store, number, log)) for number in (1, 0)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join(60)
    turns = [list(group) for _, group in groupby(log, key=lambda line: line.split(":")[0])]
    expected = [[f"{n}:{k}" for k in steps] for steps in (range(3), range(3, 6), ["end"]) for n in (0, 1)]
    assert [sorted(set(turn)) for turn in turns] == expected
    assert store.add("steps", 0) == 12


def test_a_job_that_fails_ends_the_others() -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({s}); 1 / 0"]) for s in (60, 0)]
    with pytest.raises(subprocess.CalledProcessError):
        baton.wait_for(jobs, baton.new_store(), Progress(1, "test", shown=False))
    assert all(job.returncode for job in jobs)
