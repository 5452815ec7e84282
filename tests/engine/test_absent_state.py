"""Stage 3: state that leaves or enters through PyTorch's own doors is whole, or the error names the way out."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import zc

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def compiled(net: nn.Module | None = None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=3, backend="eager")
    return net, optimizer


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_outside_of_whole_parameters_each_door_names_the_way_out(tmp_path: Path) -> None:
    net, _ = compiled()
    doors: dict[str, Any] = {
        "torch.save": lambda: saved(net),
        "torch.save of a part": lambda: saved(net[1]),
        "copy.deepcopy": lambda: copy.deepcopy(net),
        "copy.copy": lambda: copy.copy(net),
        "a write by hand": lambda: net[0].weight.copy_(torch.ones(8, 8)),
        "safetensors": lambda: save_model(net, str(tmp_path / "model.safetensors")),
    }
    for name, door in doors.items():
        with pytest.raises(zc.ZcError, match=r"zc\.whole_parameters"):
            pytest.fail(f"{name} gave {door()}")
    zc.close(net)


def test_what_reads_no_element_works_without_bytes() -> None:
    net, _ = compiled()
    weight = net[0].weight
    assert sum(p.data.nelement() for p in net.parameters()) == 72 + 16 + 36
    assert weight.data.shape == (8, 8) and torch.zeros(2).double().to(weight).dtype == torch.float32
    assert torch.zeros_like(weight).equal(torch.zeros(8, 8)) and weight.new_ones(3).equal(torch.ones(3))
    assert type(type(weight)(torch.ones(2))) is nn.Parameter
    assert repr(weight) == f"{weight}" == "Parameter of shape (8, 8), torch.float32, cpu, without bytes (zc, stage=3)"
    assert repr(weight.data) == "view of shape (8, 8) of a parameter without bytes (zc, stage=3)"
    of_data: dict[str, Any] = {
        "a write": lambda: weight.data.add_(1),
        "a copy": lambda: weight.data.clone(),
        "a copy into another": lambda: torch.zeros(8, 8).copy_(weight.data),
        "numpy": weight.data.numpy,
        "torch.save": lambda: saved(weight.data),
        "copy.deepcopy": lambda: copy.deepcopy(weight.data),
        "data of data": lambda: weight.data.data.sum(),
        "a parameter of it": lambda: nn.Parameter(weight.data),
    }
    for name, read in of_data.items():
        with pytest.raises(zc.ZcError, match=r"reads a view of a parameter that has no bytes.*zc\.whole_parameters"):
            pytest.fail(f"{name} gave {read()}")
    zc.close(net)
    assert "requires_grad=True" in repr(net[0].weight)


def test_inside_of_whole_parameters_they_work(tmp_path: Path) -> None:
    net, _ = compiled()
    state = zc.full_state_dict(net)
    with zc.whole_parameters(net):
        wanted = net.eval()(X)
        with pytest.warns(UserWarning, match="is a plain module now"):
            loaded = torch.load(saved(net), weights_only=False)
        save_model(net, str(tmp_path / "model.safetensors"))
        copies = [loaded, copy.deepcopy(net)]
        assert all(value.equal(state[key]) for key, value in net.state_dict().items())
        net.load_state_dict({key: value + 1 for key, value in state.items()})
    assert all(value.equal(state[key]) for key, value in load_file(tmp_path / "model.safetensors").items())
    for model in copies:
        assert torch.equal(model.eval()(X), wanted)
        assert not model.state_dict().keys() ^ state.keys()
        saved(model)
    assert zc.full_state_dict(net)["0.weight"].equal(state["0.weight"] + 1)
    zc.close(net)
    assert net.state_dict()["0.weight"].equal(state["0.weight"] + 1)
    assert "__getstate__" not in vars(net)


def test_many_forwards_without_gradients_name_the_faster_way() -> None:
    net, _ = compiled()
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(80):
            net(X)
    assert sum("such as those of generate()" in str(each.message) for each in said) == 1
    zc.close(net)


class Raising(nn.Linear):
    """A child whose loading raises."""

    def _load_from_state_dict(self, *args: Any) -> None:
        raise ValueError("of the program")


def test_a_load_that_raises_is_over() -> None:
    """Later writes by hand reach no shard unseen: they are refused, as before it."""
    for last, load in ((nn.Linear(8, 4), {"assign": True}), (Raising(8, 4), {})):
        net, _ = compiled(nn.Sequential(nn.Tanh(), nn.Linear(8, 8), last))
        before = zc.full_state_dict(net)
        state = OrderedDict((key, value.clone()) for key, value in before.items())
        with pytest.raises((zc.ZcError, ValueError), match=r"leave assign out|of the program"):
            net.load_state_dict(state, **load)
        with pytest.raises(zc.ZcError, match=r"zc\.whole_parameters"), torch.no_grad():
            net[1].weight.copy_(torch.ones(8, 8))
        net(X)
        assert all(value.equal(before[key]) for key, value in zc.full_state_dict(net).items())
        zc.close(net)


def test_a_load_between_forward_and_backward_is_a_write_in_place() -> None:
    net, _ = compiled(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    state = {key: 2 * value for key, value in zc.full_state_dict(net).items()}
    loss = net(X).sum()
    net.load_state_dict(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
