"""Jobs that train, save and load inside ranks, and what they report: this rank's parts, put together by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import CASES, Case, mean_square, mlp, vectors
from torch import Tensor, nn
from torch.optim import Optimizer
from training_runs import adamw

import zc
from zc.registry import sharded


def matrices() -> nn.Module:
    """Muon takes nothing else. 33 rows are cut by every number of ranks."""
    return nn.Sequential(nn.Linear(16, 33, bias=False), nn.Tanh(), nn.Linear(33, 16, bias=False))


def narrow_mlp() -> nn.Module:
    """The names of the "mlp" case, and another shape between."""
    model = mlp()
    first, _, last = (m for m in model.modules() if not list(m.children()))
    first.weight, first.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8))
    last.weight = nn.Parameter(torch.randn(16, 8))
    return model


class Vocabulary(nn.Module):
    """GPT-2's vocabulary, which no number of ranks divides (deepspeed#5105)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50257, 3), nn.Linear(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed((x.abs() * 9000).long() % 50257).mean(-2))
        return out


CASES["matrices"] = Case(matrices, vectors(), mean_square)
CASES["narrow_mlp"] = Case(narrow_mlp, vectors(), mean_square)
CASES["vocabulary"] = Case(Vocabulary, vectors(), mean_square)

Part = tuple[int, Tensor]  # first element and values, 1-D, of a parameter or of one of its states


@dataclass(frozen=True)
class Job:
    """``case`` with these options; ``given`` overrides the model."""

    case: str = "gpt_tied"
    make_optimizer: Callable[[nn.Module], Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def compiled(self) -> tuple[nn.Module, Optimizer]:
        options = {"backend": "eager", "bucket_nbytes": 4096, **self.options}
        model = CASES[self.case].model(self.seed)
        return zc.compile(model, self.make_optimizer(model), **options)

    def step(self, model: nn.Module, optimizer: Optimizer, step: int, rank: int = 0) -> float:
        """One update on the batch of ``step``; the same on every rank, so that W changes no sum but its rounding."""
        case = CASES[self.case]
        loss = case.loss(model, case.batch(rank, step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def steps(self, model: nn.Module, optimizer: Optimizer, first: int, stop: int, rank: int = 0) -> list[float]:
        return [self.step(model, optimizer, step, rank) for step in range(first, stop)]


def parts(model: nn.Module, optimizer: Optimizer) -> dict[str, Part]:
    """This rank's masters (``name``) and states (``name/key``), read from the optimizer's own slices and the layout."""
    compiled = sharded(model)
    by_name: dict[str, Part] = {}
    for bucket in compiled.runtime.plan.buckets:
        for slot in bucket.slots:
            first, stop = bucket.layout.owned(slot, compiled.runtime.group.rank)
            if first == stop:
                continue
            mine = compiled.optimizers[bucket.optimizer].slices[slot.name]
            by_name[slot.name] = (first - slot.offset, mine.detach().reshape(-1).clone())
            for key, value in optimizer.state[mine].items():
                whole = isinstance(value, Tensor) and value.shape == mine.shape
                values = value.reshape(-1).clone() if whole else torch.as_tensor(value).reshape(-1).double()
                by_name[f"{slot.name}/{key}"] = (first - slot.offset if whole else 0, values)
    return by_name


def joined(ranks: list[dict[str, Part]]) -> dict[str, Tensor]:
    """Whole 1-D tensors from all ranks' parts; scalars must be the same on every rank that has them."""
    by_name: dict[str, dict[int, Tensor]] = {}
    for rank in ranks:
        for name, (start, values) in rank.items():
            first = by_name.setdefault(name, {}).setdefault(start, values)
            assert torch.equal(first, values), f"{name} differs between ranks"
    return {name: torch.cat([chunks[start] for start in sorted(chunks)]) for name, chunks in by_name.items()}


def train_and_save(rank: int, world_size: int, job: Job, path: Path, steps: int) -> dict[str, Any]:
    """Job: ``steps`` updates, a save, and 5 more."""
    model, optimizer = job.compiled()
    losses = job.steps(model, optimizer, 0, steps)
    poison_padding(model)
    saved = parts(model, optimizer)
    zc.save(path, model, optimizer, extra={"step": steps, "rank": rank})
    losses += job.steps(model, optimizer, steps, steps + 5)
    return {"saved": saved, "losses": losses, "end": parts(model, optimizer)}


def load_and_train(rank: int, world_size: int, job: Job, path: Path, again: Path | None = None) -> dict[str, Any]:
    """Job: a model of another seed, the checkpoint, a save of what was loaded to ``again``, and 5 updates."""
    model, optimizer = job.compiled()
    extra = zc.load(path, model, optimizer)
    loaded = parts(model, optimizer)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    if again is not None:
        poison_padding(model)
        zc.save(again, model, optimizer, extra=extra)
    losses = job.steps(model, optimizer, extra["step"], extra["step"] + 5)
    report = {"loaded": loaded, "extra": extra, "losses": losses, "end": parts(model, optimizer)}
    return {**report, "weights": weights, "buffers": buffers}


def poison_padding(model: nn.Module) -> None:
    """NaN in every element of the masters that belongs to no parameter (deepspeed#5105: padding came back as data)."""
    runtime = sharded(model).runtime
    for bucket, master in zip(runtime.plan.buckets, runtime.buffers.master_shard, strict=True):
        start, stop = bucket.layout.owned_range(runtime.group.rank)
        used = torch.zeros(stop - start, dtype=torch.bool)
        for slot in bucket.slots:
            first, last = bucket.layout.owned(slot, runtime.group.rank)
            used[first - start : last - start] = True
        master[~used] = float("nan")
