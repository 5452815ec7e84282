"""Small edits to zc's source, one at a time, and whether the tests of that room notice them.

    python tests/source_mutants.py planning kernels --count 20 --seed 0 --out out/mutants.csv

An edit turns a comparison, a sign, a condition or a flag around, moves a number by one, or leaves out a call. Texts of
errors, logs, assertions and annotations stay as they are. Each runs in a copy of the tree, with the tests of `ROOMS`
until the first one fails. An edit that nothing notices is printed: the code is not needed, or no test shows that it is.
It takes what is committed. The edits depend on the source and the seed alone: two suites of one source can be compared.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {  # by name: where the source is, and the tests that should notice
    "kernels": ("kernels", ("tests/kernels/test_references.py", "tests/kernels/test_wgrad_into.py", "tests/kernels")),
    "planning": ("zc/planning", ("tests/plan",)),
    "schedule": ("zc/schedule", ("tests/passes", "tests/proof")),
    "passes": ("passes", ("tests/passes", "tests/proof")),
    "engine": ("zc/engine", ("tests/engine", "tests/backend", "tests/distributed")),
    "compiler": ("zc/compiler", ("tests/backend", "tests/distributed", "tests/compatibility")),
    "optim": ("zc/optim", ("tests/distributed/test_flat_slices.py", "tests/engine", "tests/distributed")),
    "weights": ("zc/weights", ("tests/engine", "tests/distributed", "tests/compatibility")),
    "ranks": ("zc/ranks", ("tests/ranks", "tests/proof/test_memory_protocol.py", "tests/distributed")),
    "checkpoint": ("zc/checkpoint", ("tests/checkpoint", "tests/distributed")),
    "offload": ("zc/offload", ("tests/engine", "tests/cuda", "tests/distributed/test_offload.py", "tests/distributed")),
    "checking": ("zc/checking", ("tests/check",)),
    "report": ("zc/report", ("tests/report", "tests/plan", "tests/backend")),
    "integrations": ("zc/integrations", ("tests/integrations",)),
}
LIMIT_S = 1800.0  # of the tests of one edit; what hangs is noticed
TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
COLUMNS = ("room", "file", "line", "kind", "before", "after", "noticed", "seconds", "commit")


class Edit(NamedTuple):
    """Replaces characters [start, stop) of a file."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.stop :]


def edits(file: str, source: str) -> list[Edit]:
    """All edits of a file, in the order of its text."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    lines = source.splitlines()

    def at(line: int, column: int) -> int:  # ast counts columns in bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: list[Edit] = []
    for node, kind, after in _changes(ast.parse(source)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, stop = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
        found.append(Edit(file, node.lineno, kind, start, stop, source[start:stop], after))
    return sorted(found, key=lambda edit: (edit.start, edit.stop, edit.kind))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """(node, kind, what stands in its place)"""
    for node in ast.iter_child_nodes(tree):
        if _is_left_alone(node):
            continue
        if isinstance(node, ast.FunctionDef):  # without annotations and defaults
            for statement in node.body:
                yield from _changes(ast.Module([statement], []))
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
            ops = [TURNED[type(node.ops[0])](), *node.ops[1:]]
            yield node, "comparison", f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
        elif isinstance(node, ast.BinOp) and type(node.op) in TURNED:
            turned = ast.BinOp(node.left, TURNED[type(node.op)](), node.right)
            yield node, "sign", f"({ast.unparse(turned)})"
        elif isinstance(node, ast.BoolOp):
            yield node, "condition", f"({ast.unparse(ast.BoolOp(TURNED[type(node.op)](), node.values))})"
        elif isinstance(node, ast.If | ast.IfExp):
            yield node.test, "branch", f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "flag", str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, "number", f"({node.value + 1})"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "call", "pass"
        yield from _changes(node)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).split(".")[0] in ("log", "warnings")
    is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    texts = ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.arguments
    return is_for_types or isinstance(node, texts)


def drawn(tree: Path, folder: str, count: int, seed: int) -> list[Edit]:
    """``count`` edits of the files of a folder, files and lines mixed."""
    files = sorted(path for path in (tree / folder).rglob("*.py") if not path.name.startswith("__"))
    every = [edit for path in files for edit in edits(path.relative_to(tree).as_posix(), path.read_text())]
    return random.Random(f"{folder} {seed}").sample(every, min(count, len(every)))


def is_noticed(edit: Edit, tree: Path, tests: tuple[str, ...]) -> bool:
    """Whether a test fails in ``tree``, a copy, with this edit."""
    path = tree / edit.file
    source = path.read_text()
    path.write_text(edit.applied(source))
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=env, timeout=LIMIT_S, capture_output=True, check=False)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)


def main() -> int:
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; none: all")
    parser.add_argument("--count", type=int, default=40, help="edits a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/mutants.csv"))
    args = parser.parse_args()
    if unknown := [room for room in args.rooms if room not in ROOMS]:
        parser.error(f"{', '.join(unknown)}: the rooms are {', '.join(ROOMS)}")
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    scores: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, args.out.open("a", newline="") as file:
        tree, writer = Path(folder) / "tree", csv.DictWriter(file, COLUMNS, lineterminator="\n")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        if file.tell() == 0:
            writer.writeheader()
        for room in args.rooms or ROOMS:
            source, tests = ROOMS[room]
            for edit in track(drawn(tree, source, args.count, args.seed), description=room):
                started = time.monotonic()
                noticed = is_noticed(edit, tree, tests)
                scores.setdefault(room, []).append(noticed)
                if not noticed:
                    print(f"{edit.file}:{edit.line}: {edit.before!r} -> {edit.after!r} is not noticed", flush=True)
                said = {key: value for key, value in edit._asdict().items() if key in COLUMNS}
                took = round(time.monotonic() - started)
                writer.writerow({"room": room, **said, "noticed": noticed, "seconds": took, "commit": commit})
                file.flush()
    for room, noticed in scores.items():
        print(f"{room}: {sum(noticed)} of {len(noticed)} edits are noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
