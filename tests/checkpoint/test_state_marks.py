"""`optimizer.state_dict()` and `optimizer.load_state_dict`: right, or refused by name."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import run_cases, run_ranks
from models import CASES
from save_and_load import Job, joined, parts
from test_reshard import OPTIMIZERS, assert_same
from test_ways_out_and_in import plain_steps
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training_runs import adamw, message_of

import zc


def _said(job: Job, path: Path, state: Any, rank: int) -> tuple[Any, Any, bool, tuple[str, str]]:
    """What loading ``state`` says, whether it left all as it was, and what the next update says."""
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 5, 6, rank)
    before = parts(model, optimizer)
    said = message_of(lambda: optimizer.load_state_dict(state))
    after = parts(model, optimizer)
    same = before.keys() == after.keys() and all(torch.equal(before[n][1], after[n][1]) for n in before)
    dist.barrier()
    return (*said, same, message_of(lambda: job.steps(model, optimizer, 6, 7, rank)))


def _ddp_habit(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """nanoGPT's: rank 0 writes a file, every rank loads it."""
    job = Job("mlp")
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 3, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = optimizer.state_dict()
        optimizer.state_dict()
    if rank == 0:
        torch.save({"optimizer": mine}, path / "rank0.pt")
    torch.save(mine, path / f"own{rank}.pt")
    dist.barrier()
    theirs = torch.load(path / "rank0.pt", weights_only=True)["optimizer"]
    own = torch.load(path / f"own{rank}.pt", weights_only=True)
    result: dict[str, Any] = {"warned": [str(w.message) for w in caught if "zc.full_optimizer_state" in str(w.message)]}
    result["habit"] = _said(job, path, theirs, rank)
    result["other plan"] = _said(Job("mlp", options={"bucket_nbytes": 64}), path, own, rank)
    result["only rank 0"] = _only_rank_0(job, own, rank)
    wrong = CASES["narrow_mlp"].model(0)
    plain = torch.optim.AdamW([*wrong.parameters()][:2]).state_dict()
    result["of another model"] = _said(job, path, plain, rank)
    result["in zc.load_state_dict"] = message_of(
        lambda: zc.load_state_dict(model, optimizer, {"model": model.state_dict(), "optimizer": theirs})
    )

    # its own: bitwise the run that went on
    again, its = Job("mlp").compiled()
    with torch.no_grad():
        for one, other in zip(again.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    its.load_state_dict(own)
    ends = []
    for pair in ((model, optimizer), (again, its)):
        job.steps(*pair, 3, 6, rank)
        ends.append(parts(*pair))
    result["own"] = all(torch.equal(ends[0][name][1], ends[1][name][1]) for name in ends[0])
    return result


def _only_rank_0(job: Job, own: Any, rank: int) -> tuple[str, str]:
    model, optimizer = job.compiled()
    if rank == 0:
        optimizer.load_state_dict(own)
    return message_of(lambda: job.steps(model, optimizer, 0, 1, rank))


def test_rank_0s_state_is_no_other_ranks(tmp_path: Path) -> None:
    """Shapes fit, and rank 1 took rank 0's moments. Rank 0 is told before the next update, none is done apart."""
    results = run_ranks(_ddp_habit, 2, tmp_path)
    for rank, seen in enumerate(results):
        assert ["only this rank can load it" in text for text in seen["warned"]] == [True] * (rank == 0)  # for all
        kind, text, same, (next_kind, next_text) = seen["habit"]
        if rank == 0:
            assert kind == ""
        else:
            assert kind == "CheckpointError" and same
            for words in ("rank 0's part of 2", "this is rank 1", "zc.full_optimizer_state", "zc.save"):
                assert words in text
        assert next_kind == "RankMismatchError"
        assert "rank 0 has optimizer.load_state_dict, taken, rank 1 has optimizer.load_state_dict, refused" in next_text
        kind, text, same, after = seen["other plan"]
        assert kind == "CheckpointError" and "another plan" in text and same and after == ("", "")
        assert seen["only rank 0"][0] == "RankMismatchError" and "optimizer.load_state_dict" in seen["only rank 0"][1]
        kind, text, same, after = seen["of another model"]
        assert kind == "CheckpointError" and "parameter groups of [2] members" in text and same and after == ("", "")
        kind, text = seen["in zc.load_state_dict"]
        assert kind == "CheckpointError" and "rank 0's part of 2" in text and "zc.full_optimizer_state" in text
        assert seen["own"]


def _whole(rank: int, world_size: int, make: Any, options: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """DDP's optimizer.state_dict() goes into zc's optimizer, and what zc gives as a whole comes back."""
    if path is not None:
        options = {**options, "offload_dir": path}
    job = Job("matrices", make, options)
    plain = DistributedDataParallel(CASES["matrices"].model(0))
    its = make(plain)
    its.param_groups[0]["lr"] = 0.0123
    plain_steps(plain, its, "matrices", 0, 3)
    model, optimizer = job.compiled()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    model.load_state_dict(plain.module.state_dict())
    optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
    state = parts(model, optimizer)
    wanted: dict[str, Tensor] = {}
    for name, param in plain.module.named_parameters():
        for key, value in its.state[param].items():
            value = torch.as_tensor(value).clone()
            wanted[f"{name}/{key}"] = value.reshape(-1) if value.shape == param.shape else value.reshape(-1).double()
    lr = optimizer.param_groups[0]["lr"]
    whole = [zc.full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(whole, 0)
    optimizer.load_state_dict(whole[0])
    again = parts(model, optimizer)
    scheduler.step()
    plain_steps(plain, its, "matrices", 3, 5)
    optimizer.param_groups[0]["lr"] = 0.0123
    job.steps(model, optimizer, 3, 5)
    ends = [dict(m.named_parameters()) for m in (model, plain.module)]
    apart = max(float((ends[0][n] - ends[1][n]).detach().abs().max()) for n in ends[0])
    return {"taken": state, "again": again, "wanted": wanted, "lr": lr, "apart": apart}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (adamw, {}),
    "Adagrad": (OPTIMIZERS["Adagrad"], {}),
    "whole parameters": (OPTIMIZERS["Adafactor"], {}),
    "in the parameters' shapes": (OPTIMIZERS["Muon"], {}),
    "offload": (adamw, {"offload": "cpu"}),
    "disk": (adamw, {"offload": "disk"}),
    "overlap_gather": (adamw, {"overlap_gather": True}),
}


def test_a_whole_state_is_taken(tmp_path: Path) -> None:
    cases = [(make, options, tmp_path if name == "disk" else None) for name, (make, options) in KINDS.items()]
    for name, (_, ranks) in zip(KINDS, run_cases(_whole, 2, cases), strict=True):
        for which in ("taken", "again"):
            states = [{k: v for k, v in rank[which].items() if "/" in k} for rank in ranks]
            assert_same(joined(states), ranks[0]["wanted"], name)
        for rank in ranks:
            assert rank["lr"] == 0.0123 and rank["apart"] < 1e-5, name


def test_one_rank_saves_what_a_plain_program_does() -> None:
    """No mark there: the state is whole, and comes and goes as it is."""
    job = Job("mlp", partial(adamw))
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 2)
    plain = CASES["mlp"].model(0)
    its = adamw(plain)
    plain_steps(plain, its, "mlp", 0, 2)
    assert optimizer.state_dict().keys() == its.state_dict().keys()
    its.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(its.state_dict())
    job.steps(model, optimizer, 2, 3)
