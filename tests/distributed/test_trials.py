"""What zc tries of an optimizer that it does not know, and what it makes of the answers."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training_runs import message_of

import zc
from zc.optim.assignment import try_out
from zc.optim.local import class_of, second_object
from zc.optim.trials import calls_of_closure, candidates, check_positions, habits_of, on_slices
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


class Modal(Lion):
    """It updates in train mode alone, as schedulefree's classes do, and passed untried."""

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0].get("train_mode"):
            raise RuntimeError("Optimizer was not in train mode when step is called")
        super().step()


@pytest.mark.parametrize(
    ("make", "belongs"),
    [(Lion, True), (aux_muon, True), (Noisy, True), (Modal, True), (Stacked, False), (Wrapper, False)],
)
def test_whose_state_it_is(make: Any, belongs: bool) -> None:
    optimizer = make(matrices())
    assert habits_of(optimizer, optimizer.param_groups, CPU).stacks_state != belongs
    assert not optimizer.state


def test_a_stacked_group_is_tried_with_equal_shapes() -> None:
    """A stack takes no matrices of two shapes: the class passed untried, whatever it did."""
    try_out(Stacked(matrices()), 2, CPU)
    kind, text = message_of(lambda: try_out(JointNorm(matrices()), 2, CPU))
    assert kind == "PlanError" and "JointNorm depends on all of its parameters together" in text


class Pairs(Lion):
    """It multiplies each adapter's two matrices, as LoRA-RITE does, found by their places in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for k in range(0, len(group["params"]), 2):
                down, up = group["params"][k : k + 2]
                down.sub_(group["lr"] * (up.T @ up + torch.eye(up.shape[1])) @ down.grad)


class LoosePairs(Pairs):
    """A parameter without a partner is left out."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if len(group["params"]) > 1:
                super().step()


class TimidPairs(Pairs):
    """It skips what is too large, which all of a trial's gradients were."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(float(param.grad.abs().max()) < 0.1 for param in self.param_groups[0]["params"]):
            super().step()


def test_what_takes_only_the_models_shapes_is_tried_with_those() -> None:
    """Neither pair of matrices has an inner dimension in common, so the class passed untried, and trained wrong."""
    shapes = [(4, 16), (24, 4), (4, 24), (8, 4)]
    for make in (Pairs, LoosePairs, TimidPairs):
        kind, text = message_of(lambda make=make: try_out(make([nn.Parameter(torch.zeros(s)) for s in shapes]), 2, CPU))  # type: ignore[misc]
        assert kind == "PlanError" and f"{make.__name__} depends on all of its parameters together" in text


class Distance(Lion):
    """Its rate is an estimate over all elements, which begins at next to nothing, as Prodigy's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["distance"] = self.largest(group) * group.get("distance", 1e-6)
            for param in group["params"]:
                param.sub_(group["lr"] * group["distance"] * param.grad.sign())

    @staticmethod
    def largest(group: dict[str, Any]) -> float:
        norms = [float(param.grad.norm()) for param in group["params"] if param.grad is not None]
        return 1 + 1e-3 * max(norms, default=0.0)


class DistanceLogged(Distance):
    """The same number, which nothing reads."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["distance"] = self.largest(group)
        Lion.step(self)


class SmallDecay(Lion):
    """A decay, small beside the update, over a norm of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(float(param.grad.norm()) for param in group["params"] if param.grad is not None)
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["weight_decay"] / (1 + norm))
        super().step()


@zc.elementwise
class DistanceOfElements(Distance):
    pass


def test_estimates_too_small_to_see_are_refused() -> None:
    """Prodigy trained wrong in silence: for three steps it changes no weight. A class may log the same number."""
    decaying = SmallDecay(matrices())
    decaying.param_groups[0]["weight_decay"] = 1e-4
    untried = {"params": matrices(), "distance": None}  # it fails on numbers alone, and hid the group after it
    second = Distance([untried, {"params": matrices()}])
    for optimizer in (Distance(matrices()), DistanceOfElements(matrices()), decaying, second):
        kind, text = message_of(lambda optimizer=optimizer: try_out(optimizer, 2, CPU))  # type: ignore[misc]
        assert kind == "PlanError" and ("all of its parameters" in text or "the option 'distance'" in text), text
    try_out(DistanceLogged(matrices()), 2, CPU)


