"""Training loops as people write them: each row of the table is right, or refused with the error that it names.

By default each row but those of the full tier runs once, with the stages in turn, some by aot_eager, one by Inductor,
the others eager: to compile takes ten times as long as to run. Stage 3 does the same with overlap_gather or
shard_frozen as without: such rows have stages 1 and 2. ZC_TESTS=full runs all cells.
docs/compatibility.md is made from all cells: ``python tests/compatibility/generate.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generate import DOCUMENT, document, read
from harness import run_cases
from models import mlp
from rows import ROWS, STAGES, adamw
from run_rows import ALL_CELLS, Cell, Outcome, run_cells
from tiers import FULL
from training_runs import counted_collectives, environment

import zc
from zc.engine import param_checks

PER_JOB = 24
# Rows whose graphs run lines or branches of zc that fewer than three other tests run, or whose point is in a graph
COMPILED_ROWS = (
    "a gradient penalty (double backward)",
    "a whole block replaced, zc.recompile(model)",
    "a backward raises before any gradient on one rank, half-way on another, then .grad = None by hand",
    "zc.recompile between microbatches that were held back and the step",
    "sums over other numbers of samples, by zc.count",
    "shard_frozen: blocks, checkpointing, non-reentrant",
    "shard_frozen: overlap_gather",
    "shard_frozen: evaluation between a forward and its backward",
    "a forward that reads a buffer and then writes it: a state, after a graph break",
    "a forward that reads a buffer and then writes it: a state, in the backward, too",
    "an embedding with sparse gradients",
    "torch.autograd.grad for some parameters, before the backward",
    "param.data = other of another shape after zc.compile",
    "overlap_gather: inference_mode between steps",
    "a layer replaced twice, evaluated between",
    "a layer unfrozen without zc.recompile",
)
# test_against_ddp.py has a plain loop, and tests/backend/test_saved.py convolutions, whose strides Inductor chooses
INDUCTOR = ("a hook on a parameter sees its gradient",)


def sample() -> list[Cell]:
    """Every row once, and a few by Inductor; the same cells in every run."""
    if FULL:
        return ALL_CELLS
    quick = [name for name, row in ROWS.items() if not row.full_only]
    chosen = []
    for k, name in enumerate(quick):
        stages = STAGES[:2] if {"overlap_gather", "shard_frozen"} & ROWS[name].options.keys() else STAGES
        backend = "aot_eager" if name in COMPILED_ROWS else "eager"
        # after three rows the stages begin with the next one
        chosen.append(Cell(name, backend, stages[(k // 3 + k) % len(stages)]))
    assert {(cell.backend, cell.stage) for cell in chosen} == {(b, s) for b in ("eager", "aot_eager") for s in STAGES}
    assert set(COMPILED_ROWS) <= {cell.row for cell in chosen if cell.backend == "aot_eager"}
    return chosen + [Cell(name, "inductor", 1 + k % 2) for k, name in enumerate(INDUCTOR)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Outcomes of the cells that were selected, run in jobs of PER_JOB when the first of them is asked for."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_cell"]
    selected = [item.callspec.params["cell"] for item in items]  # type: ignore[attr-defined]
    by_cell: dict[Cell, Outcome] = {}

    def outcome(cell: Cell) -> Outcome:
        if cell not in by_cell:
            start = selected.index(cell) // PER_JOB * PER_JOB
            by_cell.update(run_cells(selected[start : start + PER_JOB]))
        return by_cell[cell]

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


def _clipping(rank: int, world_size: int, stage: int) -> list[str]:
    """Job: the collectives of reading all norms, one by one, and clipping after a backward."""
    model = mlp()
    with environment(ZC_HOST_MEMORY="0"):  # messages can be counted
        zc.compile(model, adamw(model.parameters()), stage=stage, backend="eager", bucket_nbytes=512)
    model(torch.ones(2, 16)).sum().backward()
    with counted_collectives() as calls:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.norm()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    numel = len(list(model.parameters()))
    return [call for call in calls if call == f"all_reduce {numel}"]


def test_all_norms_take_one_collective() -> None:
    """One all-reduce of a number per parameter, not one all-reduce each."""
    for stage, ranks in run_cases(_clipping, 2, (1, 2)):
        assert all(len(calls) == 1 for calls in ranks), (stage, ranks)


@pytest.mark.parametrize("read", ["norms and clipping", "zeroing"])
def test_what_is_asked_of_one_gradient_looks_at_no_other(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock clipping asks each parameter twice. Each time all of them were looked at."""

    def looks(depth: int) -> int:
        model = mlp(depth=depth)
        zc.compile(model, adamw(model.parameters()), backend="eager")
        model(torch.ones(2, 16)).sum().backward()
        num_looks, changes = list[int](), param_checks.changes

        def look(*args: Any) -> param_checks.Changes:
            num_looks.append(1)
            return changes(*args)

        monkeypatch.setattr(param_checks, "changes", look)
        if read == "norms and clipping":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            for param in model.parameters():
                assert param.grad is not None
                param.grad.zero_()
        monkeypatch.undo()
        return len(num_looks)

    assert looks(depth=1) == looks(depth=12) == 1


def test_the_document_is_made_of_the_rows() -> None:
    assert DOCUMENT.read_text() == document(read()), "run tests/compatibility/generate.py"
