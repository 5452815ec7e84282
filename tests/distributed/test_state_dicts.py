"""Stage 3: ``model.state_dict()`` gives DTensors, which torch.distributed.checkpoint saves and loads on any ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from test_state_loads import net, steps
from tiers import full_cases
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_runs import environment, message_of

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01, momentum=0.9)


def compiled(stage: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = optimizer_of(model)
    zc.compile(model, optimizer, stage=stage, bucket_nbytes=64, backend="eager", **options)
    return model, optimizer


def rows(rank: int, world_size: int, replicas: int, reads_memory: str) -> list[str]:
    """Job: every value beside a plain model's after the same updates. All ranks have the same batch."""
    with environment(ZC_HOST_MEMORY=reads_memory):
        return differences(rank, world_size, replicas)


def differences(rank: int, world_size: int, replicas: int) -> list[str]:
    plain = net()
    alone = optimizer_of(plain)
    sharding = world_size // replicas
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, sharding), mesh_dim_names=names) if replicas > 1 else None
    model, optimizer = compiled(mesh=mesh)
    for one, its in ((plain, alone), (model, optimizer)):
        steps(one, its, 0)
    model(torch.ones(4, 2, 5, 7)).sum().backward()  # eager: buckets are whole, and their bytes go with the update
    states = {"": model.state_dict(), "head.": model.head.state_dict(prefix="head."), "copied": None}
    states["copied"] = copy.deepcopy(states[""])
    optimizer.zero_grad()
    wrong = []
    for where, state in states.items():
        wanted = {key: value for key, value in plain.state_dict().items() if where != "head." or where in key}
        if state.keys() != wanted.keys():
            wrong.append(f"{where}: {state.keys()}")
        for key, value in wanted.items():
            if key == "scale" or sharding == 1:
                is_right = type(state[key]) is torch.Tensor and state[key].equal(value)
            else:
                parts = value.chunk(sharding)
                own = parts[rank % sharding] if rank % sharding < len(parts) else value[:0]
                whole = state[key].full_tensor()
                off = 1e-6 if world_size == 3 else 0  # a mean over three ranks rounds
                is_right = isinstance(state[key], DTensor) and torch.allclose(whole, value, rtol=0, atol=off)
                is_right = is_right and state[key].to_local().shape == own.shape
                is_right = is_right and torch.allclose(state[key].to_local(), own, rtol=0, atol=off)
            if not is_right:
                wrong.append(f"{where}: {key}")
    zc.close(model)
    return wrong


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2)])
@full_cases("2-1", "3-1")
def test_each_rank_has_its_rows(world_size: int, replicas: int) -> None:
    for reads_memory in "10" if world_size == 2 else "1":
        assert run_ranks(rows, world_size, replicas, reads_memory) == [[]] * world_size


def saves(rank: int, world_size: int, folder: str) -> None:
    """Job: saves by PyTorch's own functions alone."""
    model, optimizer = compiled()
    steps(model, optimizer, 0)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, Path(folder) / "whole.pt")
    zc.close(model)


def loads(rank: int, world_size: int, folder: str, stage: int) -> dict[str, Any]:
    """Job: loads what `saves` wrote, trains on, and gives rank 0's whole weights at both points."""
    weights = []
    for how in ("by DCP", "whole", "by zc.load_state_dict"):
        model, optimizer = compiled(stage)
        if how == "by DCP":
            state, own = get_state_dict(model, optimizer)
            dcp.load({"model": state, "optimizer": own}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=own)
            state = copy.deepcopy(state)  # in stages 1 and 2 it is the parameters themselves
        elif how == "by zc.load_state_dict":
            zc.load_state_dict(model, optimizer, {"model": state})
        else:
            whole = torch.load(Path(folder) / "whole.pt")
            set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
            few = {name: whole[name] for name in list(whole)[:2]}  # the others stay
            set_model_state_dict(model, few, options=StateDictOptions(full_state_dict=True, strict=False))
        weights.append(zc.full_state_dict(model))
        if how == "by DCP":
            steps(model, optimizer, 2)
            weights.append(zc.full_state_dict(model))
        zc.close(model)
    return dict(enumerate(weights))


@pytest.mark.parametrize("world_size", [2, 3])
def test_pytorchs_own_functions_save_and_load_them(tmp_path: Path, world_size: int) -> None:
    plain = net()
    alone = optimizer_of(plain)
    run_ranks(saves, world_size, str(tmp_path))
    steps(plain, alone, 0)
    first = copy.deepcopy(plain.state_dict())
    steps(plain, alone, 2)
    for others, stage in ((1, 3), (2, 3), (2, 2)) if world_size == 3 else ((3, 3), (2, 1)):
        got = run_ranks(loads, others, str(tmp_path), stage)[0]
        for number, wanted in ((0, first), (1, plain.state_dict()), (2, first), (3, first)):
            # means over three ranks round: 1e-6 of weights below 1
            close = {key: torch.allclose(got[number][key], value, rtol=0, atol=1e-6) for key, value in wanted.items()}
            assert all(close.values()), (others, stage, number, close)


def asks_alone(rank: int, world_size: int, reads_memory: str) -> tuple[str, str]:
    """Job: rank 0 alone asks for a state, as before a torch.save, and the others train on."""
    with environment(ZC_HOST_MEMORY=reads_memory, ZC_RANK_TIMEOUT="3"):
        model, optimizer = compiled()
        steps(model, optimizer, 0)

        def go_on() -> None:
            if rank == 0:
                model.state_dict()
            steps(model, optimizer, 2)

        message = message_of(go_on)
        dist.barrier()
        return message


def test_one_rank_alone_gets_no_state() -> None:
    for reads_memory in "10":
        for kind, message in run_ranks(asks_alone, 2, reads_memory):
            assert kind == "RankMismatchError" and "state_dict()" in message, message
