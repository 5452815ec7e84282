"""Training loops as people write them: each row of the table is right, or refused with the error that it names.

By default every row runs once, with another backend and stage from row to row; the rest, and all of Inductor's, run
with ZC_TESTS=full. docs/compatibility.md is made from all of them: ``python tests/compatibility/generate.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from cells import ALL_CELLS, Cell, Outcome, run_cells
from generate import DOCUMENT, documented_rows
from rows import ROWS, Row

PER_JOB = 16
INDUCTOR = ("the plain loop", "one backward of the summed losses", "a hook on a parameter sees its gradient")


def sample() -> list[Cell]:
    """Every row once: eager and aot_eager, stage 1 and 2 in turn; Inductor for a few."""
    if os.environ.get("ZC_TESTS") == "full":
        return ALL_CELLS
    turns = [("eager", 1), ("aot_eager", 2), ("eager", 2), ("aot_eager", 1)]
    chosen = [Cell(name, *turns[k % 4]) for k, name in enumerate(ROWS)]
    return chosen + [Cell(name, "inductor", 1 + k % 2) for k, name in enumerate(INDUCTOR)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Outcomes of the cells that were selected, run in jobs of PER_JOB when the first of them is asked for."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_cell"]
    selected = [item.callspec.params["cell"] for item in items]  # type: ignore[attr-defined]
    found: dict[Cell, Outcome] = {}

    def outcome(cell: Cell) -> Outcome:
        if cell not in found:
            start = selected.index(cell) // PER_JOB * PER_JOB
            found.update(run_cells(selected[start : start + PER_JOB]))
        return found[cell]

    return outcome  # type: ignore[return-value]


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_cell(cell: Cell, outcomes: Any) -> None:
    outcome = outcomes(cell)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    assert outcome.is_fine, f"{cell}: {outcome.kind}: {outcome.text}"


def test_a_wrong_number_and_a_missing_error_are_noticed() -> None:
    """The negative controls: a loop that differs between the sides, an error that nobody raises, one that nobody
    expects."""
    cells = [Cell(name, "eager", 2) for name in ("control: differs", "control: no error", "control: an error")]
    kinds = [outcome.kind for outcome in run_cells(cells).values()]
    assert kinds == ["wrong", "failed", "failed"]


def test_the_document_has_every_row() -> None:
    """docs/compatibility.md was generated from this table."""
    rows: list[Row] = list(ROWS.values())
    assert documented_rows(DOCUMENT.read_text()) == [row.name for row in rows], "run tests/compatibility/generate.py"
