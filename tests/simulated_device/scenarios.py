"""Training with zc on the simulated device, and what plain PyTorch trains on the CPU from the same batches.

A scenario is one loop. `train` is a job for ranks: what was seen of the loop there.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NUM_STEPS = 4
NUM_STREAMS = 3  # of a loop
CLIP = 0.5
WIDE = 5e-2  # of weights in bf16
STREAMS = ("forward on a side", "backward on a third", "all on a side", "update on a side", "backward from elsewhere")
TOLERANCE = 2e-5  # of fp32; the sums of two ranks have another order than the reference's


@dataclass(frozen=True)
class Scenario:
    """``stage`` 0: plain PyTorch, on one rank. ``clips``: whose function, "" for none. ``loop``: on which streams its
    parts run, or what else it does (`_Loop`). ``late``: microseconds before each task by kind of stream, from the
    second step on. ``is_other``: the model is on the device that is not current."""

    stage: int = 2
    backend: str = "eager"
    model: str = "gpt_untied"
    loop: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 2
    clips: str = "torch"
    late: dict[str, int] = field(default_factory=dict)
    jitter: int = 0
    seed: int = 0
    is_other: bool = False

    @property
    def offloads(self) -> bool:
        return "offload" in self.options

    @property
    def has_own_streams(self) -> bool:
        """Whether the loop or the model has side streams of its own."""
        return "branch" in self.model or self.loop in (*STREAMS, "on any streams", "evaluation", "norms on two streams")

    @property
    def is_dropped(self) -> bool:
        """Whether the loop ends with a model that is dropped: in a backward, or in a forward."""
        return self.loop in ("dropped", "dropped in a forward")

    @property
    def num_steps(self) -> int:
        return NUM_STREAMS**3 if self.loop == "on any streams" else NUM_STEPS

    def __str__(self) -> str:
        plain = Scenario()
        changed = {k: v for k, v in vars(self).items() if v != getattr(plain, k) or k in ("stage", "backend")}
        return re.sub(r"[^\w=.+-]+", "-", "+".join(f"{k}={v}" for k, v in changed.items())).strip("-")


class Seen(NamedTuple):
    """Of one rank. ``worst``: the largest difference to the reference, and where; NaN is wrong, too. ``waits`` and
    ``sides``: how often the host waited, and memory was allocated on a side stream, in the last step: by phase and
    operator."""

    races: list[str]
    worst: tuple[float, str]
    is_wrong: bool
    waits: dict[tuple[str, str], int]
    sides: dict[tuple[str, str], int]


class Branches(nn.Module):
    """Two layers on two streams, as eager code may have them; autograd runs the later one's backward first. ``is_one``:
    a layer on a side stream, and nothing reads the others."""

    def __init__(self, dim: int = 16, *, is_side_first: bool = True, is_one: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(dim, dim) for _ in range(3))
        self.side: list[torch.Stream] = []
        self.is_side_first, self.is_one = is_side_first, is_one

    def forward(self, x: Tensor) -> Tensor:
        other = None if self.is_side_first else self._here(x)
        one = self._beside(x)
        if self.is_side_first and not self.is_one:
            other = self._here(x)
        if x.device.type != "cpu":  # not before: until here the two know nothing of each other
            current = torch.accelerator.current_stream(x.device)
            current.wait_stream(self.side[0])
            one.record_stream(current)
        return one if other is None else self.last(one + other)

    def _here(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def _beside(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return torch.tanh(self.first(x))
        self.side = self.side or [torch.Stream(x.device)]
        self.side[0].wait_stream(torch.accelerator.current_stream(x.device))
        with self.side[0]:
            return torch.tanh(self.first(x))


class Clamped(nn.Module):
    """Reads a weight in eager code, and writes it in its forward."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(dim, dim) / 4), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(x @ self.weight))


def _case(name: str) -> Any:
    import models

    own_models = {
        "branches": Branches,
        "branches home first": partial(Branches, is_side_first=False),
        "one branch": partial(Branches, is_one=True),
        "clamped": Clamped,
    }
    for own, make in own_models.items():
        models.CASES.setdefault(own, models.Case(make, models.vectors(), models.mean_square))
    return models.CASES[name]


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _reference(model: nn.Module, case: Any, world_size: int, scenario: Scenario) -> dict[str, Tensor]:
    """The parameters that plain PyTorch trains from all ranks' batches, on the CPU."""
    optimizer = _optimizer(model.parameters())
    for step in range(scenario.num_steps):
        for microbatch in range(scenario.num_microbatches):
            for rank in range(world_size):
                loss = case.loss(model, case.batch(rank, step, microbatch)) + _penalty(scenario, model)
                (loss / world_size).backward()
            _edit(scenario, model, step, microbatch)
        if scenario.clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _penalty(scenario: Scenario, model: nn.Module) -> Any:
    """Of weights that the forward does not read."""
    return 0.01 * model.second.weight.square().sum() if scenario.loop == "penalty" else 0.0  # type: ignore[operator, union-attr]