def test_a_static_method_of_the_class_stays_one() -> None:
    assert candidates(Distance) == [], "a method in its place got the object, too"


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
    assert not habits_of(optimizer, optimizer.param_groups, CPU).stacks_state
    assert num_compiled == 0, "a trial compiles nothing"
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert num_compiled > 0


def test_a_second_object() -> None:
    """It is the first in all but groups and state, and a step that raises leaves both as they were."""
    params = matrices()
    optimizer = Stacked([{"params": params}, {"params": params[:0]}, {"params": [nn.Parameter(torch.empty(0, 4))]}])
    assert habits_of(optimizer, optimizer.param_groups, CPU).refuses_empty
    assert not habits_of(Lion(params), [{"params": [], "lr": 1.0}], CPU).refuses_empty
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


class Counter:
    n = 0


class Counting(Lion):
    """Keeps counts, a queue, random numbers and a buffer among its attributes, and objects that refer to it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.stats, self.counts, self.nested = {"n": torch.zeros(())}, [torch.zeros(())], [[0]]
        self.defaults["n"] = torch.zeros(())
        self.counter, self.recent, self.numbers = Counter(), deque([0], maxlen=4), itertools.count()
        self.buffer = torch.zeros(5000)
        self.views, self.random, self.lock = self.buffer.split(2500), random.Random(0), threading.Lock()
        self.generator, self.count = torch.Generator(), self.count_one
        self.counter.owner = self  # type: ignore[attr-defined]
        self.param_groups[0]["counter"] = self.counter
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self, 0.5)
        self.state[self.param_groups[0]["params"][0]]["counts"] = [[0]]

    def count_one(self) -> None:
        self.counter.n += 1

    def seen(self) -> dict[str, Any]:
        given = [self.stats, self.counts, self.nested, self.defaults, self.counter.n, list(self.recent), self.numbers]
        drawn = [self.random.getstate(), self.generator.get_state().tolist(), self.buffer.sum()]
        return {"seen": repr([given, drawn]), "group": repr(self.param_groups), "state": repr(dict(self.state))}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        assert self.counter.owner is self and group["counter"] is self.counter  # type: ignore[attr-defined]
        with self.lock:
            self.count()
        for item in (self.stats["n"], *self.counts, self.defaults["n"], self.buffer):
            item += 1
        assert self.views[1][0] == self.buffer[0]
        self.nested[0][0] += 1
        self.recent.append(next(self.numbers))
        self.random.random()
        torch.rand(1, generator=self.generator)
        for state in self.state.values():
            state["counts"][0][0] += 1
        super().step()
        self.schedule.step()


class LateAverage(Lion):
    """Its first four steps move nothing, as RAdam's, and so does the method that goes back to the average."""

    @torch.no_grad()
    def eval(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.lerp_(self.state[param]["first"], 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("first", param.clone())
            state["k"] = state.get("k", 0) + 1
            if state["k"] > 4:
                param.sub_(0.1 * param.grad)


def test_a_method_is_tried_after_steps_that_move_weights() -> None:
    """In stage 3 it was refused for weights without bytes, in schedulefree's RAdamScheduleFree."""
    optimizer = LateAverage(matrices())
    assert on_slices(optimizer, None, optimizer.param_groups, CPU) == ["eval"]


def test_a_trial_changes_nothing_of_the_callers() -> None:
    """Counts ran ahead before the first step, by what they stood in: trials shared all but the outermost containers."""
    optimizer = Counting(matrices())
    before = optimizer.seen()
    try_out(optimizer, 2, CPU)
    habits = habits_of(optimizer, optimizer.param_groups, CPU)
    assert not habits.refuses_empty and not habits.stacks_state and calls_of_closure(optimizer) == (0, False)
    assert optimizer.seen() == before
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.counter.n == 1 and optimizer.nested == [[1]] and optimizer.seen() != before


UPDATES = {"number": 0}
LAST = {"grad": torch.ones(2)}
RATE = 1.0


class Decaying(Lion):
    """Counts its steps in its class and in globals of its module, and logs them there: no object of the caller's."""

    steps = 0
    log: ClassVar[list[int]] = []
    inside: ClassVar[Any] = {"counts": [defaultdict(int), deque([0])], "tensor": (torch.zeros(1),),
                             "draws": torch.Generator()}  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global RATE
        counts, Decaying.latest = self.inside["counts"], self.inside  # type: ignore[attr-defined]
        counts[0]["steps"] += 1
        counts[1].append(1)
        self.inside["tensor"][0].add_(torch.rand(1, generator=self.inside["draws"]))
        RATE /= 2
        UPDATES["number"] += 1
        Decaying.steps += 1
        self.log.append(Decaying.steps)
        LAST["grad"] = torch.zeros(2)
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=RATE / self.steps / UPDATES["number"])


def test_a_trial_counts_no_step_of_the_class() -> None:
    """Trials went on with the counts of a class, and with hooks of all optimizers (an average of the weights, a log):
    weights were 36 % off after 4 steps, in silence."""
    calls, last = list[str](), LAST["grad"]
    optimizer = Decaying(matrices())
    before = register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    after = register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    try:
        try_out(optimizer, 2, CPU)
        assert not habits_of(optimizer, optimizer.param_groups, CPU).draws
        calls_of_closure(optimizer)
        assert calls == [] and (Decaying.steps, Decaying.log, UPDATES, RATE) == (0, [], {"number": 0}, 1.0)
        assert LAST["grad"] is last and not hasattr(Decaying, "latest")
        inside = Decaying.inside
        assert inside["counts"] == [defaultdict(int), deque([0])] and not inside["tensor"][0].any()
        assert torch.equal(inside["draws"].get_state(), torch.Generator().get_state())
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert calls == ["before", "after"]
        assert (Decaying.steps, Decaying.log, UPDATES, RATE) == (1, [1], {"number": 1}, 0.5)
    finally:
        before.remove()
        after.remove()


class Rolling(Lion):
    """Draws for each parameter, from Python's numbers and numpy's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_((random.random() + numpy.random.rand()) * param.grad)


def test_a_trial_takes_no_random_numbers_of_the_callers() -> None:
    """Those of Python and numpy went on in zc.compile, so a loader shuffled otherwise than without zc. Nothing said
    that ranks draw for their own parameters."""
    optimizer = Rolling(matrices())
    random.seed(0)
    numpy.random.seed(0)
    try_out(optimizer, 2, CPU)
    assert habits_of(optimizer, optimizer.param_groups, CPU).draws
    calls_of_closure(optimizer)
    assert random.random() == random.Random(0).random()
    assert numpy.random.rand() == numpy.random.RandomState(0).rand()


@zc.elementwise
class Drawing(Lion):
    """Draws from what can't be copied."""

    def __init__(self, params: Any, noise: Any) -> None:
        super().__init__(params)
        self.noise = {"drawn": [noise]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (noise,) = self.noise["drawn"]
        noise.step() if isinstance(noise, Optimizer) else next(noise)


def test_what_cant_be_copied_is_not_tried() -> None:
    """A generator went on, and another optimizer made steps."""
    numbers, params = (k for k in range(100)), matrices()
    for noise, what in ((numbers, "a generator"), (torch.optim.SGD(params), "another optimizer, of SGD")):
        optimizer = Drawing(matrices(), noise)
        kind, text = message_of(lambda optimizer=optimizer: try_out(optimizer, 2, CPU))  # type: ignore[misc]
        assert kind == "PlanError" and f"its noise holds {what}" in text, text
        habits = habits_of(optimizer, optimizer.param_groups, CPU)
        assert not habits.refuses_empty and habits.stacks_state and calls_of_closure(optimizer) is None
    assert next(numbers) == 0


def test_a_closure_is_tried_in_float64() -> None:
    """Its weights were compared with a change rounded to fp32: any class but torch's was refused, as one that moves
    them before it calls the closure."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert calls_of_closure(torch.optim.SGD(matrices(), lr=0.1)) == (1, False)
    finally:
        torch.set_default_dtype(default)


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


class Listing(Optimizer):
    """Lists the gradients of a group, and fails where there are none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            torch._foreach_add_(params, [param.grad for param in params], alpha=-group["lr"])


class TakingEmpty(Listing):
    """Lets pass a group that is empty, but none that has no gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(group["params"] for group in self.param_groups):
            super().step()


@zc.elementwise
class ListingElements(Listing):
    pass


class CountingGroups(Listing):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        super().step()


def test_which_class_needs_a_gradient() -> None:
    makes = (Listing, TakingEmpty, ListingElements, Stacked, CountingGroups, Lion, Noisy)
    needs = {make for make in makes if habits_of(one := make(matrices()), one.param_groups, CPU).needs_a_gradient}
    assert needs == {Listing, TakingEmpty, ListingElements, Stacked, CountingGroups}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor, k: int) -> Tensor:
        out: Tensor = self.heads[k](x)
        return out


def heads() -> nn.Module:
    torch.manual_seed(0)
    return Heads()


def _with_heads_in_turn(rank: int, world_size: int, make: type[Optimizer], stage: int) -> float:
    twin, model = heads(), heads()
    alone, optimizer = make(twin.parameters()), make(model.parameters())
    model, optimizer = zc.compile(model, optimizer, stage=stage, backend="eager")
    for step in range(4):
        for which, its in ((twin, alone), (model, optimizer)):
            which(torch.ones(3, 16), step % 2).square().mean().backward()
            its.step()
            its.zero_grad()
    assert alone.param_groups[0].get("num_steps") == optimizer.param_groups[0].get("num_steps")
    return worst(weights(model), weights(twin))[0]


def test_a_rank_without_a_gradient_of_a_group() -> None:
    """"Tensor list must have at least one tensor", on this rank alone."""
    makes = (Listing, TakingEmpty, ListingElements, CountingGroups)
    for case, ranks in run_cases(_with_heads_in_turn, 2, itertools.product(makes, (1, 2))):
        assert max(ranks) < 1e-6, case


class Proximal(Optimizer):
    """FedProx's: draws each parameter to an anchor, which it finds by ``where``."""

    def __init__(self, params: Any, where: str, anchors: nn.Module) -> None:
        super().__init__(params, {"lr": 0.1})
        params, others = self.param_groups[0]["params"], [*anchors.parameters()]
        self.module = anchors if where == "module" else None
        self.by_param = dict(zip(params, others, strict=True)) if where == "dict" else None
        self.run = SimpleNamespace(anchors=[])

    @torch.no_grad()
    def step(self, anchors: Any = ()) -> None:  # type: ignore[override]
        for group in self.param_groups:
            others = self.module.parameters() if self.module else anchors or self.run.anchors or group["params"]
            for param, other in zip(group["params"], others, strict=False):
                if other is param:
                    other = self.by_param[param] if self.by_param else self.state[param]["anchor"]
                param.sub_(0.1 * (param.grad + 0.5 * (param - other)))


class ByIndex(Lion):
    """Has a factor for each parameter, and a pair of options that has nothing to do with positions."""

    def __init__(self, params: Any, where: str, entries: Any) -> None:
        super().__init__(params)
        self.where, self.betas = where, (0.9, 0.99)
        for group in self.param_groups:
            group["pair"] = [0.9, 0.99]
        (vars(self) if where == "attribute" else self.param_groups[0])["entries"] = entries

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            entries = (vars(self) if self.where == "attribute" else group)["entries"]
            for param, entry in zip(group["params"], entries, strict=False):
                if param.grad is not None:
                    param.sub_(group["lr"] * entry * param.grad)


@pytest.mark.parametrize("where", ["attribute", "option of parameter group 0:"])
def test_what_goes_by_position_is_refused(where: str) -> None:
    """The class read entries of other ranks' parameters beside its own, in silence."""
    params = matrices()
    anchors = [param.detach().clone() for param in params]
    for entries in ([1.0, 1.0, 10.0], (1.0, 2.0, 3.0), anchors):
        kind, text = message_of(lambda entries=entries: check_positions(ByIndex(params, where, entries), CPU))  # type: ignore[misc]
        assert kind == "PlanError" and f"each of 3 parameters, by position ({where} entries)" in text, text
    kind, text = message_of(lambda: try_out(ByIndex(params, where, anchors), 2, CPU))
    assert kind == "PlanError" and "by position" in text
    for harmless in ([1.0, 1.0, 1.0], [2.0] * 4):
        check_positions(ByIndex(params, where, harmless), CPU)
    kind, text = message_of(lambda: check_positions(ByIndex(params[:2], where, [1.0, 10.0]), CPU))
    assert kind == "PlanError" and "each of 2 parameters, by position" in text, text
    check_positions(ByIndex(params[:2], where, [1.0] * 9), CPU)  # two parameters and a pair
    noisy = Noisy(params[:2])
    noisy.param_groups[0]["betas"] = (0.9, 0.99)
    check_positions(noisy, CPU)
    try_out(ByIndex(params, where, anchors), 1, CPU)


class ByName(Optimizer):
    """Has a rate by name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if param.grad is not None:
                    param.sub_(group["lr"] * (1 + int(name.split(".")[0])) * param.grad)


@zc.elementwise
class ByNameOfElements(ByName):
    pass


def _with_names(rank: int, world_size: int, make: type[Optimizer]) -> dict[str, Any]:
    twin, model = squares(), squares()
    alone, optimizer = make(twin.named_parameters()), make(model.named_parameters())
    model, optimizer = zc.compile(model, optimizer, backend="eager", bucket_nbytes=2048)
    train(twin, alone, 0, 3)
    train(model, optimizer, 0, 3)
    given, saved = optimizer.param_groups[0]["param_names"], optimizer.state_dict()["param_groups"][0]["param_names"]
    optimizer.load_state_dict(optimizer.state_dict())
    loaded = optimizer.param_groups[0]["param_names"]
    return {"worst": worst(weights(model), weights(twin))[0],
            "are_whole": given == saved == loaded == alone.param_groups[0]["param_names"]}  # fmt: skip


def test_names_of_parameters_go_with_them() -> None:
    """A class that reads names beside its parameters took those of other ranks' parameters, in silence."""
    for case, ranks in run_cases(_with_names, 2, (ByName, ByNameOfElements)):
        for seen in ranks:
            assert seen["worst"] < 1e-6 and seen["are_whole"], (case, seen)


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


def _proximal(rank: int, world_size: int, where: str, stage: int) -> Any:
    """What an update of plain PyTorch and of zc makes of the same gradients, or zc's error."""
    ends: list[list[Tensor]] = []
    for is_zc in (False, True):
        torch.manual_seed(0)
        model, anchors = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))) for _ in range(2))
        optimizer = Proximal(model.parameters(), where, anchors)
        argument = {"list": [*anchors.parameters()], "iterator": iter(anchors.parameters())}.get(where)
        if is_zc:
            zc.compile(model, optimizer, stage=stage, backend="eager")
        optimizer.run.anchors += anchors.parameters() if where == "attribute" else ()
        for param, other in zip(model.parameters(), anchors.parameters(), strict=True) if where == "state" else ():
            optimizer.state[param]["anchor"] = other.detach().clone()
        model(torch.ones(1, 4)).sum().backward()
        step = partial(optimizer.step, *([argument] if argument else []))
        if is_zc and where != "state":
            return message_of(step)
        step()
        with zc.whole_parameters(model) if is_zc else contextlib.nullcontext():
            ends.append([param.detach().clone() for param in model.parameters()])
    return max(float((one - other).abs().max()) for one, other in zip(*ends, strict=True))


