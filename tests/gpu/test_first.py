"""The runner of the first minutes on a GPU, on tests that pass, fail, hang and die."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from first import FIRST, HERE, MORE, Step, page, run_step

TESTS = """
import os, time
def test_passes(): pass
def test_hangs(): time.sleep(60)
def test_fails(): assert 1 == 2
def test_dies(): os._exit(3)
def test_comes_last(): pass
"""


def test_a_test_that_hangs_or_dies_costs_one_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(HERE / "conftest.py", tmp_path)
    monkeypatch.setenv("ZC_GPU_TEST_LIMIT_S", "3")
    seen = run_step(Step("some", ("test_some.py",)), tmp_path, time.monotonic() + 600, tests=tmp_path)
    outcomes = {name.split("::")[-1]: test["outcome"] for name, test in seen.tests.items()}
    assert outcomes == {
        "test_passes": "passed", "test_hangs": "hung or died", "test_fails": "failed", "test_dies": "hung or died",
        "test_comes_last": "passed",
    }  # fmt: skip
    text = page({"device": "none"}, [seen])
    assert "| some | 2 passed, 2 hung or died, 1 failed |" in text and "assert 1 == 2" in text


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    assert run_step(FIRST[0], tmp_path, time.monotonic() - 1).note == "no time was left"
    missing = Step("none", ("test_first.py",), before=("no-such-command",))
    assert run_step(missing, tmp_path, time.monotonic() + 60).note == "no-such-command is not installed"


def test_every_file_that_a_step_names_is_there() -> None:
    for step in (*FIRST, *MORE):
        assert step.command or any((HERE / part).exists() for part in step.arguments if part.endswith(".py")), step