def _edit(scenario: Scenario, model: nn.Module, step: int, microbatch: int) -> None:
    """What the loop "by hand" does to gradients after a microbatch."""
    if scenario.loop != "by hand":
        return
    first, second, *_ = model.parameters()
    if microbatch == 0:
        assert first.grad is not None
        first.grad = first.grad * 0.5
    elif step % 2:
        second.grad = None


class _Loop:
    """``home`` is the stream that is current when the loop starts. Whatever runs on another stream is ordered as plain
    PyTorch needs it, and no more."""

    def __init__(self, scenario: Scenario, model: nn.Module, optimizer: Any, case: Any, device: torch.device) -> None:
        self.kind, self.scenario, self.case, self.device = scenario.loop, scenario, case, device
        self.model, self.optimizer = model, optimizer
        self.home = torch.accelerator.current_stream(device)
        self.side, self.third = torch.Stream(device), torch.Stream(device)
        self.scaler = torch.amp.GradScaler("sim", init_scale=64.0) if self.kind == "scaler" else None

    def run_step(self, rank: int, step: int) -> None:
        import simulated

        import zc

        if self.kind == "on any streams":
            self._run_step_on_any(rank, step)
            return
        last = self.scenario.num_microbatches - 1
        for microbatch in range(self.scenario.num_microbatches):
            batch = self._batch(rank, step, microbatch)
            skips = self.kind == "no_sync" and microbatch < last
            with zc.no_sync(self.model) if skips else contextlib.nullcontext():
                self._forward_and_backward(batch)
            _edit(self.scenario, self.model, step, microbatch)
        # plain PyTorch's zero_grad queues nothing, so there is no need to order its stream
        is_apart = self.kind == "update on a side"
        with self._on(self.side if is_apart else None):
            with simulated.phase("clip"):
                self._clip()
            with simulated.phase("update"):
                if self.scaler is not None:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                else:
                    self.optimizer.step()
            with simulated.phase("zero_grad"), self.third if is_apart else contextlib.nullcontext():
                self.optimizer.zero_grad()
        if self.kind in ("cleared between", "by hand"):
            self._forward_and_backward(batch)
            with simulated.phase("zero_grad"):
                self.optimizer.zero_grad(set_to_none=self.kind != "by hand")
        if self.kind == "evaluation":
            with simulated.phase("evaluation"), torch.no_grad():
                with self._on(self.side):
                    self.case.loss(self.model, batch)
                self.case.loss(self.model, batch)
        if self.kind == "state":
            with simulated.phase("state"):
                zc.full_state_dict(self.model)
                self.model.state_dict()

    def _batch(self, rank: int, step: int, microbatch: int) -> Any:
        import simulated

        with simulated.phase("batch"):
            host = self.case.batch(rank, step, microbatch)
            return tuple(part.contiguous().pin_memory().to(self.device, non_blocking=True) for part in host)

    def _run_step_on_any(self, rank: int, step: int) -> None:
        """Backward, update and zero_grad on each of three streams, in all combinations. The update comes after
        the backward, and the next forward after the update."""
        import simulated

        streams = (self.home, self.side, self.third)
        backward, update, clear = list(itertools.product(streams, repeat=NUM_STREAMS))[step]
        for microbatch in range(self.scenario.num_microbatches):
            batch = self._batch(rank, step, microbatch)
            backward.wait_stream(self.home)
            for part in batch:
                part.record_stream(backward)
            with backward:
                self._forward_and_backward(batch)
        update.wait_stream(backward)
        with update:
            with simulated.phase("clip"):
                self._clip()
            with simulated.phase("update"):
                self.optimizer.step()
        with clear, simulated.phase("zero_grad"):
            self.optimizer.zero_grad()
        backward.wait_stream(update)
        for stream in streams:
            stream.wait_stream(backward)

    def _clip(self) -> None:
        import zc

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.kind == "norms on two streams":
            with self._on(self.side):
                grads = [param.grad for param in self.model.parameters() if param.grad is not None]
                torch.stack([grad.norm() for grad in grads] + [grad.mean() for grad in grads])
        if self.scenario.clips == "zc":
            zc.clip_grad_norm_(self.model, CLIP)
        elif self.scenario.clips == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def _forward_and_backward(self, batch: Any) -> None:
        import simulated

        forwards = {"forward on a side": self.side, "backward on a third": self.side}
        with simulated.phase("forward"), self._on(forwards.get(self.kind)):
            loss = self.case.loss(self.model, batch) + _penalty(self.scenario, self.model)
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
        third = self.third if self.kind == "backward on a third" else None
        # autograd orders what it runs behind the forward, so the calling stream may be any
        elsewhere = self.third if self.kind == "backward from elsewhere" else contextlib.nullcontext()
        with simulated.phase("backward"), self._on(third), elsewhere:
            loss.backward()
        if self.kind == "backward from elsewhere" and self.scenario.model == "branches":
            self.home.wait_stream(self.third)  # autograd has made it wait for the streams of the gradients

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(self.home)
        with stream:
            yield
        self.home.wait_stream(stream)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """On the device. On one that torch does not know, a tied parameter becomes one for each of its names: they are tied
    again."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((module, name))
    model.to(device)
    for (module, name), *others in places.values():
        for other, other_name in others:
            other.register_parameter(other_name, module.get_parameter(name))
    return model


def _name_buffers(model: nn.Module) -> None:
    """For reports of races."""
    import simulated

    import zc

    buffers = zc.registry.sharded(model).runtime.buffers
    for name, tensors in vars(buffers).items():
        for k, tensor in enumerate(tensors if isinstance(tensors, list) else ()):
            if isinstance(tensor, Tensor) and tensor.numel():
                simulated.install().set_name(tensor, f"{name}[{k}]")


def train(rank: int, world_size: int, scenario: Scenario) -> Seen:
    """Job. Every number is compared on every rank."""
    import simulated

    import zc

    compiled, case = simulated.install(), _case(scenario.model)
    torch.manual_seed(0)
    device = torch.device("sim", (rank + scenario.is_other) % compiled.num_devices)
    plain = case.model()
    expected = _reference(copy.deepcopy(plain), case, world_size, scenario)
    model = moved(plain, device)
    optimizer = _optimizer(model.parameters())
    options = dict(scenario.options)
    if options.pop("hosts", None):
        os.environ["GROUP_RANK"] = str(rank * 2 // world_size)
    options.setdefault("bucket_nbytes", 2000)
    if scenario.stage:
        zc.compile(model, optimizer, stage=scenario.stage, backend=scenario.backend, **options)
        _name_buffers(model)
    os.environ.pop("GROUP_RANK", None)
    before: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
    with contextlib.ExitStack() as stack:
        loop = _Loop(scenario, model, optimizer, case, device)
        if scenario.loop == "all on a side":
            stack.enter_context(loop._on(loop.side))
        for step in range(scenario.num_steps):
            if step == 1:
                stack.enter_context(simulated.late(scenario.late, scenario.jitter, scenario.seed))
            if step == scenario.num_steps - 1:
                before = compiled.host_waits(), compiled.side_allocations()
            loop.run_step(rank, step)
        waits, sides = (_more(now, then) for now, then in zip(_counts(compiled), before, strict=True))
        if scenario.is_dropped:
            _drop(loop, model, optimizer, rank)
            del loop, model, optimizer, plain
            for _ in range(2):  # the first frees the model, which is in a cycle: only then zc lets go of the rest
                gc.collect()
            others = [torch.full((numel,), 7.0, device=device) for numel in (64, 256, 500) for _ in range(8)]
            del others
    simulated.synchronize()
    worst = (0.0, "nothing is left to compare")
    if not scenario.is_dropped:
        worst = _difference(model, expected, scenario.stage)
        if scenario.loop == "closed":
            zc.close(model)
        del model, optimizer, plain
    gc.collect()
    simulated.synchronize()
    compiled_error = compiled.error()
    assert not compiled_error, compiled_error
    tolerance = WIDE if "param_dtype" in options else TOLERANCE
    return Seen([str(race) for race in simulated.races()], worst, not worst[0] < tolerance, waits, sides)


def _counts(compiled: Any) -> tuple[dict[Any, int], dict[Any, int]]:
    return compiled.host_waits(), compiled.side_allocations()


def _more(now: dict[Any, int], then: dict[Any, int]) -> dict[Any, int]:
    return {key: n - then.get(key, 0) for key, n in now.items() if n > then.get(key, 0)}


def _difference(model: nn.Module, expected: dict[str, Tensor], stage: int) -> tuple[float, str]:
    import zc

    if stage:
        zc.synchronize(model)
    with zc.whole_parameters(model) if stage == 3 else contextlib.nullcontext():
        values = {name: param.detach().cpu() for name, param in model.named_parameters()}
    assert values.keys() == expected.keys()
    wanted = {name: value for name, value in expected.items() if value.numel()}
    differences = [(float((values[name] - value).abs().max()), name) for name, value in wanted.items()]
    return max(differences, key=lambda pair: (pair[0] != pair[0], pair[0]))  # NaN before all numbers


def _drop(loop: _Loop, model: nn.Module, optimizer: Any, rank: int) -> None:
    """The program lets go of a model whose backward, or forward, is under way, and its memory comes to somebody
    else."""
    import simulated

    with simulated.phase("last backward"):
        loss = loop.case.loss(model, loop._batch(rank, 99, 0))
        if loop.kind == "dropped":
            loss.backward()
    loop.model = loop.optimizer = None  # type: ignore[assignment]
    del model, optimizer


def train_all(rank: int, world_size: int, scenarios: list[Scenario]) -> list[Seen]:
    """Job: one after the other."""
    import simulated
    from rank_process import collect

    seen = []
    for scenario in scenarios:
        collect()
        simulated.install().clear()
        try:
            seen.append(train(rank, world_size, scenario))
        except Exception as error:
            raise RuntimeError(f"scenario {scenario}") from error
    return seen
