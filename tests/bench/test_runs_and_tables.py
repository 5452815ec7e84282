"""A training run's record, the demo's verdict, the comparison's rows and the README's tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import compare_ddp, demo, tables, train
from bench.measure import ROOT

# --- training and the demo's verdict ---


def test_schedule_warms_up_and_ends_at_a_tenth() -> None:
    factors = [train.warmup_cosine(step, 4, 20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == pytest.approx(1.0)
    assert factors[20] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)


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
    assert {"torch", "python", "commit"} < set(run)


def test_ddp_alone_and_a_foreign_dtype_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="needs torchrun"):
        train.main(["--system", "ddp", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        train.main(["--system", "local", "--param-dtype", "bfloat16", "--out", str(tmp_path)])


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


def test_demo_draws_and_tabulates(tmp_path: Path) -> None:
    runs = {"eager": fake_run(2.4), "inductor": fake_run(2.4)}
    assert demo.mean_losses(runs["eager"]) == [5.5, 3.5]
    demo.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    labels = [str(cell) for cell in demo.table(runs).columns[0].cells]
    assert "peak memory of rank 1, MB" in labels


# --- rows and tables ---


def test_disagreement_compares_every_step_or_only_the_first() -> None:
    same = [5.0, 4.0, 3.0]
    assert compare_ddp.disagreement(same, same, communicates=True) is None
    reason = compare_ddp.disagreement([5.0, 4.5, 3.0], same, communicates=True)
    assert reason == "loss at step 1 is 4.500000, not 4.000000"
    assert compare_ddp.disagreement([5.0, 4.5, 3.5], same, communicates=False) is None
    assert compare_ddp.disagreement([5.1, 4.5, 3.5], same, communicates=False) is not None
    assert compare_ddp.disagreement([5.0, math.nan, 3.0], same, communicates=True) is not None
    assert compare_ddp.disagreement([5.0, 4.0, math.inf], same, communicates=False) == "a loss is not finite"


def test_percentiles() -> None:
    assert compare_ddp.percentiles([float(v) for v in range(11)]) == (2.0, 5.0, 8.0)
    assert compare_ddp.percentiles([4.0]) == (4.0, 4.0, 4.0)


def written(path: Path, session: str, ddp_ms: float, zc_ms: float, status: str = "ok") -> None:
    base = dict.fromkeys(compare_ddp.COLUMNS, "1") | {"session": session, "layers": "8", "status": "ok"}
    for number, start in enumerate(("cold", "warm", "warm")):
        slow = 1 + number  # the machine slows down; ratios within a round do not
        row = base | {"round": number, "start": start, "first_step_s": 60 if start == "cold" else 9}
        compare_ddp.append(path, row | {"system": "DDP + torch.compile", "p50_ms": ddp_ms * slow})
        times = {"p50_ms": zc_ms * slow} if status == "ok" else dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), "")
        compare_ddp.append(path, row | {"system": "zc stage 2", "status": status, **times})


def test_table_takes_the_last_session_and_ratios_within_a_round(tmp_path: Path) -> None:
    path = tmp_path / "compare_ddp.csv"
    written(path, "2026-01-02", 100, 90)
    written(path, "2026-01-01", 100, 50)
    made = tables.compare_ddp(path, {"layers": "8"})
    assert path.read_text().count("session") == 1
    line = next(line for line in made.splitlines() if line.startswith("| zc stage 2"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["zc stage 2", "180 (1 to 1)", "0.900", "60.0", "9.0"]
    assert tables.compare_ddp(path, {"layers": "24"}) == "No rows yet in compare_ddp.csv with {'layers': '24'}."
    assert tables.compare_ddp(tmp_path / "none.csv", {}).startswith("No rows yet in none.csv")
    with pytest.raises(ValueError, match="has no column"):
        tables.compare_ddp(path, {"depth": "24"})


def test_table_shows_the_reason_in_place_of_a_number(tmp_path: Path) -> None:
    path = tmp_path / "compare_ddp.csv"
    written(path, "2026-01-02", 100, 90, status="loss at step 3 is 1.0, not 2.0")
    line = next(line for line in tables.compare_ddp(path, {}).splitlines() if line.startswith("| zc stage 2"))
    assert "no number: loss at step 3 is 1.0, not 2.0" in line
    assert "0.9" not in line


def test_fill_replaces_only_what_is_marked(tmp_path: Path) -> None:
    written(tmp_path / "compare_ddp.csv", "2026-01-02", 100, 90)
    text = "before\n<!-- table: compare_ddp layers=8 -->\nstale\n<!-- end -->\nafter\n"
    filled = tables.fill(text, tmp_path)
    assert filled.startswith("before\n<!-- table: compare_ddp layers=8 -->\n| system |")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert "stale" not in filled
    assert tables.fill(filled, tmp_path) == filled
    with pytest.raises(ValueError, match="no table is named 'other'"):
        tables.fill("<!-- table: other -->\n<!-- end -->", tmp_path)


def test_readme_tables_are_those_of_the_committed_rows() -> None:
    text = (ROOT / "README.md").read_text()
    assert tables.fill(text) == text
