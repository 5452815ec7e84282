"""Checkpoints of a model with two optimizers: other numbers of ranks, plain states in and out."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from oracle import weights, worst
from tiers import COMPILED, full_cases, full_only
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training_runs import message_of
from two_optimizers import CASE, MAKE, Loop, on_ranks, plain, reference, train, two_adamw, wide_muon

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FIRST = Loop(updates=3, microbatches=2, max_norm=0.5, scheduled=True)
THEN = dataclasses.replace(FIRST, first=3, updates=3)
NONE = Loop(updates=0)


def _first(rank: int, world_size: int, folder: str, loop: Loop, stage: int, backend: str) -> None:
    model = CASE.model()
    model, optimizers = zc.compile(model, MAKE[loop.make](model), stage=stage, backend=backend, bucket_nbytes=8192)
    on_ranks(loop, model, optimizers, rank)
    zc.save(Path(folder) / "ck", model, optimizers, extra={"update": loop.updates})


def _then(rank: int, world_size: int, folder: str, loop: Loop, stage: int, backend: str, before: int) -> Any:
    """Goes on on another number of ranks; the oracle's batches are those of as many ranks before and after."""
    dtype = torch.float32 if loop.make == "Muon" else torch.float64
    twin, plain_ones, _ = reference(dataclasses.replace(FIRST, make=loop.make), before, dtype)
    plain(loop, twin, plain_ones, world_size)
    model = CASE.model()
    model, optimizers = zc.compile(model, MAKE[loop.make](model), stage=stage, backend=backend, bucket_nbytes=4096)
    extra = zc.load(Path(folder) / "ck", model, optimizers)
    assert extra == {"update": 3}
    on_ranks(loop, model, optimizers, rank)
    return worst(weights(model), weights(twin))


@pytest.mark.parametrize(
    ("before", "after", "stage", "make", "tolerance"),
    [(2, 3, 2, "WideMuon", 2e-5), pytest.param(3, 2, 1, "WideMuon", 2e-5, marks=full_only), (1, 3, 1, "Muon", 0.02)],
)
@full_cases("1-3-1-Muon-0.02")
def test_another_number_of_ranks_goes_on(
    before: int, after: int, stage: int, make: str, tolerance: float, tmp_path: Path
) -> None:
    """Masters, momenta, Adam's moments and both schedules: one process's weights afterwards."""
    first, later = (dataclasses.replace(loop, make=make) for loop in (FIRST, THEN))
    run_ranks(_first, before, str(tmp_path), first, stage, COMPILED)
    for error in run_ranks(_then, after, str(tmp_path), later, 3 - stage, "eager", before):
        assert error[0] < tolerance, error


def _full(rank: int, world_size: int, kind: str) -> Any:
    """What goes out loads into plain optimizers, and into zc's by every way in."""
    model = CASE.model()
    pair = wide_muon(model)
    argument: Any = pair if kind == "list" else {"matrices": pair[0], "rest": pair[1]}
    model, optimizers = zc.compile(model, argument, backend="eager", bucket_nbytes=8192)
    each = list(optimizers.values()) if kind == "dict" else list(optimizers)
    loop = Loop(updates=2)
    on_ranks(loop, model, each, rank)
    states = [zc.full_optimizer_state(model, optimizers)]
    alone = [zc.full_optimizer_state(model, each[1])]
    dist.broadcast_object_list(states)
    dist.broadcast_object_list(alone)
    state, parts = states[0], list(states[0].values()) if kind == "dict" else states[0]
    assert type(state).__name__ == kind and (kind == "list" or list(state) == ["matrices", "rest"])
    assert str(parts[1]) == str(alone[0])
    ended = weights(model)

    # plain PyTorch goes on from it
    twin = CASE.model().double()
    with torch.no_grad():
        for name, param in twin.named_parameters():
            param.copy_(ended[name])
    its = wide_muon(twin)
    for optimizer, part in zip(its, parts, strict=True):
        optimizer.load_state_dict(copy.deepcopy(part))
    plain(THEN, twin, its, world_size)

    errors = []
    merged = _merged(model, parts, each)
    for way in ("load_state_dict", "merged", "each"):
        other = CASE.model()
        fresh = wide_muon(other)
        other, fresh = zc.compile(other, fresh, backend="eager", bucket_nbytes=4096)
        if way == "each":
            zc.load_state_dict(other, fresh, {"model": ended})
            for optimizer, part in zip(fresh, parts, strict=True):
                optimizer.load_state_dict(copy.deepcopy(part))
        else:
            zc.load_state_dict(other, fresh, {"model": ended, "optimizer": list(parts) if way != "merged" else merged})
        on_ranks(THEN, other, fresh, rank)
        errors.append(worst(weights(other), weights(twin)))
    return errors


def _merged(model: Any, parts: Any, each: Any) -> dict[str, Any]:
    """As torch.distributed.checkpoint.state_dict makes one state of several optimizers' (DDP, FSDP2)."""
    twin = CASE.model()
    pair = wide_muon(twin)
    for optimizer, part in zip(pair, parts, strict=True):
        optimizer.load_state_dict(copy.deepcopy(part))
    return dict(get_optimizer_state_dict(twin, tuple(pair)))


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_plain_states_go_out_and_in(kind: str) -> None:
    for errors in run_ranks(_full, 2, kind):
        for error in errors:
            assert error[0] < 2e-5, error


def _own(rank: int, world_size: int) -> dict[str, Any]:
    """optimizer.state_dict() of each is this rank's part, as with one optimizer."""
    model = CASE.model()
    model, optimizers = zc.compile(model, wide_muon(model), backend="eager", bucket_nbytes=8192)
    on_ranks(Loop(updates=2), model, optimizers, rank)
    before = [copy.deepcopy(o.state_dict()) for o in optimizers], weights(model)
    on_ranks(THEN, model, optimizers, rank)
    once = weights(model)
    zc.load_state_dict(model, optimizers, {"model": before[1]})
    for optimizer, state in zip(optimizers, before[0], strict=True):
        optimizer.load_state_dict(state)
    on_ranks(THEN, model, optimizers, rank)
    same = all(torch.equal(w, once[n]) for n, w in weights(model).items())
    wrong = message_of(lambda: optimizers[0].load_state_dict(before[0][1]))
    return {"same": same, "wrong": wrong}


def test_each_optimizers_own_state_goes_back() -> None:
    for seen in run_ranks(_own, 2):
        assert seen["same"]
        assert seen["wrong"][0] in ("ValueError", "CheckpointError")


def test_what_is_not_this_models_is_refused(tmp_path: Path) -> None:
    model = CASE.model()
    model, optimizers = zc.compile(model, two_adamw(model), backend="eager")
    train(NONE, optimizers, lambda *_: None, lambda _: None)
    saved = zc.save(tmp_path / "ck", model, optimizers).wait()
    first, second = optimizers
    for others in (first, [second, first], [first]):
        with pytest.raises(
            zc.PlanError, match="not what GPT was compiled with: give the same AdamW, AdamW in that order"
        ):
            zc.load(saved, model, others)
    state = {"model": model.state_dict(), "optimizer": [zc.full_optimizer_state(model, first)]}
    with pytest.raises(zc.CheckpointError, match="a list of 1, and wanted is one state_dict, or a list of them"):
        zc.load_state_dict(model, optimizers, state)
    other = CASE.model()
    other, muon = zc.compile(other, wide_muon(other), backend="eager")
    with pytest.raises(zc.CheckpointError, match="parameter group"):
        zc.load(saved, other, muon)
