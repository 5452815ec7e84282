"""The systems that bench/train.py can train with, one function each: zc, DDP, and no communication at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class System(NamedTuple):
    """A model ready to train, and what differs between systems."""

    model: nn.Module  # call it for the loss
    no_sync: Callable[[], AbstractContextManager[None]]  # around the backwards that are not the last before an update
    clip: Callable[[float], Tensor]  # max_norm -> the norm before, 0-d
    persistent_nbytes: Callable[[], dict[str, int]]  # by kind, after the first step


class Options(NamedTuple):
    """What the command line says about the system."""

    backend: str = "inductor"
    stage: int = 2
    param_dtype: torch.dtype | None = None
    bucket_nbytes: int = 25 * 2**20
    write_in_place: bool = True


def zc(model: nn.Module, optimizer: Optimizer, options: Options) -> System:
    import zc as _zc  # here, so that the other systems run without it

    _zc.compile(model, optimizer, **options._asdict())
    return System(
        model,
        no_sync=lambda: _zc.no_sync(model),
        clip=lambda max_norm: _zc.clip_grad_norm_(model, max_norm),
        persistent_nbytes=lambda: _zc.persistent_nbytes(model),
    )


def _stock(
    wrapped: nn.Module, model: nn.Module, optimizer: Optimizer, options: Options, *, has_buckets: bool
) -> System:
    def persistent_nbytes() -> dict[str, int]:
        params = sum(p.nbytes for p in model.parameters())
        states = (v for state in optimizer.state.values() for v in state.values())
        nbytes = {"params": params, "gradients": params}
        if has_buckets:  # DDP's own, beside the gradients
            nbytes["buckets"] = params
        nbytes["optimizer_state"] = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
        return nbytes

    return System(
        wrapped if options.backend == "eager" else torch.compile(wrapped, backend=options.backend),  # type: ignore
        no_sync=wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else nullcontext,
        clip=lambda max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        persistent_nbytes=persistent_nbytes,
    )


def ddp(model: nn.Module, optimizer: Optimizer, options: Options) -> System:
    """DDP; compiled as its documentation says, the wrapper, so that graphs are cut at its buckets."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=options.bucket_nbytes / 2**20)
    return _stock(wrapped, model, optimizer, options, has_buckets=True)


def ddp_view(model: nn.Module, optimizer: Optimizer, options: Options) -> System:
    """DDP whose gradients are views of its buckets: its smallest memory."""
    mb = options.bucket_nbytes / 2**20
    wrapped = DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True)
    return _stock(wrapped, model, optimizer, options, has_buckets=False)


def local(model: nn.Module, optimizer: Optimizer, options: Options) -> System:
    """Each rank for itself: the floor for a step's time. Its losses are not those of the others."""
    return _stock(model, model, optimizer, options, has_buckets=False)


SYSTEMS: dict[str, Callable[[nn.Module, Optimizer, Options], System]] = {
    "zc": zc,
    "ddp": ddp,
    "ddp-view": ddp_view,
    "local": local,
}
