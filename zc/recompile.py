"""`zc.recompile`: the plan grows by what has become trainable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from zc import torch_private
from zc.checks import check_added, owners, trainable
from zc.errors import PlanError
from zc.planning.layout import Rule
from zc.planning.plan import Plan
from zc.prepare import check_wire, fill, fingerprint, plan_of
from zc.registry import sharded

if TYPE_CHECKING:
    from zc.config import Config


def recompile(model: nn.Module) -> None:
    """Plans the parameters that have become trainable since `compile` (``requires_grad_(True)``, deepspeed#5639),
    between two updates, on all ranks. Everything else keeps its place: weights, optimizer state, and schedules. A
    parameter that was frozen since needs no call, it just gets no gradient.

    One optimizer must hold the new parameters: from its construction on, or by ``optimizer.add_param_group`` before
    this call.

    Raises:
        PlanError, TypeError: as `compile`; nothing has changed. RankMismatchError: ranks differ in what is trainable.
    """
    found = sharded(model)
    runtime, config = found.runtime, found.runtime.config
    params: dict[str, nn.Parameter] = {}
    optimizers = [each.optimizer for each in found.optimizers]
    plan, failure = runtime.plan, None
    try:
        if config.offload is not None:
            raise PlanError(
                f"zc.recompile does not work with offload={config.offload!r} yet: make the plan with all parameters"
            )
        params = {n: p for n, p in trainable(model).items() if n not in runtime.params}
        check_added(params, optimizers, plan.buckets[0].device)
        plan = _extended(plan, params, config, owners(params, optimizers), [each.rule for each in found.optimizers])
    except (PlanError, TypeError) as error:
        failure = error
    runtime.group.agree_on(failure)
    runtime.group.same_everywhere(
        "the set of trainable parameters",
        fingerprint(model, config, optimizers, owners(params, optimizers)),
        "Freeze and unfreeze the same parameters on all ranks",
    )
    if not params:
        return
    added = plan.buckets[len(runtime.plan.buckets) :]
    runtime.grow(plan, params)
    fill(runtime, added)
    found.adopt(added)
    if plan.overlap_gather:
        runtime.weights.count_sharing()
    for name in params:
        runtime.frozen.pop(name, None)
    if config.backend != "eager":
        torch_private.raise_recompile_limit(model)


def _extended(
    plan: Plan, params: dict[str, nn.Parameter], config: Config, numbers: Mapping[str, int], rules: Sequence[Rule]
) -> Plan:
    """``plan`` with buckets for ``params`` behind its own."""
    if not params:
        return plan
    behind = plan_of(params, config, plan.world_size, numbers, rules, plan, plan.topology, plan.num_replicas)
    check_wire(behind)
    moved = (replace(b, index=b.index + len(plan.buckets)) for b in behind.buckets)
    return replace(plan, buckets=(*plan.buckets, *moved))
