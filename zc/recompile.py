"""`zc.recompile`: adds parameters that became trainable to the plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from zc.checks import check_added, owners_of, trainable
from zc.engine.sharded_weights import ShardedWeights, named_plainly
from zc.errors import PlanError
from zc.fill import fill
from zc.optim.assignment import Assignment
from zc.plan_checks import check_plan
from zc.planning.frozen import without_moved
from zc.planning.plan import Plan
from zc.prepare import fingerprint, plan_of
from zc.ranks.group import Group
from zc.registry import sharded

if TYPE_CHECKING:
    from zc.config import Config
    from zc.optim.model import ShardedModel


def recompile(model: nn.Module) -> None:
    """Plans the parameters that became trainable after `compile` (``requires_grad_(True)``, deepspeed#5639). All ranks
    call it, between two updates. Everything else keeps its place: weights, optimizer state, and schedules. Freezing a
    parameter needs no call; it just gets no gradient.

    One optimizer must hold the new parameters: from its construction on, or by ``optimizer.add_param_group`` before
    this call.

    Raises:
        PlanError, TypeError: as `compile`; nothing has changed. RankMismatchError: ranks differ in what is trainable.
    """
    compiled = sharded(model)
    with named_plainly(compiled.runtime.weights):
        _recompile(model, compiled)


def _recompile(model: nn.Module, compiled: ShardedModel) -> None:
    runtime, config, ranks = compiled.runtime, compiled.runtime.config, compiled.runtime.group
    with ranks.raise_together():
        if config.offload is not None:
            raise PlanError(
                f"zc.recompile does not work with offload={config.offload!r} yet: unfreeze all parameters before "
                "zc.compile"
            )
        params = {n: p for n, p in trainable(model).items() if n not in runtime.params}
        optimizers = tuple(sharded_optimizer.optimizer for sharded_optimizer in compiled.optimizers)
        check_added(params, optimizers, runtime.plan.buckets[0].device)
        rules = tuple(sharded_optimizer.rule for sharded_optimizer in compiled.optimizers)
        added = Assignment(compiled.container, optimizers, rules, params, owners_of(params, optimizers))
        plan = _longer_plan(model, runtime.plan, added, config, ranks)
    ranks.same_everywhere(
        "the set of trainable parameters",
        fingerprint(model, config, added),
        "Freeze and unfreeze the same parameters on all ranks",
    )
    if not params:
        return
    buckets = plan.buckets[len(runtime.plan.buckets) :]
    weights = runtime.weights
    with weights.leaving(params) if isinstance(weights, ShardedWeights) else nullcontext():
        runtime.grow(plan, params)
        fill(runtime, buckets)
    compiled.adopt(buckets)
    if isinstance(weights, ShardedWeights):
        runtime.weights.install_hooks(model)
    if plan.overlap_gather:
        runtime.weights.count_sharing()
    for name in params:
        runtime.frozen.pop(name, None)


def _longer_plan(model: nn.Module, plan: Plan, added: Assignment, config: Config, ranks: Group) -> Plan:
    """``plan`` with buckets for the parameters of ``added`` after its own."""
    if not added.params:
        return plan
    longer = plan_of(model, added, config, ranks, plan)
    check_plan(longer)
    moved = (replace(b, index=b.index + len(plan.buckets)) for b in longer.buckets)
    return replace(without_moved(plan, frozenset(added.params)), buckets=(*plan.buckets, *moved))
