"""The table of versions is made of the rows, and rows of what pytest has counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run as versions


def test_the_document_is_what_the_rows_make() -> None:
    rows = versions.read()
    assert versions.DOCUMENT.read_text() == versions.document(rows, versions.folders_of_tests())
    assert rows and len({versions.key(r) for r in rows}) == len(rows)


def test_counts_are_pytest_s(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert False\n@pytest.mark.skip\ndef test_c(): pass\n"
        "def test_d(missing): pass\n"
    )
    failed = ["test_three::test_b", "test_three::test_d"]
    assert versions.run_folder(Path(sys.executable), str(tmp_path)) == (1, failed, 1)
    (tmp_path / "test_none.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", tmp_path, f"--rootdir={tmp_path}", f"--junitxml={report}"]
    subprocess.run(command, check=False)
    assert versions.counts_of(report, lambda module: module) == {"test_three": (1, failed, 1), "test_none": (0, [], 1)}


def test_a_run_takes_the_place_of_its_parts() -> None:
    old, whole, other = [{"torch": "2", "python": "3", "tests": name} for name in ("a/b/test_c.py", "a/b", "a/bc")]
    assert versions.put(whole, [old, whole, other]) == [other, whole]
    assert versions.put(old, [whole, old, {**old, "torch": "1"}]) == [whole, {**old, "torch": "1"}, old]


def test_another_torch_than_was_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "0.1.0", "--python", sys.executable])
    with pytest.raises(SystemExit):
        versions.main()
    assert ", not 0.1.0" in capsys.readouterr().err