def test_what_a_step_finds_by_position_is_refused() -> None:
    """FedProx and SCAFFOLD as they are published: a step that pairs what it was given with its group's parameters had
    those of other ranks' parameters, in silence. The way out in the message is right."""
    cases = {"list": "argument 1 of step", "iterator": "argument 1 of step", "attribute": "self.run.anchors",
             "module": "self.module", "dict": "self.by_param, whose keys"}  # fmt: skip
    for (where, _), ranks in run_cases(_proximal, 2, itertools.product(cases, (2,))):
        for kind, text in ranks:
            assert kind == "ZcError" and cases[where] in text and "optimizer.state[param]" in text, text
    for case, ranks in run_cases(_proximal, 2, [("state", 1), ("state", 2), ("state", 3)]):
        assert max(ranks) < 1e-6, case


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
    zc.one_rank.all_gather(tensor_list=[out], tensor=x + 3)  # by torch's names
    assert torch.equal(out, x + 3)
    zc.one_rank.all_gather_into_tensor(output_tensor=out, input_tensor=x + 4)
    assert torch.equal(out, x + 4)
    with pytest.raises(AttributeError, match="one_rank has no all_gather_object"):
        zc.one_rank.all_gather_object([None], 1)


class Averaging(torch.optim.SGD):
    """Keeps an average of the weights, which it takes from the model, not from its groups."""

    def __init__(self, model: nn.Module, average: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.models = lambda: (model, average)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        model, average = self.models()
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            assert param.shape == mean.shape and param.requires_grad
            mean.lerp_(param, 0.1)


def test_a_step_that_reads_the_model_is_refused() -> None:
    """It read the weights of before the update, in silence: the average was 5 to 17 % off after four updates. After
    an error or Ctrl-C, in a hook, and in another thread they are read as ever."""
    model, average = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    optimizer = Averaging(model, average)
    zc.compile(model, optimizer, stage=2, backend="eager")
    weight, read = model.weight, list[Tensor]()

    def update() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(zc.ZcError, match=r"Averaging.step\(\) met a parameter of the model, of shape \(2, 4\).*hook"):
        update()
    assert type(weight) is nn.Parameter and torch.equal(weight, weight.detach().clone())

    def models() -> Any:
        thread = threading.Thread(target=lambda: read.append(weight.detach().clone()))
        thread.start()
        thread.join()
        raise KeyboardInterrupt

    optimizer.models = models
    with pytest.raises(KeyboardInterrupt):
        update()
    assert type(weight) is nn.Parameter and len(read) == 1
    optimizer.models = lambda: (nn.Module(), nn.Module())
    optimizer.register_step_post_hook(lambda *_: read.append(weight.detach().clone()))
    update()
    assert type(weight) is nn.Parameter and torch.equal(read[1], weight)


def _asking(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Averaging takes the weights by each way that gathers them."""
    answers = list[tuple[str, str]]()
    for how in ("parameters", "whole", "full_state_dict", "iter_weights", "forward"):
        model, average = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        asked, model_of = list[int](), {"model": model}

        def models(how: str = how, model_of: Any = model_of, asked: Any = asked) -> Any:
            model = model_of["model"]
            if not asked or how == "parameters":  # in the trials of zc.compile, too
                return model, nn.Linear(4, 2).requires_grad_(False)
            with zc.whole_parameters(model) if how == "whole" else contextlib.nullcontext():
                if how == "forward":
                    model(torch.ones(1, 4))
                elif how != "whole":
                    dict(zc.full_state_dict(model) if how == "full_state_dict" else zc.iter_weights(model))
            return nn.Module(), nn.Module()

        optimizer = Averaging(model, average)
        optimizer.models = models
        zc.compile(model, optimizer, stage=3, backend="eager")
        asked.append(1)
        model(torch.ones(1, 4)).sum().backward()
        answers.append(message_of(optimizer.step))
    return answers


def test_a_step_that_gathers_the_model_is_refused() -> None:
    """In stage 3 it had the weights of before its update, in silence; and zc.compile's trials read parameters without
    bytes, which ended the process."""
    for answers in run_ranks(_asking, 2):
        for kind, text in answers:
            assert kind == "ZcError" and "Averaging.step() met" in text and "register_step_post_hook" in text, text
