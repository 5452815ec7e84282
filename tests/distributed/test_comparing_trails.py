"""`python -m zc diff` on literal files: what is named, how ranks are grouped, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zc.engine.agreement import BOUNDARY
from zc.ranks.journal import LENGTH, Trail
from zc.report import diverged


def call(number: int, what: str, line: int, *, shared: bool = True, times: int = 1) -> list[Any]:
    return [number, shared, "0_1/1", what, ["train.py", line, "train"], times]


STEP = [call(5, BOUNDARY, 12), call(6, "SGD.step", 12)]


def write(folder: Path, rank: int, *calls: list[Any], num_ranks: int = 2, **fields: Any) -> None:
    content = {
        "format": "zc diverged 1", "rank": rank, "run": "abc", "model": "0_1/1", "ranks": list(range(num_ranks)),
        "error": "RankMismatchError: out of step", "stands": ["train.py", 99, "train"], "agreed": 3, "calls": calls,
        "waits": [], "exchanges": [], "notes": [], "host": "h", "written": "", "zc": "0.1.0",
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps({**content, **fields}))


def diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = diverged.run([str(folder)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_same_calls_are_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, call(4, "reduce buckets 0", 10), *STEP)
    status, text = diff(tmp_path, capsys)
    assert status == 0 and "The calls of all these ranks are the same." in text


def test_a_call_that_others_do_not_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, call(4, "reduce buckets 0", 10), *STEP)
    write(tmp_path, 1, call(4, "reduce buckets 0", 10), call(5, "the sum over ranks", 11))
    status, text = diff(tmp_path, capsys)
    assert status == 1 and "First difference: call 5" in text
    assert f"rank 0: {BOUNDARY} at train.py:12 in train" in text
    assert "rank 1: the sum over ranks at train.py:11 in train" in text


def test_a_rank_that_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, call(4, "reduce buckets 0", 10), *STEP)
    write(tmp_path, 1, call(4, "reduce buckets 0", 10), error="ValueError: no data")
    status, text = diff(tmp_path, capsys)
    stopped = "rank 1: made no call after call 4 (reduce buckets 0) at train.py:10 in train; stands at train.py:99"
    assert status == 1 and stopped in text and "rank 1: ended by ValueError: no data" in text


def test_other_branches_are_told_apart_from_where_ranks_can_not_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Announcements may differ; a norm and a step may not."""
    write(tmp_path, 0, call(4, "reduce buckets 0", 10), call(5, BOUNDARY, 12), call(6, "SGD.step", 12))
    write(tmp_path, 1, call(4, "reduce buckets 1", 11), call(5, BOUNDARY, 12), call(6, "the sum over ranks", 13))
    status, text = diff(tmp_path, capsys)
    assert status == 1 and "First difference: call 4" in text and "They can't go on: call 6" in text


def test_what_differed_before_all_ranks_agreed_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, call(3, "reduce buckets 0", 10), call(4, BOUNDARY, 12), agreed=3)
    write(tmp_path, 1, call(3, "reduce buckets 1", 11), call(4, BOUNDARY, 13), agreed=3)
    status, text = diff(tmp_path, capsys)
    assert status == 1 and "First difference: call 4" in text


def test_a_rank_whose_first_calls_are_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has made more calls since than it keeps, so only the numbers that both have are compared."""
    write(tmp_path, 0, call(4, "a", 10), call(5, "b", 11), call(6, "c", 12))
    write(tmp_path, 1, call(6, "d", 13))
    status, text = diff(tmp_path, capsys)
    assert status == 1 and "First difference: call 6" in text and "rank 0: c at" in text


def test_hundreds_of_ranks_are_a_column_for_each_way_to_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(200):
        odd = rank in (17, 18, 150)
        write(tmp_path, rank, call(4, "save" if odd else "reduce buckets 0", 20 if odd else 10), num_ranks=201)
    status, text = diff(tmp_path, capsys)
    assert status == 1 and "ranks 0-16, 19-149, 151-199: reduce" in text and "ranks 17-18, 150: save" in text
    assert len(text.splitlines()) < 20 and "No file of rank 200" in text


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, words in ((tmp_path / "none", "is no folder"), (tmp_path, "no rank has written a file")):
        status, text = diff(folder, capsys)
        assert status == 2 and words in text
    write(tmp_path, 0)
    assert "only rank 0 has written" in diff(tmp_path, capsys)[1]
    write(tmp_path, 1, run="xyz")
    assert "files of several runs: rank 0's is of abc, rank 1's of xyz. Remove" in diff(tmp_path, capsys)[1]
    (tmp_path / "rank-1.json").write_text('{"format": "another"}')
    assert "rank-1.json is no file of 'zc diverged 1'" in diff(tmp_path, capsys)[1]
    whole = (tmp_path / "rank-0.json").read_text()
    for damage in (whole[:100], whole.replace('"agreed": 3, ', ""), whole.replace('"rank": 0', '"rank": "x"')):
        (tmp_path / "rank-1.json").write_text(damage)
        status, text = diff(tmp_path, capsys)
        assert status == 2 and "rank-1.json is damaged" in text, text


# --- the trail ---


def test_a_trail_is_bounded_and_knows_the_programs_line() -> None:
    trail = Trail()
    for _ in range(LENGTH + 50):
        _note(trail, "a norm", shared=True)
    assert len(trail.entries) == LENGTH and trail.num_shared == LENGTH + 50
    last = trail.entries[-1]
    assert last.code is _note.__code__ and last.line == _note.__code__.co_firstlineno + 1
    for name in ("<stdin>", "<python-input-0>"):  # typed; the second into Python 3.13
        exec(compile("note(trail, 'a norm', True)", name, "exec"), {"note": _of_zc, "trail": trail})
        code = trail.entries[-1].code
        assert code is not None and code.co_filename == name


def test_what_one_line_repeats_is_one_entry_unless_all_ranks_take_part() -> None:
    trail = Trail()
    for _ in range(3):
        _note(trail, "a forward", shared=False)
    for _ in range(2):
        _note(trail, "a norm", shared=True)
    _note(trail, "a forward", shared=False)
    seen = [(entry.what, entry.number, entry.times) for entry in trail.entries]
    assert seen == [("a forward", 1, 3), ("a norm", 1, 1), ("a norm", 2, 1), ("a forward", 3, 1)]


def _note(trail: Trail, what: str, *, shared: bool) -> None:
    _of_zc(trail, what, shared)


def _of_zc(trail: Trail, what: str, shared: bool) -> None:
    """Stands for the function of zc's that calls `add`."""
    trail.add("0_1/1", what, shared=shared)
