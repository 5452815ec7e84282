"""The matrix of runs and its order, the gate, rows, and the tables made from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench import run
from bench.cases import CASES, COMPILED_PAIRS, PROVIDERS
from bench.cases.reference import NUM_LOSSES, compute, disagreement, flags_of
from bench.measure import ROOT, launch_quietly
from bench.report import charts, rows, tables

# --- the matrix ---


def test_providers_take_turns_and_what_says_most_comes_first() -> None:
    order = [tuple(r) for r in run.matrix(["tiny", "gpt30m-bf16"], ["DDP", "zc stage 2", "FSDP2"], 2)]
    first = [("gpt30m-bf16", "zc stage 2", 0, ""), ("gpt30m-bf16", "zc stage 2", 1, "")]
    turn = [("tiny", "zc stage 2"), ("gpt30m-bf16", "DDP"), ("gpt30m-bf16", "FSDP2")]
    second = [(*cell, repeat, "") for repeat in (0, 1) for cell in turn]
    third = [("tiny", name, repeat, "") for repeat in (0, 1) for name in ("DDP", "FSDP2")]
    assert order == first + second + third
    chosen = ["--cases", "tiny", "gpt30m-bf16", "--providers", "DDP", "zc stage 2", "--repeats", "2"]
    args = run.parse(chosen)
    order = [tuple(r) for r in run.matrix(args.cases, args.providers, args.repeats, as_given=args.as_given)]
    turns = [("DDP", 0), ("zc stage 2", 0), ("DDP", 1), ("zc stage 2", 1)]
    assert order == [(case, *turn, "") for case in ("tiny", "gpt30m-bf16") for turn in turns]
    paced = run.matrix(["tiny"], ["DDP", "FSDP2"], 2, as_given=True, networks=["zero", "400g"])
    assert [(r.provider, r.repeat, r.network) for r in paced[:5]] == [
        ("DDP", 0, "zero"), ("DDP", 0, "400g"), ("FSDP2", 0, "zero"), ("FSDP2", 0, "400g"), ("DDP", 1, "zero"),
    ]  # fmt: skip
    assert run.parse([]).csv.name == "run.csv" and run.parse(["--paced", "zero"]).csv.name == "paced.csv"
    assert not run.parse([]).as_given and not run.parse(["--first"]).as_given


def test_every_provider_and_case_has_flags_that_parse() -> None:
    for name in PROVIDERS:
        for case in ("tiny", "llama-3b-8192-ga8"):
            args = run.flags_of(run.Run(case, name, 0), 8)
            assert run.flags_of(run.Run(case, name, 0, "400g"), 8)[-4:] == ["--paced", "400g", "--world", "8"]
            assert "--system" in args
    for case in CASES.values():
        settle = flags_of(case).settle
        assert settle >= 2  # graphs are compiled in the first step, and may be again in the second
        assert case.steps - settle >= 7 and case.steps >= NUM_LOSSES
    assert all({a, b} <= set(PROVIDERS) for a, b in COMPILED_PAIRS.items())


# --- the gate ---


def test_the_gate_compares_every_loss_or_only_the_first() -> None:
    right = [5.0, 4.0, 3.0]
    assert disagreement([5.0, 4.0, 3.0, 9.0], right, 1e-3, communicates=True) is None
    assert disagreement([5.0, 4.5, 3.0], right, 1e-3, communicates=True) == (
        "loss after 1 updates is 4.50000, float64 says 4.00000"
    )
    assert disagreement([5.0, 4.5, 3.5], right, 1e-3, communicates=False) is None
    assert disagreement([5.1, 4.5, 3.5], right, 1e-3, communicates=False) is not None
    assert disagreement([5.0, math.nan, 3.0], right, 1e-3, communicates=True) is not None
    assert disagreement([5.0, 4.0, math.inf], right, 1e-3, communicates=False) == "a loss is not finite"
    assert disagreement([5.0], right, 1e-3, communicates=True) == "1 losses, the reference has 3"


def test_the_reference_is_what_a_plain_loop_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from bench import train
    from bench.cases import data

    monkeypatch.delenv("RANK", raising=False)
    sizes = "--vocab 256 --seq 16 --layers 1 --width 24 --heads 3 --batch 2 --accum 2"
    case = CASES["tiny"]._replace(flags=tuple(sizes.split()), ranks=1, steps=9)
    corpus = data.load(vocab=256)
    expected = compute(case, flags_of(case), corpus)
    train.main(["--system", "local", "--backend", "eager", *case.all_flags, "--out", str(tmp_path)])
    losses = rows.losses_of(json.loads((tmp_path / "run.json").read_text()))
    assert disagreement(losses, expected, 1e-4, communicates=True) is None
    # what the gate must refuse: other updates (a third of the learning rate), another rank's data as well
    slower = flags_of(case)
    slower.lr /= 3
    assert disagreement(compute(case, slower, corpus), expected, 2e-3, communicates=True) is not None
    twice = compute(case._replace(ranks=2), flags_of(case), corpus)
    assert disagreement(losses, twice, 2e-3, communicates=True) is not None


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    flags = ["--system", "local", "--heads", "5", "--eval-batches", "0", "--out", str(tmp_path)]
    ended = launch_quietly("bench.train", flags, ranks=1, env={}, log=tmp_path / "log.txt", timeout_s=120)
    assert ended.status != 0
    assert ended.reason == "ValueError: GPTConfig.width 384 must be a multiple of heads 5"
    # what a user is shown: the rank's own words to the last one, not torchrun's about them
    assert ended.tail.splitlines()[-1].endswith(ended.reason)
    assert "Traceback" in ended.tail


# --- rows and tables ---


def record() -> dict[str, Any]:
    rank = {
        "losses": [5.0] * 8, "step_s": [9.0] * 6 + [1.0, 3.0], "tokens_per_step": 64, "num_params": 10,
        "first_step_s": 9.0, "peak_nbytes": 2_000_000, "peak_steady_nbytes": 1_000_000, "peak_is_steady": True,
        "held_nbytes": 500_000,
    }  # fmt: skip
    whole = {"device": "d", "torch": "t", "python": "p", "commit": "c", "world_size": 2, "flags": {"settle": 6}}
    return whole | {"ranks": [rank, {**rank, "losses": [6.0] * 8, "held_nbytes": 600_000}]}


def test_a_row_has_times_only_without_a_reason() -> None:
    good = rows.measured(record(), None)
    assert (good["p50_ms"], good["tokens_per_s_rank"], good["held_mb"]) == ("2000.00", "16", "0.60")
    assert (good["loss_before"], good["loss_after_5"], good["status"]) == ("5.500000", "5.500000", "ok")
    bad = rows.measured(record(), "no")
    assert bad["status"] == "no"
    assert not set(rows.NUMBERS) & set(bad)
    assert set(rows.NUMBERS) - {"host_ms"} <= set(good)  # which is a GPU's
    assert set(good) <= set(rows.COLUMNS)


def test_fingerprint_follows_the_measured_code_alone(tmp_path: Path) -> None:
    for name in ("zc/a.py", "zc/room/b.py", "bench/train.py", "bench/report/tables.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    before = rows.fingerprint(tmp_path)
    (tmp_path / "bench/report/tables.py").write_text("x = 2\n")
    assert rows.fingerprint(tmp_path) == before
    for name in ("zc/a.py", "zc/room/b.py"):
        (tmp_path / name).write_text("x = 2\n")
        before, after = rows.fingerprint(tmp_path), before
        assert before != after


def times_of(p50: float) -> dict[str, Any]:
    return {"p20_ms": p50 - 1, "p50_ms": p50, "p80_ms": p50 + 2}


def written(path: Path, session: str, day: int, zc_ms: float, status: str = "ok") -> None:
    base: dict[str, Any] = dict.fromkeys(rows.COLUMNS, "1") | {"session": session, "status": "ok"}
    base |= {"case": "tiny", "time": f"2026-01-0{day}", "num_params": "1000"}
    for repeat in range(3):
        slow = 1 + repeat  # the machine slows down; ratios within a repeat do not
        row = base | {"repeat": repeat, "start": "cold" if repeat == 0 else "warm"}
        rows.append(path, row | {"provider": "zc stage 2, eager"} | times_of(1000 * slow))
        rows.append(path, row | {"provider": "DDP + compile"} | times_of(500 * slow))
        times = times_of(zc_ms * slow) if status == "ok" else dict.fromkeys(times_of(0), "")
        rows.append(path, row | {"provider": "zc stage 2", "status": status, **times})


def line_of(table: str, provider: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {provider} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_takes_the_last_session_and_ratios_within_a_repeat(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    written(path, "zzz", 1, zc_ms=250)
    written(path, "aaa", 2, zc_ms=400)
    table = tables.run(path, {"case": "tiny"})
    assert line_of(table, "DDP + compile")[1:3] == ["1,000 (999 to 1,002)", "1.250"]
    assert line_of(table, "zc stage 2")[1:4] == ["800 (799 to 802)", "1.000", "0.400"]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][2:]
    assert names == ["zc stage 2", "DDP + compile", "zc stage 2, eager"]
    assert "1,000 parameters" in table
    assert tables.run(path, {"case": "other"}) == "No rows yet in run.csv with {'case': 'other'}."
    assert tables.run(tmp_path / "none.csv", {}).startswith("No rows yet in none.csv")
    with pytest.raises(ValueError, match="has no column"):
        tables.run(path, {"depth": "24"})


def test_tables_are_those_of_the_committed_rows() -> None:
    for name in tables.FILES:
        text = (ROOT / name).read_text()
        assert tables.fill(text) == text, f"{name}: run python -m bench.report.tables"


def test_ratios_over_commits_are_those_of_each_session_in_order_of_time(tmp_path: Path) -> None:
    common = {"case": "tiny", "status": "ok", "network": "", "repeat": "0"}
    old = {**common, "session": "a", "time": "2026-01-01", "commit": "one"}
    new = {**common, "session": "b", "time": "2026-01-02", "commit": "two", "base": "zc stage 2"}
    runs = [
        {**old, "provider": "zc stage 2", "p50_ms": "10"},
        {**old, "provider": "DDP + compile", "p50_ms": "15"},
        {**old, "provider": "FSDP2 + compile", "p50_ms": "", "status": "failed"},
        {**old, "provider": "DDP + compile", "p50_ms": "99", "network": "ethernet"},
    ]
    in_turn = [
        {**new, "provider": "zc stage 2", "ratio": "1.0"},
        {**new, "provider": "DDP + compile", "ratio": "1.2"},
        {**new, "provider": "DDP + compile", "ratio": "7.0", "base": "DDP"},
    ]
    by_case = tables.history(runs, in_turn)
    assert [tuple(r) for r in by_case["tiny"]] == [
        ("2026-01-01", "one", "DDP + compile", 1.5, False),
        ("2026-01-02", "two", "DDP + compile", 1.2, True),
    ]
    charts.draw_history(by_case, tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
