"""overlap_gather: step() returns with the gathers launched, and nothing but time changes.

The comm thread sleeps before each gather (late_gathers.py), so it is always late; what reads without waiting reads the
weights of before the update (Megatron-LM #950), which the control shows.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from late_gathers import Late, late_gathers
from models import mean_square, mlp, vectors
from torch import nn
from training_runs import adamw

import zc
from zc.engine.overlap_gather import WeightGather
from zc.ranks.comm import Group
from zc.schedule.buffer import HOME

DIM, DEPTH, BUCKET = 32, 4, 5000  # one bucket a layer
LATE = 0.02  # seconds before each bucket's gather
VERY_LATE = 0.07  # where a single read has to come before the last one


class Careless(Late):
    """The home stream does not wait for gathers."""

    def wait(self, event: str, stream: str) -> None:
        if not (stream == HOME and event.startswith("done/gathered")):
            super().wait(event, stream)


Weights = dict[str, torch.Tensor]


def _train(
    rank: int,
    streams: type[Late],
    look: Callable[[nn.Module], None] | None = None,
    num_steps: int = 4,
    late: float = LATE,
    **options: Any,
) -> tuple[Weights, str]:
    """Weights after ``num_steps`` updates, and the explanation. ``look`` is called right after each update."""
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, DEPTH)
    batch = vectors(DIM, 8)
    with late_gathers(late if options.get("overlap_gather") else 0.0, streams):
        model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, **options)
        for step in range(num_steps):
            mean_square(model, batch(rank, step, 0)).backward()
            optimizer.step()
            if look is not None:
                look(model)
            optimizer.zero_grad()
    explanation = str(zc.explain(model))
    return {name: t.clone() for name, t in model.state_dict().items()}, explanation


def _with_and_without(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, bool, str]:
    expected, _ = _train(rank, Late, **options)
    found, explanation = _train(rank, Late, overlap_gather=True, **options)
    careless, _ = _train(rank, Careless, overlap_gather=True, **options)
    same = [all(torch.equal(expected[k], w[k]) for k in expected) for w in (found, careless)]
    return same[0], same[1], explanation


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("stage", [1, 2])
def test_bitwise_the_same_weights(stage: int, backend: str) -> None:
    if backend == "inductor" and stage == 1:
        pytest.skip("the forward does not know the stage; aot_eager has both")
    found = run_ranks(_with_and_without, 2, {"stage": stage, "backend": backend}, timeout=240)
    for same, careless, explanation in found:
        assert same, "every late gather is waited for"
        assert not careless, "the control: without the waits the delay shows"
        if backend != "eager":
            forward = explanation.split("== schedule forward_0 ==")[1].split("==")[0]
            assert forward.count("wait_event(done/gathered[") == DEPTH, "a wait a bucket"
            assert forward.count("segment(") == DEPTH, "cut where a bucket is first read"
            assert "races 0, redundant 0" in forward


def _last(model: nn.Module) -> nn.Parameter:
    """Of the layer that is gathered last."""
    return list(model.parameters())[-2]


def _averaged(model: nn.Module) -> list[torch.Tensor]:
    averages = [torch.zeros(p.shape) for p in model.parameters()]
    torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
    return [average.detach() for average in averages]


def _saved(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(_last(model), file)
    file.seek(0)
    found = torch.load(file)
    assert type(found) is nn.Parameter
    return found.detach()


def _copied(model: nn.Module) -> torch.Tensor:
    found = copy.deepcopy(_last(model))
    assert type(found) is nn.Parameter
    return found.detach()


def _clamped(model: nn.Module) -> None:
    with torch.no_grad():
        for p in reversed(list(model.parameters())):
            p.clamp_(-0.1, 0.1)


RAW: dict[str, Callable[[nn.Module], Any]] = {
    "a norm": lambda model: _last(model).norm().detach(),
    "p.data": lambda model: _last(model).data.clone(),
    "an average of the weights": _averaged,
    "numpy": lambda model: torch.from_numpy(_last(model).detach().numpy().copy()),
    "single elements": lambda model: [_last(model)[0, 0].item(), _last(model)[-1, -1].item()],  # one a rank
    "deepcopy": _copied,
    "torch.save": _saved,
    "repr": lambda model: torch.tensor(list(repr(_last(model)).encode())),
    "another of its class": lambda model: type(_last(model))(_last(model).data.clone()).detach(),
    "functional": lambda model: nn.functional.linear(torch.ones(1, DIM), _last(model)).detach(),
    "storage": lambda model: _last(model).untyped_storage().clone().tolist(),
    "clamp": _clamped,
}


def _raw(rank: int, world_size: int, is_watched: bool) -> dict[str, bool]:
    """By kind: whether a read right after step(), one kind a step, is the same as without overlap_gather."""
    seen: list[list[Any]] = [[], []]
    watch = WeightGather.watch
    if not is_watched:
        WeightGather.watch = lambda self: None  # type: ignore[method-assign]
    try:
        for into, overlap_gather in zip(seen, (False, True), strict=True):
            kinds = iter(RAW.values())

            def look(model: nn.Module, into: list[Any] = into, kinds: Any = kinds) -> None:
                into.append(next(kinds)(model))

            options = {"backend": "aot_eager", "overlap_gather": overlap_gather}
            late = LATE if is_watched else VERY_LATE
            weights, _ = _train(rank, Late, look, num_steps=len(RAW), late=late, **options)
            into[-1] = list(weights.values())  # a clamp shows in what the run ends with
    finally:
        WeightGather.watch = watch  # type: ignore[method-assign]
    return {kind: _is_same(*pair) for kind, *pair in zip(RAW, *seen, strict=True)}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(map(_is_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_raw_reads_wait() -> None:
    """Between step() and the next forward, without zc.synchronize."""
    for same in run_ranks(_raw, 2, True):
        assert all(same.values()), same


def test_raw_reads_would_see_old_weights() -> None:
    """The control. (A clamp comes before the late gather takes this rank's shard, on every rank: no number differs.)"""
    for same in run_ranks(_raw, 2, False):
        assert [kind for kind, is_same in same.items() if is_same] == ["clamp"], same


def _asks_for_no_value(rank: int, world_size: int) -> None:
    seen = []

    def look(model: nn.Module) -> None:
        for p in model.parameters():
            assert isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf and p.grad_fn is None
            assert p.shape == p.size() and p.numel() and p.dim() == p.ndim and p.dtype is torch.float32
            assert p.device.type == "cpu" and p.stride() and p.is_contiguous() and len(p) and p.element_size() == 4
            assert p.nbytes == 4 * p.numel() and {p: 1}[p] and torch.is_tensor(p) and p.is_floating_point()
            p.grad = None
        weights = zc.registry.sharded(model).runtime.weights
        seen.append(weights._is_open and type(_last(model)) is not nn.Parameter)
        assert _last(model).sum().item() and not weights._is_open
        assert all(type(p) is nn.Parameter for p in model.parameters())

    _, explanation = _train(rank, Late, look, backend="aot_eager", overlap_gather=True)
    assert seen == [True] * 4, "the gathers went on meanwhile"
    assert "schedule forward_0" in explanation and "schedule forward_1" not in explanation, "compiled once"


def test_what_asks_for_no_value_does_not_wait() -> None:
    run_ranks(_asks_for_no_value, 2)


ALIASES: dict[str, Callable[[nn.Parameter], Any]] = {
    "p.data": lambda p: p.data,
    "a detached part": lambda p: p.detach()[3:, :2],
    "a view in a graph": lambda p: p.view(-1),
    "numpy": lambda p: p.detach().numpy(),
    "rows": lambda p: list(p.data),
}


class Keeper:
    """After each odd update keeps an alias of the last weights, one kind after the other; after the even ones, looks at
    what it has kept, and lets go of it. ``waited``: whether step() had, each time."""

    def __init__(self) -> None:
        self.kinds, self.kept = iter(ALIASES.values()), []
        self.seen: list[torch.Tensor] = []
        self.waited: list[bool] = []

    def __call__(self, model: nn.Module) -> None:
        self.waited.append(not zc.registry.sharded(model).runtime.weights._is_open)
        if not self.kept:
            self.kept.append(next(self.kinds)(_last(model)))
            return
        (alias,) = self.kept
        rows = alias if isinstance(alias, list) else [torch.as_tensor(alias).detach()]
        self.seen.append(torch.cat([row.reshape(-1) for row in rows]))  # a copy
        self.kept.clear()


def _aliases(rank: int, world_size: int, is_counted: bool) -> tuple[dict[str, bool], list[bool], str]:
    """By kind: whether what was kept from before an update shows it right after step(), as without overlap_gather; and
    when step() waited."""
    count, plain, keeper = zc.torch_private.num_sharing, Keeper(), Keeper()
    options: dict[str, Any] = {"backend": "aot_eager", "num_steps": 2 * len(ALIASES)}
    _train(rank, Late, plain, **options)
    if not is_counted:
        zc.torch_private.num_sharing = lambda tensor: 0
    try:
        late = LATE if is_counted else VERY_LATE
        _, explanation = _train(rank, Late, keeper, overlap_gather=True, late=late, **options)
    finally:
        zc.torch_private.num_sharing = count
    same = {kind: torch.equal(*pair) for kind, *pair in zip(ALIASES, plain.seen, keeper.seen, strict=True)}
    return same, keeper.waited, explanation


@pytest.mark.filterwarnings("ignore:zc")
def test_step_waits_while_an_alias_of_weights_is_kept() -> None:
    for same, waited, explanation in run_ranks(_aliases, 2, True):
        assert all(same.values()), same
        assert waited == [False, True] * len(ALIASES), "while it is kept, and no longer"
        assert "holds the memory of 6.weight (a view" in explanation


def test_an_alias_would_show_old_weights() -> None:
    """The control."""
    for same, waited, explanation in run_ranks(_aliases, 2, False):
        assert not any(same.values()) and not any(waited), (same, waited)
        assert "holds the memory" not in explanation


def _in_flight(rank: int, world_size: int) -> tuple[list[bool], str]:
    """Gathers that hold their views when the step ends, and when it looks for others."""
    gather, watch, waited = Group.all_gather, WeightGather.watch, []

    def slow_gather(self: Group, out: torch.Tensor, *args: Any) -> Any:
        rows = list(out.view(world_size, -1))
        time.sleep(LATE)
        del rows
        return gather(self, out, *args)

    def late_watch(self: WeightGather) -> None:
        time.sleep(LATE / 2)
        watch(self)

    def look(model: nn.Module) -> None:
        waited.append(not zc.registry.sharded(model).runtime.weights._is_open)

    try:
        Group.all_gather, WeightGather.watch = slow_gather, late_watch  # type: ignore[method-assign]
        _, explanation = _train(rank, Late, look, late=0.0, backend="aot_eager", overlap_gather=True)
    finally:
        Group.all_gather, WeightGather.watch = gather, watch  # type: ignore[method-assign]
    return waited, explanation


def test_views_of_the_gathers_themselves_are_no_aliases() -> None:
    for waited, explanation in run_ranks(_in_flight, 2):
        assert not any(waited) and "holds the memory" not in explanation


class Named(nn.Parameter):
    """A user's own class, which can't be exchanged for another."""


def _own_class(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, 2)
    _last(model).__class__ = Named
    model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, backend="aot_eager", overlap_gather=True)
    mean_square(model, vectors(DIM, 8)(rank, 0, 0)).backward()
    optimizer.step()
    assert type(_last(model)) is Named
    assert not zc.registry.sharded(model).runtime.weights._is_open, "step() has waited"
    return str(zc.explain(model))


@pytest.mark.filterwarnings("ignore:zc")
def test_a_parameter_that_cannot_be_watched_is_waited_for() -> None:
    for text in run_ranks(_own_class, 2):
        assert "overlap_gather: parameters of class Named can't be watched: step() waits for the weights" in text
