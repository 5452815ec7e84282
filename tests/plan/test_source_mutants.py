"""tests/source_mutants.py: which edits it makes of a source, and that each changes what Python reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import source_mutants
from tiers import FULL

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A text with 1 number."""
def f(é: int = 3, b: bool = True) -> list[int]:
    log.debug("2 numbers")
    if é < 4 and b:
        raise ValueError(f"{é + 1} is less than 4")
    note("ü", é - 2)
    return [k for k in g(é)] if é is not None else []
'''


def test_the_edits_of_a_source() -> None:
    made = [(edit.line, edit.kind, edit.before, edit.after) for edit in source_mutants.edits("f.py", SOURCE)]
    assert made == [
        (4, "comparison", "é < 4", "(é <= 4)"),
        (4, "branch", "é < 4 and b", "(not (é < 4 and b))"),
        (4, "condition", "é < 4 and b", "(é < 4 or b)"),
        (4, "number", "4", "(5)"),
        (6, "call", 'note("ü", é - 2)', "pass"),
        (6, "sign", "é - 2", "(é + 2)"),
        (6, "number", "2", "(3)"),
        (7, "branch", "é is not None", "(not (é is not None))"),
        (7, "comparison", "é is not None", "(é is None)"),
    ]


def test_each_room_has_its_source_and_its_tests() -> None:
    for folder, tests in source_mutants.ROOMS.values():
        assert all((ROOT / path).exists() for path in (folder, *tests))


@pytest.mark.parametrize("room", source_mutants.ROOMS if FULL else ("kernels",))
def test_each_edit_is_another_program(room: str) -> None:
    folder, _ = source_mutants.ROOMS[room]
    some = source_mutants.drawn(ROOT, folder, 40, 0)
    assert some == source_mutants.drawn(ROOT, folder, 40, 0) != source_mutants.drawn(ROOT, folder, 40, 1)
    for edit in some:
        source = (ROOT / edit.file).read_text()
        assert ast.dump(ast.parse(edit.applied(source))) != ast.dump(ast.parse(source)), edit
