"""Functions on the gradients of a compiled model. Every rank must call them."""

from __future__ import annotations

import math

from torch import Tensor, nn

from zc.registry import sharded


def count(model: nn.Module, num_tokens: float | Tensor) -> None:
    """The loss of one backward is a sum over ``num_tokens`` tokens (or samples, or their weights): gradients become the
    mean over the tokens of all ranks and all backwards of the update, whose numbers need not be known before::

        for batch in microbatches:
            zc.count(model, batch.labels.ne(-100).sum())
            cross_entropy(model(batch.inputs), batch.labels, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()

    A mean of means, of ranks or microbatches, weighs a token by how few others its microbatch has
    (https://huggingface.co/blog/gradient_accumulation). Call it once for each backward, before or after it, after
    ``zero_grad()``; on every rank that has a backward, or on none. It exchanges nothing: the counts travel with what
    ranks tell each other before an update. Clipping, norms and ``param.grad`` see the mean over tokens.

    Args:
        num_tokens: at least 0. Of a tensor on a device, the host waits for it.

    Raises:
        ValueError: ``num_tokens`` is negative or not finite. The next read of gradients or ``step()`` raises ZcError,
        on all ranks and before anything changes, if a backward was not counted once, or if the counts add up to 0; so
        does a backward that would add to gradients that are divided already.
    """
    number = float(num_tokens)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"zc.count takes a finite number of tokens, at least 0, not {number}")
    sharded(model).runtime.count_tokens(number)


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
