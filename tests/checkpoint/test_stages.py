"""Checkpoints go from stage to stage, with offload and shard_frozen and without, on any number of ranks, bitwise:
weights, frozen ones included, and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks
from save_and_load import Job, joined, parts

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


@pytest.mark.parametrize("case", ["frozen", "mixed_dtypes"])
def test_every_stage_loads_what_another_has_saved(case: str, tmp_path: Path) -> None:
    first = run_ranks(train_and_save, CHAIN[0][0], case, CHAIN[0][1], tmp_path / "0")
    wanted = joined([rank["parts"] for rank in first])
    for k, (width, options) in enumerate(CHAIN[1:]):
        ranks = run_ranks(load_and_save, width, case, options, tmp_path / str(k), tmp_path / str(k + 1))
        got = joined([rank["parts"] for rank in ranks])
        assert got.keys() == wanted.keys()
        assert not [name for name in wanted if not got[name].equal(wanted[name])], (width, options)
        weights = ranks[0]["weights"]
        assert weights.keys() == first[0]["weights"].keys()
        assert not [name for name, value in first[0]["weights"].items() if not weights[name].equal(value)]
