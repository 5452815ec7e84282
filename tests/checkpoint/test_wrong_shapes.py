"""An optimizer state of another shape than torch's class keeps is refused by name, on all ranks and before anything has
changed: also where one rank alone would update the parameter, and the others would wait for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.optim import Optimizer
from training_runs import message_of

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAMES = ("0.weight", "2.weight", "4.weight")
CASES: list[tuple[str, str, Any, str]] = [  # class, state of 2.weight (6, 5), what is wrong with it, what is kept
    ("Muon", "momentum_buffer", lambda value: value.T, "Muon keeps (6, 5)"),
    ("Muon", "momentum_buffer", lambda value: value.sum(), "Muon keeps (6, 5)"),
    ("Adafactor", "row_var", lambda value: value.repeat(1, 5), "Adafactor keeps (6, 1)"),
    ("AdamW", "exp_avg", lambda value: value[:1, :1], "AdamW keeps (6, 5)"),
]


def _model() -> nn.Module:
    torch.manual_seed(0)
    widths = zip((8, 5, 6), (5, 6, 2), strict=True)
    linears = [nn.Linear(num_in, num_out, bias=False) for num_in, num_out in widths]
    return nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2])


def _train(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _by_name(state: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "params": list(NAMES)} for group in state["param_groups"]]
    return {"state": {NAMES[number]: items for number, items in state["state"].items()}, "param_groups": groups}


def _parts(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = zc.state_dict(model, optimizer)
    items = [item for each in state["optimizer"]["state"].values() for item in each.values()]
    parts = [getattr(item, "local", item) for item in (*state["model"].values(), *items)]
    return [part.detach().clone() for part in parts if isinstance(part, Tensor)]


def _load(rank: int, world_size: int, folder: Path, name: str, key: str, spoil: int) -> list[tuple[str, str, bool]]:
    """What each way to load says, and whether all is as before; then that the right state loads and trains on."""
    make = getattr(torch.optim, name)
    plain = _model()
    first = make(plain.parameters(), lr=0.01)
    _train(plain, first, 0)
    good = copy.deepcopy({"model": plain.state_dict(), "optimizer": first.state_dict()})
    bad = copy.deepcopy(good)
    items = bad["optimizer"]["state"][1]
    items[key] = CASES[spoil][2](items[key]).clone()
    for kind, whole in (("good", good), ("bad", bad)):
        dcp.save({"model": whole["model"], "optimizer": _by_name(whole["optimizer"])}, checkpoint_id=folder / kind)

    model = _model()
    optimizer = make(model.parameters(), lr=0.01)
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
    _train(model, optimizer, 5)
    options = StateDictOptions(full_state_dict=True)
    before, results = _parts(model, optimizer), []
    for way in (
        lambda: zc.load_state_dict(model, optimizer, bad),
        lambda: optimizer.load_state_dict(bad["optimizer"]),
        lambda: set_optimizer_state_dict(model, optimizer, _by_name(bad["optimizer"]), options=options),
        lambda: zc.load(folder / "bad", model, optimizer),
    ):
        said = message_of(way)
        after = _parts(model, optimizer)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        results.append((*said, same))
    zc.load(folder / "good", model, optimizer)
    _train(model, optimizer, 1)
    _train(plain, first, 1)
    for weight, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted)
    return results


@pytest.mark.parametrize("case", range(len(CASES)))
def test_it_is_refused_on_all_ranks(case: int, tmp_path: Path) -> None:
    name, key, _, kept = CASES[case]
    for rank in run_ranks(_load, 2, tmp_path, name, key, case):
        for kind, text, same in rank:
            assert kind == "CheckpointError", text
            assert f"optimizer state {key} of 2.weight has shape (" in text and kept in text, text
            assert "by zc.load_state_dict without the key 'optimizer'" in text and same, text
