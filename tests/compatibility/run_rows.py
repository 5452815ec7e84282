"""Runs cells of the table, a cell being a row under one backend and stage, many in one job of the ranks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import rows_absent_reads
import rows_backward
import rows_buffers_written
import rows_checkpointing
import rows_clearing
import rows_compiled_loops
import rows_conv
import rows_dropped_gradients
import rows_grad_values
import rows_optimizer_params
import rows_optimizers
import rows_overlap
import rows_param_grad
import rows_params
import rows_precision
import rows_replaced
import rows_several
import rows_several_models
import rows_shard_frozen
import rows_stage_3_writes
import rows_structure
import rows_tasks
import rows_token_counts
import rows_unequal_ranks
import rows_unforeseen
import rows_unfreezing
import rows_updates
import torch
import torch.distributed as dist
from harness import RanksFailed, run_ranks
from late_gathers import late_gathers
from oracle import weights, worst
from rank_process import collect, freeze_what_stays
from rows import BACKENDS, ROWS, STAGES, Row, Script, make_plain, plain, sgd
from tiers import FULL
from torch import Tensor, nn

import zc
from zc.registry import COMPILED

TABLE = (
    rows_tasks, rows_updates, rows_clearing, rows_backward, rows_structure, rows_several_models, rows_conv,
    rows_buffers_written, rows_params, rows_absent_reads, rows_replaced, rows_unfreezing, rows_precision,
    rows_checkpointing, rows_param_grad, rows_grad_values, rows_optimizers, rows_optimizer_params,
    rows_dropped_gradients, rows_unequal_ranks, rows_token_counts, rows_overlap, rows_several, rows_unforeseen,
    rows_shard_frozen, rows_stage_3_writes, rows_compiled_loops,
)  # fmt: skip


class Cell(NamedTuple):
    row: str
    backend: str
    stage: int

    def __str__(self) -> str:
        return f"{self.row} / {self.backend} / stage {self.stage}"


class Outcome(NamedTuple):
    """``kind``: right, refused, wrong, failed (an error that the table does not expect, or a hang), skipped."""

    kind: str
    text: str

    @property
    def is_fine(self) -> bool:
        return self.kind in ("right", "refused", "skipped")


ALL_CELLS = [Cell(name, backend, stage) for name in ROWS for backend in BACKENDS for stage in STAGES]


def run_cells(cells: Sequence[Cell], timeout: float = 240.0) -> dict[Cell, Outcome]:
    """All of them in one job; where that fails, one by one, so that the failure gets a name."""
    wanted = [cell for cell in cells if _is_there(_row(cell.row).needs)]
    outcomes = {cell: Outcome("skipped", f"needs {_row(cell.row).needs}") for cell in cells if cell not in wanted}
    try:
        ranks = run_ranks(_job, 2, [tuple(cell) for cell in wanted], timeout=timeout)
    except RanksFailed as error:
        if len(wanted) == 1:
            return {**outcomes, wanted[0]: Outcome("failed", str(error))}
        for cell in wanted:
            outcomes.update(run_cells([cell], timeout=60.0))
        return outcomes
    for k, cell in enumerate(wanted):
        outcomes[cell] = _judge(_row(cell.row), cell, [seen[k] for seen in ranks])
    return outcomes


def _is_there(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


class Seen(NamedTuple):
    """One rank's side of a cell: the error that was raised, or the largest difference and a hash of the weights."""

    error: str
    difference: float
    where: str
    digest: str


