"""The table of training loops: what a row is, and the side of a row that its loop sees.

A row is a model, a loop, and what must come out: the weights (and whatever the loop notes) of the same loop in plain
PyTorch, in float64, its gradients averaged over ranks before each step; or an error. The loop is one function, run
unchanged for both sides, so a row can't compare two different programs. `run_rows.py` runs rows; the files
``rows_*.py`` hold them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import mlp, seeded
from rows_stage_3 import error_in_stage_3
from tiers import FULL
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zc

BACKENDS = ("eager", "aot_eager", "inductor")
STAGES = (1, 2, 3)
STEPS = 5 if FULL else 4
DIM = 16


def adamw(params: Iterable[Any]) -> Optimizer:
    """With an eps as large as gradients are: else their scale, such as a sum for a mean, would change no weight."""
    return AdamW(params, lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def sgd(params: Iterable[Any]) -> Optimizer:
    return SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)


@dataclass
class Script:
    """What a loop may use. ``model`` and ``optimizer`` are its own, compiled by zc or plain."""

    model: Any
    optimizer: Any
    rank: int
    world_size: int
    dtype: torch.dtype
    is_zc: bool
    backend: str = ""
    stage: int | None = None  # None: plain
    seen: dict[str, Tensor] = field(default_factory=dict)

    def batch(self, step: int, microbatch: int = 0, num: int = 4, dim: int = DIM) -> tuple[Tensor, Tensor]:
        """(x, y), each [num, dim]; every rank, step and microbatch has its own."""
        generator = seeded(self.rank, step, microbatch)
        x, y = (torch.randn(num, dim, generator=generator) for _ in range(2))
        return x.to(self.dtype), y.to(self.dtype)

    def loss(self, step: int, microbatch: int = 0, num: int = 4) -> Tensor:
        x, y = self.batch(step, microbatch, num)
        return F.mse_loss(self.model(x), y)

    def update(self) -> None:
        for optimizer in several(self.optimizer):
            optimizer.step()
        for optimizer in several(self.optimizer):
            optimizer.zero_grad()

    def note(self, name: str, value: Any) -> None:
        """A number that must be the same on both sides."""
        self.seen[name] = torch.as_tensor(value).detach().double().clone()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return zc.no_sync(self.model) if self.is_zc else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Raw reads of parameters follow (overlap_gather)."""
        if self.is_zc:
            zc.synchronize(self.model)

    def reduced(self) -> None:
        """From here on gradients are read: DDP has averaged them by now, zc does so by itself."""
        for optimizer in () if self.is_zc else several(self.optimizer):
            average(optimizer)

    def grad(self, param: nn.Parameter) -> Tensor:
        """The whole mean gradient."""
        assert param.grad is not None
        return param.grad.full_tensor() if self.is_zc else param.grad  # type: ignore[attr-defined, no-any-return]

    def compile_too(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        """Makes a second model and optimizer what the first ones are."""
        if self.is_zc:
            zc.compile(model, optimizer, backend=self.backend, bucket_nbytes=512, **options)
        else:
            make_plain(model, optimizer)


def several(optimizer: Any) -> list[Optimizer]:
    """One, or those in a list, tuple or dict."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    return list(optimizer.values() if isinstance(optimizer, dict) else optimizer)


def make_plain(model: nn.Module, optimizer: Any) -> None:
    """The oracle: data parallelism written out, in two lines of plain PyTorch and no bucket, stage or dtype."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    for each in several(optimizer):
        each.register_step_pre_hook(lambda *_, each=each: average(each))


@torch.no_grad()
def average(optimizer: Optimizer) -> None:
    """Each gradient becomes its mean over ranks; one that some rank lacks counts as zeros there, one that all lack
    stays None. Averaging a mean changes nothing."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    num_there = torch.tensor([param.grad is not None for param in params]).int()
    dist.all_reduce(num_there)
    for param, num in zip(params, num_there.tolist(), strict=True):
        if num:
            grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()


def plain(s: Script) -> None:
    """The loop of the README."""
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()


Loop = Callable[[Script], None]


@dataclass(frozen=True)
class Row:
    """``refused``: where -> the error's class and words of it; where is "always", "eager", "compiled", "stage 1" or
    "stage 2". ``needs``: a package without which the row is skipped. ``full_only``: runs in the full tier alone, since
    another row or test shows the same. ``note``: shown in the table. ``options`` of `zc.compile`; one that is a
    function is called in the rank."""

    name: str
    item: int
    loop: Loop
    make: Callable[[], nn.Module] = mlp
    optimizer: Callable[[Iterable[Any]], Any] = adamw  # one, or several in a list, tuple or dict
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 2e-5
    oracle_dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    full_only: bool = False
    note: str = ""

    def error(self, backend: str, stage: int) -> str | None:
        """What this cell raises; None where it is right."""
        kind = "eager" if backend == "eager" else "compiled"
        if stage == 3 and (error := error_in_stage_3(self.name, backend)) is not None:
            return error
        for where in ("always", kind, f"stage {stage}", backend):
            if where in self.refused:
                return self.refused[where]
        return None


ROWS: dict[str, Row] = {}


def row(item: int, name: str, **options: Any) -> Callable[[Loop], Loop]:
    """Puts the decorated loop into the table."""

    def put(loop: Loop) -> Loop:
        add(Row(name, item, loop, **options))
        return loop

    return put


def add(new: Row) -> None:
    assert new.name not in ROWS, f"two rows are named {new.name}"
    ROWS[new.name] = new
