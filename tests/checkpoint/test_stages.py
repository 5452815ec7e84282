"""Checkpoints go from stage to stage, with offload and shard_frozen and without, on any number of ranks, bitwise:
weights, frozen ones included, and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import run_cases
from save_and_load import Job, joined, parts
from test_reshard import assert_same

import zc

CPU = "cpu"
CHAIN: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"stage": 3}),
    (3, {"stage": 2, "offload": CPU}),
    (2, {"stage": 2, "shard_frozen": True}),
    (4, {"stage": 3, "offload": CPU}),
    (3, {"stage": 1, "offload": CPU, "shard_frozen": True}),
    (1, {"stage": 3}),
    (3, {"stage": 3, "offload": CPU}),
    (2, {"stage": 1}),
    (1, {"stage": 3, "offload": CPU}),
    (3, {"stage": 3}),
)  # ranks, options


def job_of(case: str, options: dict[str, Any], seed: int) -> Job:
    return Job(case, options={"bucket_nbytes": 2048, **options}, seed=seed)


def train_and_save(rank: int, world_size: int, case: str, options: dict[str, Any], path: Path) -> dict[str, Any]:
    """Job: three updates and a save."""
    job = job_of(case, options, 0)
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 3)
    zc.save(path, model, optimizer)
    return {"parts": parts(model, optimizer), "weights": zc.full_state_dict(model)}


def load_and_save(
    rank: int, world_size: int, case: str, options: dict[str, Any], path: Path, again: Path
) -> dict[str, Any]:
    """Job: a model of another seed gets a checkpoint, and saves it."""
    model, optimizer = job_of(case, options, 7).compiled()
    zc.load(path, model, optimizer)
    zc.save(again, model, optimizer, asynchronous=True).wait()
    return {"parts": parts(model, optimizer), "weights": zc.full_state_dict(model)}


def test_every_stage_loads_what_another_has_saved(tmp_path: Path) -> None:
    names = ("frozen", "mixed_dtypes")
    (width, options), *others = CHAIN
    first = run_cases(train_and_save, width, [(name, options, tmp_path / f"{name} 0") for name in names])
    for k, (width, options) in enumerate(others):
        paths = [[tmp_path / f"{name} {number}" for number in (k, k + 1)] for name in names]
        later = run_cases(load_and_save, width, [(name, options, *p) for name, p in zip(names, paths, strict=True)])
        for (case, ranks), (_, wanted) in zip(later, first, strict=True):
            assert_same(*(joined([rank["parts"] for rank in each]) for each in (ranks, wanted)), case)
            assert_same(ranks[0]["weights"], wanted[0]["weights"], case)
