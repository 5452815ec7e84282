"""The table of versions is made of the rows, and rows of what pytest has counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run as versions


def row(torch: str, tests: str, failed: int = 0, date: str = "2026-01-02") -> dict[str, str]:
    found = ("3.6.0", "3.11.7", tests, "5", str(failed), "1", date, "a")
    return dict(zip(versions.COLUMNS, (torch, *found), strict=True))


def test_the_document_is_what_the_rows_make() -> None:
    rows = versions.read()
    assert versions.DOCUMENT.read_text() == versions.document(rows, versions.folders_of_tests())
    assert rows and len({versions.key(r) for r in rows}) == len(rows)


def test_what_failed_and_what_did_not_run_is_said() -> None:
    text = versions.document([row("2.11.0", "tests/a", failed=2), row("2.15.0", "tests/b")], ["tests/a", "tests/b"])
    assert "| tests/a | **2 failed**, 5 passed, 1 skipped | not run |" in text
    assert "| tests/b | not run | 5 passed, 1 skipped |" in text


def test_rows_stay_in_order_of_versions(tmp_path: Path) -> None:
    rows = [row("2.15.0", "tests/a"), row("2.9.1+cpu", "tests/b"), row("2.11.0", "tests/a")]
    versions.write(rows, tmp_path / "rows.csv")
    assert [r["torch"] for r in versions.read(tmp_path / "rows.csv")] == ["2.9.1+cpu", "2.11.0", "2.15.0"]


def test_counts_are_pytest_s(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert False\n@pytest.mark.skip\ndef test_c(): pass\n"
        "def test_d(missing): pass\n"
    )
    assert versions.run_folder(Path(sys.executable), str(tmp_path)) == (1, 2, 1)
    (tmp_path / "test_none.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", tmp_path, f"--rootdir={tmp_path}", f"--junitxml={report}"]
    subprocess.run(command, check=False)
    assert versions.counts_of(report, lambda module: module) == {"test_three": (1, 2, 1), "test_none": (0, 0, 1)}


def test_a_module_s_folder() -> None:
    assert versions.folder_of("tests.plan.test_plan") == "tests/plan"
    assert versions.folder_of("tests.a.b.test_c.TestD") == "tests/a/b"


def test_another_torch_than_was_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "0.1.0", "--python", sys.executable])
    with pytest.raises(SystemExit):
        versions.main()
    assert ", not 0.1.0" in capsys.readouterr().err
