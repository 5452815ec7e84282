"""Optimizer state of frozen parameters, in lists and dicts, and under strings: saved, and loaded where a run goes on as
plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Adagrad, AdamW, Optimizer
from training_runs import message_of

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _train(model: nn.Module, optimizer: Optimizer, first: int, stop: int) -> None:
    for step in range(first, stop):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@zc.elementwise
class Recent(Optimizer):
    """Steps along the last gradients, which it keeps in a list or another ``container``, with their average in a
    dict."""

    def __init__(self, params: Any, container: Any = list) -> None:
        super().__init__(params, {"lr": 0.1})
        self.container = container

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                last = state.setdefault("last", self.container())
                if isinstance(last, tuple):
                    last = state["last"] = (*last[-1:], param.grad.clone())
                else:
                    last.append(param.grad.clone())
                    while len(last) > 2:
                        del last[0]
                average = state.setdefault("average", {"of": torch.zeros_like(param), "step": torch.zeros(())})
                average["of"].add_(param.grad)
                average["step"].add_(1)
                param.sub_(sum(last) + average["of"] / average["step"], alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "recent": Recent,
    "adagrad": lambda params: Adagrad(params, lr=0.1),  # its __init__ makes states, of frozen parameters, too
    "adamw": lambda params: AdamW(params, lr=0.01),
}
WAYS = ("zc.save", "zc.load_state_dict", "optimizer.load_state_dict")


def _first_run(model: nn.Module, optimizer: Optimizer, when: str) -> None:
    """Two updates, with model[2] frozen at the start, or after the first one, or not at all."""
    if when == "at the start":
        model[2].requires_grad_(False)
    _train(model, optimizer, 0, 1)
    if when == "later":
        model[2].requires_grad_(False)
    _train(model, optimizer, 1, 2)


def _second_run(model: nn.Module, optimizer: Optimizer, thaw: Callable[[], None]) -> dict[str, Tensor]:
    _train(model, optimizer, 2, 3)
    model[2].requires_grad_(True)
    thaw()
    _train(model, optimizer, 3, 5)
    return _weights(model)


def _plain(name: str, when: str, then: str) -> dict[str, Tensor]:
    model = _model()
    optimizer = OPTIMIZERS[name](model.parameters())
    _first_run(model, optimizer, when)
    model[2].requires_grad_(then == "not at all")
    return _second_run(model, optimizer, lambda: None)


def _save(rank: int, world_size: int, folder: Path, cases: list[tuple[str, str, str]]) -> None:
    for name, when, _ in cases:
        model = _model()
        optimizer = OPTIMIZERS[name](model.parameters())
        if when == "at the start":
            model[2].requires_grad_(False)
        zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
        _first_run(model, optimizer, when)
        zc.save(folder / f"{name} {when}", model, optimizer, overwrite=True)
        whole = {"model": model.state_dict(), "optimizer": zc.full_optimizer_state(model, optimizer)}
        if rank == 0:
            torch.save(whole, folder / f"{name} {when}.pt")


def _load(
    rank: int, world_size: int, folder: Path, cases: list[tuple[str, str, str]], ways: tuple[str, ...]
) -> list[dict[str, Tensor]]:
    weights = []
    for name, when, then in cases:
        for way in ways:
            model = _model()
            model[2].requires_grad_(then == "not at all")
            optimizer = OPTIMIZERS[name](model.parameters())
            zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
            path = folder / f"{name} {when}"
            if way == "zc.save":
                zc.load(path, model, optimizer)
            else:
                whole = torch.load(f"{path}.pt", weights_only=True)
                if way == "zc.load_state_dict":
                    zc.load_state_dict(model, optimizer, whole)
                else:
                    model.load_state_dict(whole["model"])
                    optimizer.load_state_dict(whole["optimizer"])
            weights.append(_second_run(model, optimizer, lambda model=model: zc.recompile(model)))  # type: ignore[misc]
    return weights


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_is_frozen_on_one_side_only(world_size: int, tmp_path: Path) -> None:
    """What was trained, frozen and saved loads where it is frozen from the start, and the other way round. Once it
    trains again it goes on with its state."""
    ways = (("later", "at the start"), ("at the start", "not at all"))
    cases = [(name, *both) for name in OPTIMIZERS for both in ways]
    run_ranks(_save, 2, tmp_path, cases)
    for weights in run_ranks(_load, world_size, tmp_path, cases, WAYS):
        wanted = [_plain(*case) for case in cases for _ in WAYS]
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


def _with_two() -> tuple[nn.Module, list[Optimizer]]:
    model = _model()
    model[0].requires_grad_(False)
    params = [[*model[0].parameters(), *model[k].parameters()] for k in (2, 4)]
    optimizers = [Adagrad(of_one, lr=0.1, initial_accumulator_value=float(k)) for k, of_one in enumerate(params)]
    zc.compile(model, optimizers, backend="eager")
    return model, optimizers


@pytest.mark.parametrize("way", ["zc.save", "zc.state_dict", "zc.full_optimizer_state"])
def test_two_optimizers_have_states_of_one_frozen_parameter(way: str, tmp_path: Path) -> None:
    """Both got the second one's."""
    (model, optimizers), (other, others) = _with_two(), _with_two()
    for of_other in (one.state[other[0].weight]["sum"] for one in others):
        of_other.fill_(7.0)
    if way == "zc.save":
        zc.save(tmp_path / "ck", model, optimizers)
        zc.load(tmp_path / "ck", other, others)
    else:
        state = zc.state_dict(model, optimizers)
        whole = state if way == "zc.state_dict" else {**state, "optimizer": zc.full_optimizer_state(model, optimizers)}
        zc.load_state_dict(other, others, whole)
    assert [float(one.state[other[0].weight]["sum"].mean()) for one in others] == [0.0, 1.0]


