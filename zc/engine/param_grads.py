"""Checks and errors: what the caller may not do to ``param.grad`` and to the hooks on parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from zc import torch_private
from zc.errors import UncoveredGradientError, ZcError
from zc.planning.plan import Plan


def refuse_accumulate_hooks(params: Mapping[str, nn.Parameter]) -> None:
    """Raises ZcError for a post-accumulate-grad hook that is not ours."""
    for name, param in params.items():
        if torch_private.num_accumulate_hooks(param) > 1:  # one is ours
            raise ZcError(
                f"{name} has a post-accumulate-grad hook: it would find no gradient, since zc has moved it to its "
                "bucket. Use register_hook for this rank's gradient, or read param.grad after the backward"
            )


def check(
    params: Mapping[str, nn.Parameter],
    frozen: Mapping[str, nn.Parameter],
    grads: Mapping[str, Tensor],
    is_value: Callable[[str, Tensor], bool],
) -> None:
    """Raises UncoveredGradientError if a ``.grad`` is neither the one that zc has set nor a sharded value of this
    parameter, and ZcError if a frozen parameter requires a gradient."""
    for name, param in params.items():
        if (grad := param.grad) is not None and grad is not grads.get(name) and not is_value(name, grad):
            raise UncoveredGradientError(
                f"{name}.grad holds a full gradient that did not come through a backward of this model; zc trains "
                "from its own shards. Don't assign such a param.grad by hand: param.grad.copy_(whole) writes a tensor "
                "that all ranks have, torch.autograd.backward(parameters, gradients) adds gradients as a backward "
                "does, and values that were made of param.grad, such as param.grad * 0.5, can be assigned"
            )
    for name, param in frozen.items():
        if param.requires_grad:
            raise ZcError(
                f"parameter {name} requires a gradient now, and did not when the model was compiled, so no bucket has "
                "a place for it. Call zc.recompile(model) after requires_grad_; all other parameters keep their state"
            )


class Changes(NamedTuple):
    """What the caller has done to ``param.grad`` without calling zc, by bucket and slot."""

    cleared: list[tuple[int, int]]  # set to None by hand, or by torch's own model.zero_grad()
    assigned: list[tuple[int, int]]  # set to another tensor


def changes(
    plan: Plan, flags: Sequence[Sequence[bool]], params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
) -> Changes:
    """``flags``: which parameters have a gradient. ``grads``: the ``.grad`` of each that zc has set."""
    found = Changes([], [])
    for bucket, of_bucket in zip(plan.buckets, flags, strict=True):
        for k, slot in enumerate(bucket.slots):
            if slot.is_left:
                continue
            grad = params[slot.name].grad
            if grad is None and of_bucket[k]:
                found.cleared.append((bucket.index, k))
            elif grad is not None and grad is not grads[slot.name]:
                found.assigned.append((bucket.index, k))
    return found


def grads_differ(plan: Plan, own: Sequence[Sequence[bool]], of_any: Sequence[Sequence[bool]]) -> str:
    """The error for a loop over ``param.grad`` if ranks have one on different parameters. ``own``: whether this rank
    has it; ``of_any``: whether any rank does."""
    lacking = [
        slot.name
        for bucket, here, there in zip(plan.buckets, own, of_any, strict=True)
        for slot, is_here, is_anywhere in zip(bucket.slots, here, there, strict=True)
        if is_anywhere and not is_here
    ]
    where = f"here {', '.join(lacking[:5])} has none" if lacking else "here all have one, on another rank some lack it"
    return (
        "ranks have a param.grad on different parameters, so clipping or a norm over them would differ from rank to "
        f"rank: {where}. The last backward before it must not be inside zc.no_sync, and all ranks or none must have "
        "cleared gradients; or call zc.clip_grad_norm_"
    )


def refuse_compiled_autograd() -> None:
    """Compiled autograd traces through the backward's side effects and would drop them, so it is refused, not
    ignored."""
    if torch_private.compiled_autograd_is_on():
        raise ZcError(
            "compiled autograd is on: it bypasses the compiled backward's schedule. Turn it off "
            "(torch._dynamo.config.compiled_autograd = False); zc compiles the backward itself"
        )
