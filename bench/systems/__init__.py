"""The systems that bench/train.py can train with, one function each: zc, DDP, and no communication at all; the others
stand in bench/systems/peers.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bench.cases.models import param_groups
from zc.planning.packing import default_nbytes


@dataclass(frozen=True)
class AdamW:
    """The optimizer that every system trains with: torch's AdamW in its fused form, matrices decay."""

    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)

    def options(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": self.betas, "fused": True}

    def make(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(param_groups(model, self.weight_decay), **self.options())


@dataclass(frozen=True)
class MuonAndAdamW(AdamW):
    """Muon for the matrices inside blocks, AdamW for the rest. ``match_rms_adamw`` lets both have one learning rate
    (Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982)."""

    def make_several(self, model: nn.Module) -> list[Optimizer]:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if n.startswith("blocks.") and p.dim() == 2]
        known = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in known]
        groups = [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        muon = torch.optim.Muon(matrices, lr=self.lr, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(groups, **self.options())]


def optimizers_of(model: nn.Module, given: AdamW) -> list[Optimizer]:
    """What the systems train with that take any of torch's optimizers."""
    return given.make_several(model) if isinstance(given, MuonAndAdamW) else [given.make(model)]


@dataclass(frozen=True)
class Options:
    """What the command line says about the system."""

    backend: str = "inductor"
    stage: int = 2
    param_dtype: torch.dtype | None = None  # of the weights; masters stay fp32 (zc)
    bucket_nbytes: int | None = None  # the same for all systems; None: what zc would take (`bucket_limit`)
    reduce: str = "exact"
    reduce_dtype: torch.dtype | None = None  # of gradients between hosts (zc)
    gather_dtype: torch.dtype | str | None = None  # of differences of weights between hosts (zc)
    offload: str | None = None
    overlap_gather: bool = False
    write_in_place: bool = False
    compute_dtype: torch.dtype | None = None  # bf16 by each peer's own means: autocast, a policy, an engine's option
    accum: int = 1
    clip: float = 0.0


def _backward(loss: Tensor, is_last: bool) -> None:
    loss.backward()


@dataclass(frozen=True)
class System:
    """A model ready to train, and what differs between systems."""

    model: nn.Module  # call it for the loss
    optimizer: Optimizer  # its groups hold the learning rate; the first one of several
    clip: Callable[[float], Tensor]  # max_norm -> the norm before, 0-d
    persistent_nbytes: Callable[[], dict[str, int]]  # by kind, after the first step; reckoned, not measured
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext  # around a step's backwards but the last
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the forward
    backward: Callable[[Tensor, bool], None] = _backward  # of one microbatch; whether it is the step's last
    step: Callable[[], None] | None = None  # update and clear the gradients; None: the optimizer's own two calls
    unseen_nbytes: int = 0  # lasting buffers that no Python object holds (DDP's buckets)
    others: Sequence[Optimizer] = ()  # behind the first

    def update(self) -> None:
        if self.step is not None:
            self.step()
            return
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer, *self.others]


def autocast(options: Options, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """fp32 weights, bf16 matmuls: what DDP's users do for bf16 (torch.amp)."""
    if options.compute_dtype is None:
        return nullcontext
    return partial(torch.autocast, next(model.parameters()).device.type, dtype=options.compute_dtype)


def zc(model: nn.Module, adamw: AdamW, options: Options) -> System:
    import zc as _zc  # here, so that the other systems run without it

    optimizers = optimizers_of(model, adamw)
    _zc.compile(
        model,
        optimizers if len(optimizers) > 1 else optimizers[0],
        stage=options.stage,
        param_dtype=options.param_dtype or options.compute_dtype,
        bucket_nbytes=options.bucket_nbytes,
        reduce=options.reduce,
        reduce_dtype=options.reduce_dtype,
        gather_dtype=options.gather_dtype,
        offload=options.offload,
        overlap_gather=options.overlap_gather,
        write_in_place=options.write_in_place,
        backend=options.backend,
    )
    return System(
        model,
        optimizers[0],
        others=optimizers[1:],
        no_sync=lambda: _zc.no_sync(model),
        clip=lambda max_norm: _zc.clip_grad_norm_(model, max_norm),
        persistent_nbytes=lambda: _zc.persistent_nbytes(model),
    )


def stock(
    wrapped: nn.Module,
    model: nn.Module,
    optimizer: Optimizer,
    options: Options,
    *,
    unseen_nbytes: int = 0,
    others: Sequence[Optimizer] = (),
) -> System:
    """Systems whose loop is PyTorch's own; compiled unless the backend is eager."""

    def persistent_nbytes() -> dict[str, int]:
        params = sum(p.nbytes for p in model.parameters())
        states = (v for o in (optimizer, *others) for state in o.state.values() for v in state.values())
        nbytes = {"params": params, "gradients": params}
        if unseen_nbytes:
            nbytes["buckets"] = unseen_nbytes
        nbytes["optimizer_state"] = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
        return nbytes

    return System(
        wrapped if options.backend == "eager" else torch.compile(wrapped, backend=options.backend),  # type: ignore
        optimizer,
        no_sync=wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else nullcontext,
        precision=autocast(options, model),
        clip=lambda max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        persistent_nbytes=persistent_nbytes,
        unseen_nbytes=unseen_nbytes,
        others=others,
    )


def bucket_limit(model: nn.Module, options: Options, itemsize: int) -> int:
    """Bytes of a bucket of gradients with ``itemsize`` bytes an element."""
    sizes = [p.numel() * itemsize for p in model.parameters() if p.requires_grad]
    return options.bucket_nbytes or default_nbytes(sizes)


def wrap_in_ddp(model: nn.Module, options: Options, *, view: bool) -> DistributedDataParallel:
    mb = bucket_limit(model, options, next(model.parameters()).element_size()) / 2**20
    return DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=view)


def ddp(model: nn.Module, adamw: AdamW, options: Options) -> System:
    """DDP; compiled as its documentation says, the wrapper, so that graphs are cut at its buckets."""
    wrapped, nbytes = wrap_in_ddp(model, options, view=False), sum(p.nbytes for p in model.parameters())
    first, *others = optimizers_of(model, adamw)
    return stock(wrapped, model, first, options, unseen_nbytes=nbytes, others=others)


def ddp_view(model: nn.Module, adamw: AdamW, options: Options) -> System:
    """DDP whose gradients are views of its buckets: its smallest memory. The buckets outlive the gradients, and stay
    visible from Python, since the optimizer has looked at the views."""
    first, *others = optimizers_of(model, adamw)
    return stock(wrap_in_ddp(model, options, view=True), model, first, options, others=others)


def local(model: nn.Module, adamw: AdamW, options: Options) -> System:
    """Each rank for itself: the floor for a step's time. Its losses are not those of the others."""
    first, *others = optimizers_of(model, adamw)
    return stock(model, model, first, options, others=others)
