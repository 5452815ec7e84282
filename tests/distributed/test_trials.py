"""What zc tries of an optimizer that it does not know, and what it makes of the answers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import stacked
import torch
from harness import run_cases, run_ranks
from oracle import weights, worst
from stacked import Reducing, Stacked, groups, squares, train
from test_elementwise import Lion, Noisy, Wrapper
from test_whole_parameters import AuxMuon
from torch import Tensor, nn
from torch.optim import Optimizer
from training_runs import message_of

import zc
from zc.optim.assignment import try_out
from zc.optim.local import class_of, second_object
from zc.optim.trials import keeps_state_by_parameter, takes_empty_groups
from zc.registry import sharded

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class JointNorm(Stacked):
    """Its update depends on all matrices of a group."""

    def update(self, momentum: Tensor, second: Tensor, grads: Tensor, factor: float) -> None:
        super().update(momentum, second, grads / grads.norm(), factor)


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]


def aux_muon(params: list[nn.Parameter]) -> Optimizer:
    return AuxMuon([{"params": params[:1], "matrix": False}, {"params": params[1:], "matrix": True}])


@pytest.mark.parametrize(
    ("make", "belongs"), [(Lion, True), (aux_muon, True), (Noisy, True), (Stacked, False), (Wrapper, False)]
)
def test_whose_state_it_is(make: Any, belongs: bool) -> None:
    optimizer = make(matrices())
    assert keeps_state_by_parameter(optimizer, optimizer.param_groups, CPU) == belongs
    assert not optimizer.state


def test_a_stacked_group_is_tried_with_equal_shapes() -> None:
    """A stack takes no matrices of two shapes: the class passed untried, whatever it did."""
    try_out(Stacked(matrices()), 2, CPU)
    kind, text = message_of(lambda: try_out(JointNorm(matrices()), 2, CPU))
    assert kind == "PlanError" and "JointNorm depends on all of its parameters together" in text


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_trial_leaves_compiled_kernels_compiled(fullgraph: bool) -> None:
    """Dynamo skips a frame for good that it first meets under a dispatch mode: 0 kernels, or an error at the first
    step."""
    num_compiled = 0

    def backend(gm: Any, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return gm.forward

    class Compiled(Lion):
        pass

    # a frame of its own for each case
    code = "def update(self, param, grad, state, group):\n    param.sub_(grad)"
    scope: dict[str, Any] = {}
    exec(code, scope)
    kernel: Any = torch.compile(scope["update"], backend=backend, fullgraph=fullgraph)
    Compiled.update = kernel  # type: ignore[method-assign]
    params = matrices()
    optimizer = Compiled(params)
    try_out(optimizer, 2, CPU)
    assert keeps_state_by_parameter(optimizer, optimizer.param_groups, CPU)
    assert num_compiled == 0, "a trial compiles nothing"
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert num_compiled > 0


def test_a_second_object() -> None:
    """It is the first in all but groups and state, and a step that raises leaves both as they were."""
    params = matrices()
    optimizer = Stacked([{"params": params}, {"params": params[:0]}, {"params": [nn.Parameter(torch.empty(0, 4))]}])
    assert not takes_empty_groups(optimizer, optimizer.param_groups, CPU)
    assert takes_empty_groups(Lion(params), [{"params": [], "lr": 1.0}], CPU)
    hooks: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: hooks.append(args))
    second = second_object(optimizer, Optimizer.zero_grad)
    second.param_groups, second.state = [optimizer.param_groups[0]], defaultdict(dict)
    assert isinstance(second, Stacked) and class_of(second) is Stacked and len(optimizer.param_groups) == 3
    for _ in range(2):
        with pytest.raises(TypeError):
            second.step()  # no gradients
    assert len(optimizer.param_groups) == 3 and optimizer.num_steps == 2
    for param in params:
        param.grad = torch.ones_like(param)
    second.step()
    assert optimizer.num_steps == 3 and list(second.state) == [params[0]] and not optimizer.state and not hooks
    second.load_state_dict({**second.state_dict(), "state": {}})
    assert not second.state and len(optimizer.param_groups) == 3, "torch writes them into __dict__, which is shared"


def _with_an_empty_group(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    twin, model = squares(), squares()
    alone, optimizer = Stacked(groups(twin)), Stacked(groups(model))
    model, optimizer = zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=2048)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # it steps through hidden groups as well
    its = torch.optim.lr_scheduler.ExponentialLR(alone, 0.5)
    losses = []
    for step in range(3):
        losses.append(train(twin, alone, step, step + 1) == train(model, optimizer, step, step + 1))
        its.step()
        scheduler.step()
    own = sharded(model).optimizers[0].local.param_groups
    sizes = [sum(param.numel() for param in group["params"]) for group in own]
    return {"worst": worst(weights(model), weights(twin))[0], "sizes": sizes, "steps": optimizer.num_steps,
            "rates": [group["lr"] for group in optimizer.param_groups]}  # fmt: skip


def test_a_rank_that_owns_nothing_of_a_group() -> None:
    """"stack expects a non-empty TensorList"."""
    for stage, ranks in run_cases(_with_an_empty_group, 2, (1, 2)):
        assert any(0 in seen["sizes"] for seen in ranks), "some rank owns nothing of the group of one"
        for seen in ranks:
            assert seen["worst"] < 1e-6 and seen["steps"] == 3 and len(set(seen["rates"])) == 1, stage


class OfTrained(Stacked):
    """Leaves out parameters that are frozen."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = self.param_groups
        self.param_groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in given]
        try:
            super().step()
        finally:
            self.param_groups = given


