"""State that is not one parameter's, and tensors of which ranks have different ones: what checkpoints do with them."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from models import mlp
from oracle import weights
from stacked import Stacked, groups, squares, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from training_runs import adamw, message_of

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _compiled(**options: Any) -> tuple[nn.Module, Stacked]:
    model = squares()
    return zc.compile(model, Stacked(groups(model)), backend="eager", bucket_nbytes=2048, **options)


def _save(rank: int, world_size: int, folder: Path) -> list[float]:
    model, optimizer = _compiled()
    train(model, optimizer, 0, 3)
    zc.save(folder / "ck", model, optimizer)
    assert "was not shown to belong to single parameters" in str(zc.explain(model))
    return train(model, optimizer, 3, 6)


def _load(rank: int, world_size: int, folder: Path) -> tuple[Any, list[float]]:
    model, optimizer = _compiled()
    before = weights(model)
    refused = message_of(lambda: zc.load(folder / "ck", model, optimizer))
    if refused[0]:
        assert all(torch.equal(before[name], value) for name, value in weights(model).items()), "nothing has changed"
    return refused, train(model, optimizer, 3, 6)


def test_stacked_state_goes_on_where_the_same_parameters_are_together(tmp_path: Path) -> None:
    """Loaded on another number of ranks it was taken for its first parameter's: weights 12.6 % off, no word."""
    after = run_ranks(_save, 2, tmp_path)
    for refused, losses in run_ranks(_load, 2, tmp_path):
        assert refused == ("", "") and losses == after[0]
    for world_size in (1, 3):
        for (kind, text), _ in run_ranks(_load, world_size, tmp_path):
            assert kind == "CheckpointError" and "its Stacked state belongs to parameters together" in text, text
            assert f"rank 0 of {world_size} updates" in text and "2 rank(s) that updated (" in text


def _plain(rank: int, world_size: int) -> None:
    """The state of one process, by the ways of torch; and the parts of ranks, which are no state of one process."""
    twin = squares()
    alone = Stacked(groups(twin))
    train(twin, alone, 0, 3)
    model, optimizer = _compiled()
    whole = {"model": twin.state_dict(), "optimizer": alone.state_dict()}
    ways = [
        lambda: zc.load_state_dict(model, optimizer, whole),
        lambda: optimizer.load_state_dict(copy.deepcopy(alone.state_dict())),
    ]
    if world_size == 1:
        for way in ways:
            way()
        assert train(model, optimizer, 3, 5) == train(twin, alone, 3, 5)
        return
    options = StateDictOptions(full_state_dict=True)
    ways += [
        lambda: zc.full_optimizer_state(model, optimizer),
        lambda: get_optimizer_state_dict(model, optimizer, options=options),
    ]
    for num_updates in (0, 1):
        train(model, optimizer, 0, num_updates)
        before = weights(model)
        for way in ways:
            kind, text = message_of(way)
            assert kind == "CheckpointError" and "Stacked" in text, (kind, text)
        assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    state = {"model": whole["model"]}
    zc.load_state_dict(model, optimizer, state)  # the way that the error names
    assert all(torch.equal(twin.state_dict()[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_stacked_state_of_one_process(world_size: int) -> None:
    run_ranks(_plain, world_size)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x) * 2))


def _buffers(rank: int, world_size: int, folder: Path, broadcast: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Normed()
    model, optimizer = zc.compile(model, adamw(model), backend="eager", broadcast_buffers=broadcast)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)) * (rank + 1)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.frozen.data.fill_(rank)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    zc.save(folder / "zc", model, optimizer, asynchronous=True).wait()
    dcp.save(zc.state_dict(model, optimizer), checkpoint_id=folder / "dcp")
    loaded = {}
    for name in ("zc", "dcp"):
        fresh = Normed()
        fresh, its = zc.compile(fresh, adamw(fresh), backend="eager", broadcast_buffers=broadcast)
        if name == "zc":
            zc.load(folder / "zc", fresh, its)
        else:
            fresh(x).mean().backward()
            its.step()  # so that there is state to be filled
            its.zero_grad()
            state = zc.state_dict(fresh, its)
            dcp.load(state, checkpoint_id=folder / "dcp")
            zc.load_state_dict(fresh, its, state)
        loaded[name] = {key: value.clone() for key, value in fresh.state_dict().items()}
    return {"own": own, **loaded}


@pytest.mark.parametrize("broadcast", [False, True])
def test_what_is_not_trained_is_rank_0_s(broadcast: bool, tmp_path: Path) -> None:
    """DCP takes them for copies and spreads the writes: running_mean was rank 1's and running_var rank 2's."""
    seen = run_ranks(_buffers, 3, tmp_path, broadcast)
    wanted = seen[0]["own"]
    name = "frozen" if broadcast else "first.running_mean"
    assert not torch.equal(seen[1]["own"][name], wanted[name]), "ranks differ"
    for rank in seen:
        for way in ("zc", "dcp"):
            assert wanted.keys() == rank[way].keys()
            for name, value in wanted.items():
                assert torch.equal(rank[way][name], value), (way, name)


def _another_ranks_part(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = mlp()
    model, optimizer = zc.compile(model, adamw(model), backend="eager")
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    lacking = [name for name in names if name not in state["state"]]
    assert lacking, "some parameter is another rank's alone"
    kind, text = message_of(lambda: state["state"][lacking[0]]["exp_avg"])
    assert kind == "KeyError" and f"rank {rank} has no state of {lacking[0]}" in text and "full_state_dict=True" in text

    file = io.BytesIO()
    torch.save(state, file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    state = torch.load(io.BytesIO(box[0]), weights_only=False)
    kind, text = message_of(lambda: set_optimizer_state_dict(model, optimizer, state))
    assert kind == "CheckpointError" and "another rank's part" in text and "full_state_dict=True" in text, text


def test_another_rank_s_part_is_named() -> None:
    """A bare KeyError; and rank 0's parts, saved by torch.save and loaded everywhere, dropped the others' state."""
    run_ranks(_another_ranks_part, 2)