class Counting(Optimizer):
    """SGD whose rate falls with a count of its own, under a string; ``stacks``: with one momentum for a group there. It
    grows with an attribute, which `state_dict` has (StableSPAM's total_step)."""

    def __init__(self, params: Any, stacks: bool = False, key: Any = "clock") -> None:
        super().__init__(params, {"lr": 0.1})
        self.stacks, self.key, self.ticks = stacks, key, 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clock": {"ticks": self.ticks}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.ticks = state_dict.get("clock", {"ticks": 0})["ticks"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        clock = self.state[self.key]
        clock["count"] = clock.get("count", 0) + 1
        self.ticks += 1
        clock.setdefault("decay", [torch.ones(2)])[0].mul_(0.5)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad.flatten() for p in params]
            if self.stacks and params:
                total = clock["momentum"] = clock.get("momentum", 0) * 0.9 + torch.cat(grads)
                grads = list(total.split([p.numel() for p in params]))
            for p, grad in zip(params, grads, strict=True):
                rate = group["lr"] * self.ticks**0.5 / clock["count"]
                p.sub_(grad.view(p.shape), alpha=rate * float(clock["decay"][0][1] + 1))


def _count(rank: int, world_size: int, folder: Path, stacks: bool, ways: tuple[str, ...]) -> list[Any]:
    """Job: saves in two ranks, or loads."""
    results: list[Any] = []
    for way in ways or ("",):
        model = _model()
        optimizer = Counting(model.parameters(), stacks)
        zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "of a hook": 7})
        loaded: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(lambda _, state, to=loaded: to.append(state.get("of a hook")))  # type: ignore[misc]
        if not ways:
            _train(model, optimizer, 0, 2)
            zc.save(folder / "ck", model, optimizer)
            state = None if stacks else zc.full_optimizer_state(model, optimizer)
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": state}, folder / "whole.pt")
            return [_weights(model)]
        whole = torch.load(folder / "whole.pt", weights_only=True)
        load = {
            "zc.save": lambda: zc.load(folder / "ck", model, optimizer),  # noqa: B023
            "zc.load_state_dict": lambda: zc.load_state_dict(model, optimizer, whole),  # noqa: B023
            "optimizer.load_state_dict": lambda: optimizer.load_state_dict(copy.deepcopy(whole["optimizer"])),  # noqa: B023
        }[way]
        if way == "optimizer.load_state_dict":
            model.load_state_dict(whole["model"])
        refused = message_of(load)
        if not refused[0]:
            assert loaded[-1] == 7
            _train(model, optimizer, 2, 4)
        results.append(refused[1] or _weights(model))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_under_a_string_goes_on(world_size: int, tmp_path: Path) -> None:
    run_ranks(_count, 2, tmp_path, False, ())
    model = _model()
    _train(model, Counting(model.parameters()), 0, 4)
    for results in run_ranks(_count, world_size, tmp_path, False, WAYS):
        torch.testing.assert_close(results, [_weights(model)] * len(WAYS), rtol=1e-5, atol=1e-6)


