"""The suite against any torch, in an environment of its own; what ran comes into docs/versions.md.

    python tests/versions/run.py 2.15.0 [tests/passes tests/plan ...] [--python PYTHON] [--report report.xml]

``make test-torch TORCH_VERSION=2.15.0`` is that. The environment is build/torch-VERSION; ``--python`` takes one that is
there. Each folder or file of tests runs by itself; or nothing runs, and ``--report`` is what pytest's ``--junitxml``
wrote of a run of the suite with that ``--python``. Its counts are a row of tests/versions/results.csv, in place of the
one of that torch, Python and folder, and the document's table is made of all rows. The exit status is 1 where a test
has failed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "versions" / "results.csv"
DOCUMENT = ROOT / "docs" / "versions.md"
COLUMNS = ("torch", "triton", "python", "tests", "passed", "failed", "skipped", "date", "commit", "names")
FACTS = """
import importlib.metadata as metadata, platform, torch
try:
    triton = metadata.version("triton")
except metadata.PackageNotFoundError:
    triton = "none"
print(torch.__version__, triton, platform.python_version())
"""
Row = dict[str, str]
Counts = tuple[int, list[str], int]  # passed, failed (errors are) by name, skipped


def environment(version: str, base: str) -> Path:
    """The interpreter of build/torch-VERSION, which is made where it is not there."""
    folder = ROOT / "build" / f"torch-{version}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([*pip, f"torch=={version}", "setuptools", "wheel"], check=True)
        subprocess.run([*pip, "--no-build-isolation", f"torch=={version}", "-e", f"{ROOT}[test,bench]"], check=True)
        (folder / "installed").touch()
    return python


def run_folder(python: Path, tests: str) -> Counts:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", tests, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, env=env, check=False)
        if not report.exists():
            raise SystemExit(f"pytest {tests} ended with status {done.returncode} and left no report")
        return counts_of(report, lambda _: tests).get(tests, (0, [], 0))


def counts_of(report: Path, name: Callable[[str], str]) -> dict[str, Counts]:
    """By the ``name`` of the tests' module."""
    result: dict[str, Counts] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = case.attrib["classname"] or case.attrib["name"]
        passed, failed, skipped = result.get(name(module), (0, [], 0))
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed = [*failed, f"{module.rpartition('.')[2]}::{case.attrib['name']}"]
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
        result[name(module)] = passed, failed, skipped
    return result


def folder_of(module: str) -> str:
    """``tests.plan.test_plan`` (a module, or a class in one) -> tests/plan."""
    parts = module.split(".")
    return "/".join(parts[: next(k for k, part in enumerate(parts) if part.startswith("test_"))])


def key(row: Row) -> tuple[str, str, str]:
    return row["torch"], row["python"], row["tests"]


def put(row: Row, rows: list[Row]) -> list[Row]:
    """In place of the one of these tests, and of those of files in this folder: they have run again."""
    torch, python, tests = key(row)
    return [r for r in rows if key(r)[:2] != (torch, python) or not f"{r['tests']}/".startswith(f"{tests}/")] + [row]


def read(path: Path = RESULTS) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[Row], path: Path = RESULTS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda r: (_number(r["torch"]), _number(r["python"]), r["tests"])))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split("."))


def cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    text = f"**{row['failed']} failed**, {row['passed']} passed" if int(row["failed"]) else f"{row['passed']} passed"
    return text + (f", {row['skipped']} skipped" if int(row["skipped"]) else "")


def document(rows: list[Row], folders: list[str]) -> str:
    """A column for each torch and Python, a line for each folder of tests; below them the names of what failed."""
    by_key = {key(row): row for row in rows}
    columns = {(r["torch"], r["python"]): r for r in rows}
    when = {c: sorted(r["date"] for r in rows if (r["torch"], r["python"]) == c)[-1] for c in columns}
    heads = [f"torch {t}, triton {r['triton']}, Python {p}" for (t, p), r in columns.items()]
    lines = [
        "# Versions: what has run",
        "",
        "On CPUs, also with torch's builds for CUDA. A cell is one run of a folder or file of tests, or `not run`. "
        "zc asks for torch 2.11 or later and Python 3.10 or later; a version without a column has not run.",
        "",
        "Made by `make test-torch TORCH_VERSION=...`, which installs that torch into an environment of its own, from "
        "`tests/versions/results.csv`. Do not edit.",
        "",
        "| tests | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for folder in sorted({*folders, *(r["tests"] for r in rows)}):
        lines.append(f"| {folder} | " + " | ".join(cell(by_key.get((*c, folder))) for c in columns) + " |")
    lines.append("| last run | " + " | ".join(when[c] for c in columns) + " |")
    lines += ["", *(f"- torch {r['torch']}, {r['tests']}: failed `{r['names']}`" for r in rows if int(r["failed"]))]
    return "\n".join(lines) + "\n"


def folders_of_tests() -> list[str]:
    return sorted({p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")} - {"tests/gpu"})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("version", help="of torch; or 'table': only makes the document")
    parser.add_argument("tests", nargs="*", help="folders; all of them where none is named")
    parser.add_argument("--python", type=Path, help="of an environment that has this torch")
    parser.add_argument("--report", type=Path, help="of pytest's --junitxml: nothing runs")
    args = parser.parse_args()
    any_failed = False
    if args.version != "table":
        python = args.python or environment(args.version, sys.executable)
        torch, triton, version = subprocess.run(
            [python, "-c", FACTS], check=True, capture_output=True, text=True
        ).stdout.split()
        if torch.split("+")[0] != args.version:
            parser.error(f"{python} has torch {torch}, not {args.version}")
        folders = [tests.rstrip("/") for tests in args.tests or folders_of_tests()]
        ready = counts_of(args.report, folder_of) if args.report else None
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        for tests in folders if ready is None else [name for name in folders if name in ready]:
            passed, failed, skipped = run_folder(python, tests) if ready is None else ready[tests]
            any_failed |= bool(failed)
            values = (torch, triton, version, tests, str(passed), str(len(failed)), str(skipped))
            row = dict(zip(COLUMNS, (*values, today, commit.stdout.strip(), "; ".join(failed)), strict=True))
            write(put(row, read()))
            DOCUMENT.write_text(document(read(), folders_of_tests()))
    DOCUMENT.write_text(document(read(), folders_of_tests()))
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
