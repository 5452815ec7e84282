"""`zc.recompile`: takes parameters that became trainable into the plan, and those that have replaced others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from zc import guards
from zc.checks import check_added, check_plan, check_shared, left_to_ranks, owners_of, trainable
from zc.compiler.blocks import find_again
from zc.errors import PlanError
from zc.fill import broadcast, fill
from zc.optim.assignment import Assignment
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

    A parameter that has replaced another one under its name (a new layer, a resized embedding) is a new one. The old
    one loses its place and its optimizer state, and stays a plain tensor with its last values. The old place in a
    bucket is not used again; `close` and `compile` make a plan without it.

    Raises:
        PlanError, TypeError: as `compile`; nothing has changed. RankMismatchError: ranks differ in what is trainable.
    """
    compiled = sharded(model)
    with compiled.runtime.weights.named_plainly():
        _recompile(model, compiled)


def _recompile(model: nn.Module, compiled: ShardedModel) -> None:
    runtime, config, ranks = compiled.runtime, compiled.runtime.config, compiled.runtime.group
    with ranks.refuse_together():
        if config.offload is not None:
            raise PlanError(
                f"zc.recompile does not work with offload={config.offload!r} yet: unfreeze all parameters before "
                "zc.compile"
            )
        left = _replaced(model, runtime.placed)
        known = {id(param) for param in runtime.params.values()}
        params = {n: p for n, p in trainable(model).items() if id(p) not in known}
        optimizers = tuple(sharded_optimizer.optimizer for sharded_optimizer in compiled.optimizers)
        check_shared(model, params)
        check_added(params, optimizers, runtime.plan.buckets[0].device)
        rules = tuple(sharded_optimizer.rule for sharded_optimizer in compiled.optimizers)
        added = Assignment(compiled.container, optimizers, rules, params, owners_of(params, optimizers))
        plan = _longer_plan(model, runtime.plan.without(left), added, config, ranks)
    ranks.same_everywhere(
        "the set of trainable parameters",
        [*fingerprint(model, config, added), *(f"{name} was replaced" for name in left)],
        "Freeze, unfreeze and replace the same parameters on all ranks",
    )
    if not params and not left:
        guards.remember_names(model, runtime)
        return
    buckets = plan.buckets[len(runtime.plan.buckets) :]
    weights, moved = runtime.weights, params.keys() - left.keys()
    with weights.leaving(moved, left):
        if left:
            weights.synchronize()
            runtime.leave(left)
        runtime.grow(plan, params)
        fill(runtime, buckets)
    compiled.leave(left)
    compiled.adopt(buckets)
    find_again(runtime.block_places)
    weights.install_hooks(model)
    frozen = {n: p for n, p in model.named_parameters() if runtime.params.get(n) is not p}
    known = {id(param) for param in runtime.frozen.values()}
    own = left_to_ranks(model)
    broadcast([p for n, p in frozen.items() if id(p) not in known and n not in own], ranks)
    runtime.frozen.clear()
    runtime.frozen.update(frozen)
    guards.remember_names(model, runtime)


def _replaced(model: nn.Module, placed: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of ``placed`` whose names other parameters have now."""
    names = {param: name for name, param in model.named_parameters()}
    now = dict(model.named_parameters(remove_duplicate=False))
    replaced = {name: param for name, param in placed.items() if now.get(name, param) is not param}
    for name, param in replaced.items():
        if param in names:
            raise PlanError(
                f"parameter {name} is called {names[param]} now, and {name} is another one: zc.recompile takes new "
                "parameters under old names, and moves none. Put it back, or call zc.close(model) and compile again"
            )
    return replaced


def _longer_plan(model: nn.Module, plan: Plan, added: Assignment, config: Config, ranks: Group) -> Plan:
    """``plan`` with buckets for the parameters of ``added`` after its own."""
    if not added.params:
        return plan
    longer = plan_of(model, added, config, ranks, plan)
    check_plan(longer)
    moved = (replace(b, index=b.index + len(plan.buckets)) for b in longer.buckets)
    shorter = plan.without(added.params)
    return replace(shorter, buckets=(*shorter.buckets, *moved))
