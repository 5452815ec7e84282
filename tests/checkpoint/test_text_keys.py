"""Keys that are no text, and empty dicts: in states of parameters, in options, in extra states of modules; and extra
states that are tensors. What is saved is what is loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer

import zc
from zc.checkpoint.shards import with_own_keys, with_text_keys

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@zc.elementwise
class Alternating(Optimizer):
    """Keeps a sum of the even and one of the odd gradients, by number, and reads its options by number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"table": {0: 0.1, (5, "x"): 2.0}, "notes": {}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                sums, count = state.setdefault("sums", {}), state.get("count", 0)
                sums.setdefault(count % 2, torch.zeros_like(param)).add_(param.grad)
                state["count"], state["more"] = count + 1, {"none": {}, True: [{}]}
                param.sub_(sum(sums.values()), alpha=group["table"].get(0, 9.0))


class Noted(nn.Linear):
    """Has an extra state of any kind."""

    noted: Any = None

    def get_extra_state(self) -> Any:
        return self.noted

    def set_extra_state(self, state: Any) -> None:
        self.noted = state


def _train(model: nn.Module, optimizer: Optimizer, first: int, stop: int) -> None:
    for step in range(first, stop):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _made() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Noted(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, Alternating(model.parameters())


def _plain() -> dict[str, Tensor]:
    model, optimizer = _made()
    _train(model, optimizer, 0, 4)
    return {name: param.detach() for name, param in model.named_parameters()}


def _go_on(rank: int, world_size: int, folder: Path, stage: int, way: str) -> tuple[Any, Any, Any]:
    """Job: the weights of a run that was saved and loaded in the middle, with its table and one state."""
    for part in (0, 1):
        model, optimizer = _made()
        zc.compile(model, optimizer, backend="eager", stage=stage, bucket_nbytes=64)
        if part == 0:
            _train(model, optimizer, 0, 2)
            whole = {"model": model.state_dict(), "optimizer": zc.full_optimizer_state(model, optimizer)}
            if way == "whole" and rank == 0:
                torch.save(whole, folder)
            elif way == "by hand":
                dcp.save(zc.state_dict(model, optimizer), checkpoint_id=folder)
            elif way == "zc.save":
                zc.save(folder, model, optimizer)
    if way == "whole":
        zc.load_state_dict(model, optimizer, torch.load(folder))
    else:
        zc.load(folder, model, optimizer)
    _train(model, optimizer, 2, 4)
    states = [state for state in optimizer.state.values() if "more" in state]
    options = {key: value for key, value in optimizer.param_groups[0].items() if key in ("table", "notes")}
    with zc.whole_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, options, states[0]["more"]


@pytest.mark.parametrize(("stage", "way"), [(2, "zc.save"), (2, "by hand"), (3, "zc.save"), (2, "whole")])
def test_states_and_options_by_number_go_on(stage: int, way: str, tmp_path: Path) -> None:
    """Keys came back as text: an update then took 9 for 0.1, and began its sums anew."""
    wanted = _plain()
    for weights, options, more in run_ranks(_go_on, 2, tmp_path / "saved", stage, way):
        assert all(torch.allclose(weights[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)
        assert options == {"table": {0: 0.1, (5, "x"): 2.0}, "notes": {}}
        assert more == {"none": {}, True: [{}]} and [type(key) for key in more] == [str, bool]


NOTES: list[Any] = [
    torch.tensor([3.0]), torch.arange(3), {"a": 1, "t": torch.tensor([2])}, {0: 3, 1: 4}, {10: 1, "10": 2}, {}, None,
    [], [1, torch.tensor(2)], (1, {2: 3}), {"a": {}, "b": [], "!0": 1, "!{}": 2}, {(1, ("x", None)): 1.5}, 5,
]  # fmt: skip


def _note(rank: int, world_size: int, folder: Path) -> list[tuple[Any, Any]]:
    """Job: by kind, what `zc.load` and `zc.load_state_dict` give back."""
    seen = []
    for number, note in enumerate(NOTES):
        model, optimizer = _made()
        zc.compile(model, optimizer, backend="eager")
        model[0].noted = copy.deepcopy(note)
        zc.save(folder / str(number), model, optimizer)
        plain = {"model": copy.deepcopy(dict(model.state_dict()))}
        model[0].noted = torch.ones(7)
        zc.load(folder / str(number), model, optimizer)
        loaded, model[0].noted = model[0].noted, torch.ones(7)
        zc.load_state_dict(model, optimizer, plain)
        seen.append((loaded, model[0].noted))
        zc.close(model)
    return seen


def test_an_extra_state_is_given_back_as_it_was(tmp_path: Path) -> None:
    """A tensor never came to ``set_extra_state``; an empty dict made a checkpoint that nothing could load."""
    for seen in run_ranks(_note, 2, tmp_path):
        for note, both in zip(NOTES, seen, strict=True):
            for given in both:
                assert repr(given) == repr(note) and type(given) is type(note)


def test_a_key_that_has_no_text_is_refused(tmp_path: Path) -> None:
    model, optimizer = _made()
    zc.compile(model, optimizer, backend="eager")
    optimizer.param_groups[0]["table"][torch.float32] = 1.0
    with pytest.raises(zc.CheckpointError, match=r"option table has the key torch.float32, a dtype: zc saves keys"):
        zc.save(tmp_path / "saved", model, optimizer)
    assert not any(tmp_path.iterdir())


def test_text_and_keys_are_each_other_s_inverse() -> None:
    more = {-1.5: None, b"x": {None: ()}}
    marked = {"zc key: 0": 1, 0: 2, "zc key: {}": {"zc key: {}": None}}
    for value in ({}, {"!": {}}, {0: {False: {}, "{}": 1}}, [{"a": [{}]}], marked, more):
        text = with_text_keys("a state", value)
        assert with_own_keys(text) == value and repr(with_own_keys(text)) == repr(value)
    assert with_own_keys({"zc key: another's": 1}) == {"zc key: another's": 1}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.b.weight = self.a.weight


def test_of_a_tied_weight_s_values_the_last_one_is_loaded_as_in_pytorch() -> None:
    state = {"a.weight": torch.zeros(6, 6), "b.weight": torch.ones(6, 6), "c.weight": torch.ones(3, 6)}
    state["c.bias"] = torch.zeros(3)
    plain, model = Tied(), Tied()
    plain.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    zc.load_state_dict(model, optimizer, {"model": state})
    assert torch.equal(model.a.weight, plain.a.weight) and plain.a.weight[0, 0] == 1.0
