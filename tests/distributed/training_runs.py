"""Training loops that run inside a rank: the same loop with zc and with DDP, told apart by data alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from models import CASES, GPT, Case, cross_entropy, tokens
from oracle import train_ddp, weights, worst
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zc

CASES["gpt_short"] = Case(lambda: GPT(layers=1), tokens(), cross_entropy)  # where Inductor compiles each segment

DIFFERS_MOST = tuple[float, str]  # relative difference, and the parameter that has it


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


@dataclass(frozen=True)
class Run:
    """One training run: what `zc.compile` is given, and the loop around it. ``declared``: microbatches in no_sync."""

    case: str
    stage: int = 2
    backend: str = "eager"
    updates: int = 20
    microbatches: int = 1
    declared: bool = True
    make_optimizer: Callable[[nn.Module], Optimizer] = adamw
    max_norm: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def of(self) -> Case:
        return CASES[self.case]

    def batches(self, rank: int) -> list[list[Any]]:
        """[update][microbatch]"""
        make = self.of.batch
        return [[make(rank, step, m) for m in range(self.microbatches)] for step in range(self.updates)]

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        return self.of.loss(model, batch) / self.microbatches


def train_zc(run: Run, rank: int) -> tuple[nn.Module, Optimizer]:
    """Compiles and trains; the script's own loop, with zc's two lines in it."""
    torch.manual_seed(0)
    model = run.of.model()
    model, optimizer = zc.compile(
        model, run.make_optimizer(model), stage=run.stage, backend=run.backend, **{"bucket_nbytes": 8192, **run.options}
    )
    for microbatches in run.batches(rank):
        for k, batch in enumerate(microbatches):
            inside = run.declared and k < len(microbatches) - 1
            with zc.no_sync(model) if inside else contextlib.nullcontext():
                run.loss(model, batch).backward()
        if run.max_norm is not None:
            zc.clip_grad_norm_(model, run.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def zc_weights(rank: int, world_size: int, run: Run) -> dict[str, Tensor]:
    """Job: the weights after the run."""
    return weights(train_zc(run, rank)[0])


def ddp_weights(rank: int, world_size: int, run: Run) -> dict[str, Tensor]:
    """Job: the weights after the same loop under DDP, plain PyTorch, nothing compiled."""
    torch.manual_seed(0)

    def clip(model: nn.Module, optimizer: Optimizer) -> None:
        if run.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_norm)

    find_unused = bool(run.of.unused)
    weights, _ = train_ddp(
        run.of.model(), run.loss, run.make_optimizer, run.batches(rank), after_backward=clip, find_unused=find_unused
    )
    return weights


@cache
def ddp_reference(
    world_size: int,
    case: str,
    microbatches: int,
    updates: int,
    make_optimizer: Callable[..., Any],
    max_norm: float | None,
) -> dict[str, Tensor]:
    """DDP's weights, trained once for all the runs that are compared with it."""
    run = Run(case, microbatches=microbatches, updates=updates, make_optimizer=make_optimizer, max_norm=max_norm)
    return run_ranks(ddp_weights, world_size, run)[0]


def against_ddp(world_size: int, run: Run, timeout: float = 120.0) -> DIFFERS_MOST:
    """Trains ``run`` with zc; the largest relative difference of a parameter to DDP's, over all ranks."""
    wanted = ddp_reference(world_size, run.case, run.microbatches, run.updates, run.make_optimizer, run.max_norm)
    results = run_ranks(zc_weights, world_size, run, timeout=timeout)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in wanted), "ranks ended with different weights"
    return worst(results[0], wanted)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These variables inside, and after it what was there before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """What this rank starts through torch.distributed, in order, as ``name numel``; a send has its tag, too."""
    calls: list[str] = []
    names = ("isend", "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce", "broadcast")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {tensor.numel()}" + (f" tag {kwargs['tag']}" if "tag" in kwargs else ""))
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def message_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Class and text of the error that ``call`` raises; ("", "") where it raises none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the test compares it)
        return type(error).__name__, str(error)
    return "", ""