def _judge(row: Row, cell: Cell, ranks: Sequence[Seen]) -> Outcome:
    expected = row.error(cell.backend, cell.stage)
    errors = [seen.error for seen in ranks]
    if expected is not None:
        kind, _, words = expected.partition(": ")
        if all(error.startswith(kind) and words in error for error in errors):
            return Outcome("refused", errors[0].splitlines()[0])
        return Outcome("failed", f"expected {expected!r} on every rank, got {errors}")
    if any(errors):
        return Outcome("failed", "\n".join(errors))
    if len({seen.digest for seen in ranks}) > 1:
        return Outcome("wrong", "ranks ended with different weights")
    worst_rank = max(ranks, key=lambda seen: (seen.difference != seen.difference, seen.difference))
    if not worst_rank.difference <= row.tolerance:
        return Outcome("wrong", f"{worst_rank.where}: {worst_rank.difference:.1e} from the oracle")
    return Outcome("right", f"{worst_rank.difference:.1e}")


# --- in a rank ---

_REFERENCES: dict[str, dict[str, Tensor]] = {}  # of this process: the oracle knows no backend and no stage


def _job(rank: int, world_size: int, cells: Sequence[tuple[str, str, int]]) -> list[Seen]:
    seen = []
    for name, backend, stage in cells:
        print(f"cell {name} / {backend} / stage {stage}", flush=True)  # in the log that a hang shows
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append(_cell(rank, world_size, _row(name), backend, stage))
        collect()
        freeze_what_stays()  # what the first cells have imported: else each later one walks it, 0.1 s
    return seen


def _fresh(row: Row) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return row.make()


LATE = 0.012  # seconds before each bucket's gather


def _cell(rank: int, world_size: int, row: Row, backend: str, stage: int) -> Seen:
    try:
        model = _fresh(row)
        optimizer = row.optimizer(p for p in model.parameters() if p.requires_grad)
        own = {name: value() if callable(value) else value for name, value in row.options.items()}
        # one parameter per bucket; in the default tier, stages 1 and 3 have one layer per bucket, for fewer schedules
        options = {"bucket_nbytes": 512 if FULL or stage == 2 else 1200, **own}
        with late_gathers(LATE) if options.get("overlap_gather") else contextlib.nullcontext():
            zc.compile(model, optimizer, stage=stage, backend=backend, **options)
            script = Script(model, optimizer, rank, world_size, torch.float32, True, backend, stage)
            row.loop(script)
            if model in COMPILED:
                script.synchronize()  # the weights are read below
    except Exception as error:  # noqa: BLE001  (the table says which are expected)
        text = f"{type(error).__name__}: {error}"
        if row.error(backend, stage) is None:
            text += f"\n{traceback.format_exc()}"
        return Seen(text, 0.0, "", "")
    with zc.whole_parameters(model) if model in COMPILED else contextlib.nullcontext():
        trained = weights(model)
    got = {**trained, **script.seen}
    if row.name not in _REFERENCES:
        _REFERENCES[row.name] = _reference(rank, world_size, row)
    difference, where = worst(got, _REFERENCES[row.name])
    digest = hashlib.sha256(b"".join(w.float().numpy().tobytes() for w in trained.values())).hexdigest()
    return Seen("", difference, where, digest)


def _reference(rank: int, world_size: int, row: Row) -> dict[str, Tensor]:
    model = _fresh(row).to(row.oracle_dtype)
    optimizer = row.optimizer(p for p in model.parameters() if p.requires_grad)
    make_plain(model, optimizer)
    script = Script(model, optimizer, rank, world_size, row.oracle_dtype, is_zc=False)
    row.loop(script)
    dist.barrier()
    return {**weights(model), **script.seen}


# --- negative controls ---


def _differs(script: Script) -> None:
    for step in range(2):
        (script.loss(step) * (1.01 if script.is_zc else 1.0)).backward()
        script.update()


def _raises(script: Script) -> None:
    raise ValueError("nobody expects this")


CONTROLS = {
    row.name: row
    for row in (
        Row("control: differs", 0, _differs, optimizer=sgd),
        Row("control: no error", 0, plain, refused={"always": "ZcError: sharded"}),
        Row("control: an error", 0, _raises),
    )
}


def _row(name: str) -> Row:
    return ROWS.get(name) or CONTROLS[name]
