"""Checks of options and plans that `zc.compile` and `zc.plan` make before anything is changed: against the ranks, the
optimizers' rules and the memory of this machine. Each raises its own PlanError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zc.config import Config
from zc.devices import free_nbytes
from zc.errors import PlanError
from zc.machine import available_nbytes, ranks_on_this_host
from zc.optim.assignment import Assignment, is_elementwise
from zc.optim.trials import state_keys
from zc.planning.allocations import resident
from zc.planning.layout import ALIGN_NBYTES, Rule, align_up
from zc.planning.plan import Plan
from zc.planning.traits import num_states


def check_replicas(config: Config, num_replicas: int) -> None:
    """Raises PlanError for options that a mesh of two dimensions excludes."""
    if num_replicas == 1:
        return
    shape = f"a mesh of two dimensions with {num_replicas} replicas"
    for option, name in config.encodings:
        raise PlanError(
            f"{option} and {shape}: these send sums back to each other in fp32. Leave {name} out, or give a mesh of "
            "one dimension, where each rank has a shard of its own"
        )
    if config.reduce != "exact":
        raise PlanError(
            f"reduce={config.reduce!r} and {shape}: replicas stay equal because their sums are made in one order; "
            "leave reduce at 'exact', or give a mesh of one dimension"
        )
    if config.offload is not None:
        raise PlanError(
            f"offload={config.offload!r} and {shape}: what is sharded inside `shard` alone is not offloaded yet; leave "
            "offload out, or give a mesh of one dimension, which shards over all ranks"
        )


def check_encodings(config: Config, dtypes: Mapping[str, torch.dtype], rules: Sequence[Rule]) -> None:
    """Raises PlanError for parameters, by name, and optimizers of which nothing can travel encoded
    (`zc.planning.wire`)."""
    wide = next((name for name, dtype in dtypes.items() if dtype == torch.float64), None)
    for option, name in config.encodings:
        if wide is not None:
            raise PlanError(f"{wide} is torch.float64, of which {option} would keep 8 bits: leave {name} out")
        if name == "gather_dtype" and any(rule.whole for rule in rules):
            raise PlanError(
                f"{option} and an optimizer that reads whole parameters: what a rank updates is then no shard, and "
                "goes to the shards as it is; leave gather_dtype out. reduce_dtype=torch.int8 works"
            )


def check_plan(plan: Plan) -> None:
    """Raises PlanError if a reduction would round sums, or gathered weights have too little room."""
    for bucket in plan.buckets:
        if bucket.acc_dtype == torch.float64 and bucket.reduce_dtype != torch.float64:
            raise PlanError(
                f"{bucket.slots[0].name} is {bucket.param_dtype} and its gradients are summed in float64, which "
                f"reduce_dtype={bucket.reduce_dtype} would round: leave reduce_dtype at None"
            )
        if not plan.placement.shards_gradients and bucket.reduce_dtype != bucket.acc_dtype:
            raise PlanError(
                f"stage 1 reduces sums in {bucket.acc_dtype}; reduce_dtype={bucket.reduce_dtype} would round them: "
                "leave reduce_dtype at None, or use stage 2"
            )
    if not plan.sharded:
        return
    if plan.placement.shards_weights and plan.offload is not None and plan.offload.state_on_disk:
        raise PlanError(
            "stage=3 and offload='disk': zc.flush_state compares checksums of whole weights, which no rank has; use "
            "offload='cpu', or stage=2"
        )
    largest = max(plan.sharded, key=lambda b: b.nbytes)
    if plan.weight_cap < (least := align_up(largest.nbytes, ALIGN_NBYTES)):
        raise PlanError(
            f"weight_nbytes={plan.weight_cap} is too small: the largest bucket ({largest.slots[0].name}, ...) has "
            f"{largest.nbytes} bytes of weights, so at least weight_nbytes={least} is needed; bucket_nbytes makes "
            "buckets smaller, down to the largest parameter"
        )


def check_scripts(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for a module of TorchScript with parameters whose bytes come when Python code reads them."""
    names = {param: name for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        own = {names[param] for param in module.parameters()}
        why = plan.why_sharded if own & plan.sharded_names else "overlap_gather=True" if plan.overlap_gather else None
        if own and why is not None:
            raise PlanError(
                f"{name or 'the model'} was made by torch.jit.script or torch.jit.trace, so its code in C++ reads "
                f"parameters before zc can bring them, as {why} must: leave the option out, or take the module as it "
                "was before torch.jit"
            )


def check_shards_fit(plan: Plan) -> None:
    """For a model on meta. Raises PlanError unless this rank's shards fit, with the gathered weights of one unit."""
    device = plan.buckets[0].device
    kinds, _, _ = resident(plan, [0] * plan.num_optimizers)
    counted = ("weight", "frozen", "master_shard", "arena")
    needed = {kind: kinds[kind] for kind in counted if kind in kinds}
    advice = "use more ranks, a smaller bucket_nbytes or weight_nbytes, or offload='cpu'"
    if device.type == "cpu":
        check_room("stage=3", needed, ranks_on_this_host(plan.world_size), available_nbytes(), advice)
    else:
        check_room("stage=3", needed, 1, free_nbytes(device), advice)


def check_host(plan: Plan, assignment: Assignment) -> None:
    """For offload, whose update runs on the processor. Raises PlanError unless its memory fits into the host's."""
    states = []
    for optimizer in assignment.optimizers:
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {name} was made with capturable=True, which keeps its state on the device; make it without"
            )
        states.append(len(state_keys(optimizer)) if is_elementwise(optimizer) else num_states(name))
    _, needed, _ = resident(plan, states)
    advice = "use more machines, or a smaller part (offload_accumulate='device')"
    check_room("offload", needed, ranks_on_this_host(plan.world_size), available_nbytes(), advice)


def check_room(option: str, needed: Mapping[str, int], num_ranks: int, available: int | None, advice: str) -> None:
    """Raises PlanError, with both figures, unless ``num_ranks`` times the bytes ``needed`` by kind fit; ``available``
    None: nobody knows."""
    total = num_ranks * sum(needed.values())
    if available is not None and total > available:
        kinds = ", ".join(f"{name} {nbytes:,}" for name, nbytes in needed.items() if nbytes)
        raise PlanError(
            f"{option} needs {total:,} bytes of memory for {num_ranks} rank(s) here ({kinds} for each), and "
            f"{available:,} are available: {advice}"
        )
