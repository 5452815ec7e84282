"""What the caller did with ``param.grad`` and with hooks on parameters: noticed where it can be, refused where not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from zc import backend
from zc.errors import UncoveredGradientError, ZcError
from zc.ops import GradientOps
from zc.plan import Plan


def refuse_accumulate_hooks(params: Mapping[str, nn.Parameter]) -> None:
    """Raises ZcError for a post-accumulate-grad hook that is not ours."""
    for name, param in params.items():
        if backend.num_accumulate_hooks(param) > 1:  # one is ours
            raise ZcError(
                f"{name} has a post-accumulate-grad hook: it would find no gradient, which has left for its bucket "
                "by then. Use register_hook for this rank's gradient, or read param.grad after the backward"
            )


def check(
    params: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter], is_shown: Callable[[str, Tensor], bool]
) -> None:
    """Raises UncoveredGradientError for a gradient that is not one of our ShardedGrads (``is_shown``), ZcError for a
    parameter of ``frozen`` that asks for one."""
    for name, param in params.items():
        if param.grad is not None and not is_shown(name, param.grad):
            raise UncoveredGradientError(
                f"{name}.grad holds a full gradient that did not come through a backward of this model; zc trains "
                "from its own shards: don't assign param.grad by hand"
            )
    for name, param in frozen.items():
        if param.requires_grad:
            raise ZcError(
                f"parameter {name} asks for a gradient, and had none to get when the model was compiled: no bucket "
                "has a place for it. Call zc.recompile(model) after requires_grad_; the state of all others is kept"
            )


def cleared(plan: Plan, ops: GradientOps, params: Mapping[str, nn.Parameter]) -> list[tuple[int, int]]:
    """(bucket, slot) whose accumulator has a gradient that the caller has dropped: ``param.grad = None`` by hand, or
    the stock model.zero_grad()."""
    return [
        (bucket.index, k)
        for bucket in plan.buckets
        for k, slot in enumerate(bucket.slots)
        if ops.touched[bucket.index][k] and params[slot.name].grad is None
    ]