def test_state_under_a_string_that_is_of_several_parameters(tmp_path: Path) -> None:
    """Each rank has its own again on as many ranks; elsewhere it is refused."""
    run_ranks(_count, 2, tmp_path, True, ())
    model = _model()
    _train(model, Counting(model.parameters(), stacks=True), 0, 4)
    for results in run_ranks(_count, 2, tmp_path, True, ("zc.save",)):
        torch.testing.assert_close(results, [_weights(model)], rtol=1e-5, atol=1e-6)
    for (text,) in run_ranks(_count, 1, tmp_path, True, ("zc.save",)):
        assert "its Counting state belongs to parameters together" in text, text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda state: state[(3, "a")].update(x=1), "under (3, 'a')"),
        (lambda state: state[torch.zeros(3)].update(x=1), "under a tensor (3,) that is in no group"),
        (lambda state: state["clock"].update({torch.int8: 1}), "under strings has the key torch.int8, a dtype"),
    ],
)
def test_state_that_has_no_name_is_refused(make: Callable[[Any], None], words: str, tmp_path: Path) -> None:
    model = _model()
    optimizer = Counting(model.parameters())
    zc.compile(model, optimizer, backend="eager")
    _train(model, optimizer, 0, 1)
    make(optimizer.state)
    with pytest.raises(zc.CheckpointError) as caught:
        zc.save(tmp_path / "ck", model, optimizer)
    assert words in str(caught.value)


def _hide(rank: int, world_size: int, folder: Path, container: Any) -> list[tuple[str, str]]:
    plain = _model()
    first = Recent(plain.parameters(), container)
    _train(plain, first, 0, 2)
    whole = {"model": plain.state_dict(), "optimizer": first.state_dict()}
    if rank == 0:
        numbered = whole["optimizer"]
        names = [name for name, _ in plain.named_parameters()]
        groups = [{**group, "params": names} for group in numbered["param_groups"]]
        states = {names[number]: items for number, items in numbered["state"].items()}
        tree = {"model": whole["model"], "optimizer": {"state": states, "param_groups": groups}}
        dcp.save(tree, checkpoint_id=folder / "theirs", no_dist=True)
    dist.barrier()
    model = _model()
    optimizer = Recent(model.parameters(), container)
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
    _train(model, optimizer, 0, 1)
    weights = _weights(model)
    refused = [
        message_of(lambda: zc.save(folder / "ours", model, optimizer)),
        message_of(lambda: zc.full_optimizer_state(model, optimizer)),
        message_of(lambda: zc.load_state_dict(model, optimizer, whole)),
        message_of(lambda: optimizer.load_state_dict(whole["optimizer"])),
        message_of(lambda: zc.load(folder / "theirs", model, optimizer)),
    ]
    assert all(torch.equal(weight, weights[name]) for name, weight in _weights(model).items())
    return refused


def test_a_tuple_of_tensors_is_refused_where_it_would_be_cut(tmp_path: Path) -> None:
    """DCP looks into lists and dicts alone."""
    for texts in run_ranks(_hide, 2, tmp_path, tuple):
        for kind, text in texts:
            assert kind == "CheckpointError" and "state last of " in text and "is a tuple of tensors" in text, text


def _hide_on_one(rank: int, world_size: int, hides: int) -> list[tuple[str, str]]:
    model = _model()
    optimizer = Recent(model.parameters())
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
    _train(model, optimizer, 0, 1)
    if rank == hides:
        for param in model.parameters():
            optimizer.state[param]["pair"] = (torch.ones(1), torch.ones(1))
    return [
        message_of(lambda: zc.full_optimizer_state(model, optimizer)),
        message_of(lambda: get_optimizer_state_dict(model, optimizer)),
        message_of(lambda: zc.full_optimizer_state(model, optimizer)),  # no rank waits in the one before
    ]


@pytest.mark.parametrize("hides", [0, 1])
def test_a_state_that_one_rank_refuses_is_refused_by_all(hides: int) -> None:
    """The others waited in the gather for its parts."""
    for texts in run_ranks(_hide_on_one, 2, hides, timeout=30.0):
        for kind, text in texts:
            assert kind == "CheckpointError" and "state pair of " in text and "is a tuple of tensors" in text, text


def _look(rank: int, world_size: int) -> tuple[list[int], int]:
    """Elements that this rank shows in the list of each parameter's state, and bytes of all states."""
    model = _model()
    optimizer = Recent(model.parameters())
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=64)
    _train(model, optimizer, 0, 2)
    numels = [optimizer.state[param]["last"][0].numel() for param in model.parameters()]
    return numels, zc.persistent_nbytes(model)["optimizer_state"]


def test_tensors_in_lists_are_shown_and_counted_by_the_rank_that_has_them() -> None:
    """A rank that owns nothing of a parameter showed the list of another one."""
    numels = [param.numel() for param in _model().parameters()]
    ranks = run_ranks(_look, 2)
    assert [sum(both) for both in zip(*(shown for shown, _ in ranks), strict=True)] == numels
    assert sum(nbytes for _, nbytes in ranks) == 4 * 3 * sum(numels)  # two in the list, and the average
