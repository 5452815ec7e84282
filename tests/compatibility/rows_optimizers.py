"""Item 6: param.grad as a sharded gradient, optimizers and schedulers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from rows import STEPS, Row, Script, add, plain, row, sgd
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zc

# --- optimizers ---


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (arXiv:2302.06675), written as third parties write theirs."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.sub_(group["lr"] * mean.lerp(param.grad, 1 - group["beta"]).sign())
                mean.lerp_(param.grad, 0.01)


@zc.elementwise
class DeclaredLion(Lion):
    """The same by an author who says that it is elementwise."""


@zc.elementwise
class RowNormalized(torch.optim.Optimizer):
    """Each row's update has norm lr: its author is wrong to declare it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                param.sub_(group["lr"] * param.grad / (param.grad.norm(dim=-1, keepdim=True) + 1e-6))


class JointNorm(torch.optim.Optimizer):
    """Clips by the norm over all of its parameters: on a rank it would see only those that the rank owns."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.sub_(self.param_groups[0]["lr"] * param.grad / norm)


Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, Nesterov momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-4),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Lion-like, third-party": Lion,
    "Lion-like, declared with zc.elementwise": DeclaredLion,
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adam, maximize": lambda p: torch.optim.Adam(p, lr=1e-3, maximize=True),
}
# torch's elementwise optimizers differ in their state alone: these stand for the others
SOME_OPTIMIZERS = (
    "SGD, Nesterov momentum", "AdamW, foreach", "AdamW, fused", "Adafactor", "Lion-like, third-party",
    "Lion-like, declared with zc.elementwise", "AdamW, lr a tensor",
)  # fmt: skip
for _name, _make in OPTIMIZERS.items():
    add(Row(f"optimizer {_name}", 6, plain, optimizer=_make, full_only=_name not in SOME_OPTIMIZERS))


class Wide(nn.Module):
    """Its weights are large enough for 8-bit state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.nn.functional.gelu(self.first(x)))


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.nn.functional.gelu(self.first(x)))


@row(6, "optimizer Muon", make=Matrices, optimizer=lambda p: torch.optim.Muon(p, lr=1e-2), tolerance=2e-2,
     note="torch's Muon iterates in bf16")  # fmt: skip
def muon(s: Script) -> None:
    plain(s)


def _eight_bit(package: str) -> Make:
    """A third party's 8-bit AdamW: blocks of 256 elements share a scale, for parameters of 4096 elements or more."""

    def make(params: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = importlib.import_module(package).AdamW8bit(params, lr=1e-3)
        return optimizer

    return make


for _name in ("torchao.optim", "bitsandbytes.optim"):
    _package = _name.split(".")[0]
    add(Row(f"optimizer AdamW8bit of {_package}", 6, plain, make=lambda: Wide(), needs=_package, full_only=True,
            optimizer=_eight_bit(_name), oracle_dtype=torch.float32, note="against the same optimizer"))  # fmt: skip


for _name, _make, _text in (
    ("that normalises rows, declared with zc.elementwise", RowNormalized, "PlanError: is not elementwise"),
    ("that clips over all of its parameters", JointNorm, "PlanError: depends on all of its parameters together"),
    ("LBFGS", lambda p: torch.optim.LBFGS(p), "PlanError: evaluates its closure several times"),
    ("SparseAdam", lambda p: torch.optim.SparseAdam(list(p)), "PlanError: sparse gradients"),
):
    add(Row(f"optimizer {_name}", 6, plain, optimizer=_make, refused={"always": _text}))


def _by_closure(s: Script, step: int, by_name: bool = False) -> None:
    def evaluate() -> Tensor:
        s.optimizer.zero_grad()
        loss = s.loss(step)
        loss.backward()
        s.reduced()  # plain PyTorch averages before a step; here the step begins before the gradients are there
        return loss

    returned = s.optimizer.step(closure=evaluate) if by_name else s.optimizer.step(evaluate)
    s.note(f"loss {step}", returned)


@row(6, "step(closure)")
def closure(s: Script) -> None:
    for step in range(STEPS):
        _by_closure(s, step, by_name=step % 2 == 1)


@row(6, "step(closure) under torch.no_grad, SGD", optimizer=sgd)
def closure_no_grad(s: Script) -> None:
    with torch.no_grad():
        for step in range(STEPS):
            with torch.enable_grad() if not s.is_zc else torch.no_grad():  # step() itself turns gradients on
                _by_closure(s, step)


class Twice(Lion):
    """Evaluates its closure at the weights and once more, as sharpness-aware updates do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
            closure()
        super().step()


@row(6, "step(closure) of an optimizer that calls it twice", optimizer=Twice,
     refused={"always": "PlanError: calls it 2 times"})  # fmt: skip
def closure_twice(s: Script) -> None:
    _by_closure(s, 0)


def _groups(params: Iterable[Any]) -> torch.optim.Optimizer:
    weight0, bias0, weight1, bias1 = params
    groups = [{"params": [bias1, bias0], "weight_decay": 0.0, "lr": 3e-3}, {"params": [weight0, weight1]}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.2)


add(Row("options for each parameter group", 6, plain, optimizer=_groups))


@row(6, "the learning rate set by hand in param_groups", optimizer=_groups)
def rate_by_hand(s: Script) -> None:
    for step in range(STEPS):
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.5
        s.loss(step).backward()
        s.update()


@row(6, "the caller's own hooks around step()")
def step_hooks(s: Script) -> None:
    calls = []
    s.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    s.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    plain(s)
    s.note("before", calls.count("before"))
    s.note("after", calls.count("after"))


@row(6, "each rank loads rank 0's optimizer.state_dict(), errors passed over",
     refused={"always": "RankMismatchError: rank 1 has optimizer.load_state_dict, refused"},
     note="rank 1's own error is a CheckpointError that names zc.full_optimizer_state")  # fmt: skip
def rank_0s_state(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    state = [s.optimizer.state_dict()]
    dist.broadcast_object_list(state, 0)
    with contextlib.suppress(zc.CheckpointError):
        s.optimizer.load_state_dict(state[0])
    s.loss(1).backward()
    s.update()


# --- schedulers ---

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "ConstantLR with LinearLR (ChainedScheduler)": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=2), lr_scheduler.LinearLR(o, 0.3, total_iters=4)]
    ),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "LinearLR then PolynomialLR (SequentialLR)": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.PolynomialLR(o, 3)], [2]
    ),
    "OneCycleLR (moves the momentum as well)": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def _scheduled(make: Scheduler) -> Callable[[Script], None]:
    def loop(s: Script) -> None:
        scheduler = make(s.optimizer)
        for step in range(STEPS):
            s.loss(step).backward()
            s.update()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            s.note(f"lr {step}", s.optimizer.param_groups[0]["lr"])

    return loop


# schedulers write a group's options and nothing else: these stand for the others
SOME_SCHEDULERS = ("LambdaLR", "OneCycleLR (moves the momentum as well)", "ReduceLROnPlateau", "SWALR")
for _name, _scheduler in SCHEDULERS.items():
    add(Row(f"scheduler {_name}", 6, _scheduled(_scheduler), optimizer=sgd, full_only=_name not in SOME_SCHEDULERS))
