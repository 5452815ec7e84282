"""Functions on the gradients of a compiled model. Every rank must call them."""

from __future__ import annotations

from torch import Tensor, nn

from zc.registry import sharded


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their joint 2-norm is at most ``max_norm``; one collective.

    Returns the norm before, fp32, 0-d: the norm of the mean gradient over all ranks, each element counted once, as
    `torch.nn.utils.clip_grad_norm_` gives it under DDP. A NaN or infinity stays one.
    """
    return sharded(model).grad_shards.clip_grad_norm_(float(max_norm))


def grads_are_finite(model: nn.Module) -> bool:
    """Whether all gradients of all ranks are finite: no infinity, no NaN. The same answer on every rank.

    Every rank must call it. It shares its one collective with clipping, and waits for the device.
    """
    return sharded(model).grad_shards.are_finite()


def full_grad(model: nn.Module) -> dict[str, Tensor | None]:
    """Every trainable parameter's reduced gradient, gathered on all ranks, in the parameter's shape and the
    accumulator's dtype; None where no rank has one. For inspection, not for training: it holds all gradients at
    once."""
    compiled = sharded(model)
    gathered: dict[str, Tensor | None] = {}
    for bucket in compiled.runtime.plan.buckets:
        gathered.update(compiled.grad_shards.full_grads(bucket))
    return {name: gathered[name] for name in compiled.runtime.params}