def _with_a_frozen_member(rank: int, world_size: int) -> dict[str, Any]:
    twin, model = squares(), squares()
    optimizers = []
    for which in (twin, model):
        first, *equal, last = which.parameters()
        first.requires_grad_(False)
        optimizers.append(OfTrained([{"params": equal}, {"params": [first, last]}]))
    model, optimizer = zc.compile(model, optimizers[1], backend="eager", bucket_nbytes=2048)
    train(twin, optimizers[0], 0, 3)
    train(model, optimizer, 0, 3)
    own = sharded(model).optimizers[0].local.param_groups[1]["params"]
    return {"worst": worst(weights(model), weights(twin))[0], "trains": [p.requires_grad for p in own]}


def test_a_rank_that_owns_of_a_group_what_is_frozen_alone() -> None:
    """"stack expects a non-empty TensorList", as without any parameter."""
    ranks = run_ranks(_with_a_frozen_member, 2)
    assert [False] in [seen["trains"] for seen in ranks], "some rank has only the frozen one"
    for seen in ranks:
        assert seen["worst"] < 1e-6, seen


def _reducing(rank: int, world_size: int) -> dict[str, Any]:
    twin, model = squares(), squares()
    alone, optimizer = Stacked(groups(twin)), Reducing(groups(model))
    refused = message_of(lambda: zc.compile(model, optimizer, backend="eager"))
    stacked.dist = zc.one_rank
    try:
        model, optimizer = zc.compile(model, optimizer, backend="eager")
        train(twin, alone, 0, 3)
        train(model, optimizer, 0, 3)
    finally:
        stacked.dist = torch.distributed
    return {"refused": refused, "worst": worst(weights(model), weights(twin))[0]}


def test_an_optimizer_that_reduces_in_its_own_step() -> None:
    """Refused with the line that makes it run as in a single process; with that line it is right."""
    for rank in run_ranks(_reducing, 2):
        kind, text = rank["refused"]
        assert kind == "PlanError" and "Reducing" in text and "stacked.dist = zc.one_rank" in text, text
        assert rank["worst"] < 1e-6


def test_collectives_of_one_rank() -> None:
    """Against a real group of one rank, by their definition: what goes in comes out."""
    x, out = torch.arange(4.0), torch.zeros(4)
    assert zc.one_rank.get_world_size() == 1 and zc.one_rank.get_rank() == 0
    assert zc.one_rank.all_reduce(x) is None and torch.equal(x, torch.arange(4.0))
    work = zc.one_rank.reduce_scatter_tensor(out, x, op=zc.one_rank.ReduceOp.AVG, async_op=True)
    assert work.wait() and torch.equal(work.get_future().wait()[0], x) and torch.equal(out, x)
    zc.one_rank.all_gather([out], x + 1)
    assert torch.equal(out, x + 1)
    zc.one_rank.reduce_scatter(out, [x + 2])
    assert torch.equal(out, x + 2)
    with pytest.raises(AttributeError, match="one_rank has no all_gather_object"):
        zc.one_rank.all_gather_object([None], 1)
