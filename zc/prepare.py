"""From the arguments of `zc.compile` to a checked request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zc import kernels
from zc.checks import check, check_encodings, check_module, check_optimizers, check_replicas, owners_of, shardable
from zc.config import Config
from zc.engine import param_grads
from zc.errors import PlanError
from zc.machine import available_nbytes, check_room, note_of_connections, ranks_on_this_host
from zc.offload.disk import open_file, state_keys
from zc.optim.assignment import Assignment, listed
from zc.optim.kinds import ELEMENTWISE, is_elementwise, note_of, rule_of, try_out
from zc.optim.param_writes import note_of_shared
from zc.planning.blocks import find_kinds
from zc.planning.frozen import with_frozen
from zc.planning.layout import ALIGN_NBYTES, align_up, own_strides
from zc.planning.nbytes import STATES, resident
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan
from zc.planning.topology import usable
from zc.ranks.group import Group
from zc.registry import COMPILED

if TYPE_CHECKING:
    from zc.offload.disk_file import StateFile


@dataclass(frozen=True)
class Request:
    """What `zc.compile` was asked for, resolved and checked on this rank. Nothing has changed yet, but for the files of
    offload="disk"."""

    model: nn.Module
    config: Config
    assignment: Assignment
    plan: Plan
    state_file: StateFile | None

    @property
    def device(self) -> torch.device:
        return self.plan.buckets[0].device

    def discard(self) -> None:
        """Undoes what `resolve` did to files."""
        if self.state_file is not None:
            self.state_file.discard()


def resolve(model: nn.Module, optimizer: Any, options: Mapping[str, Any], ranks: Group) -> Request:
    """Makes every check that a rank can make by itself. Raises PlanError or TypeError."""
    config = Config(**options)
    check_module(model)
    if model in COMPILED:
        raise PlanError(f"this {type(model).__name__} is compiled already: call zc.compile once, before the loop")
    assignment = assign(model, optimizer)
    param_grads.refuse_compiled_autograd()
    device = next(iter(assignment.params.values())).device if config.offload is None else torch.device("cpu")
    for each in assignment.optimizers:
        try_out(each, ranks.shard.world_size, device)
    check_replicas(config, ranks.num_replicas)
    plan = plan_of(model, assignment, config, ranks)
    check_wire(plan)
    check_weights(plan)
    if plan.offload is not None:
        check_host(plan, assignment)
    return Request(model, config, assignment, plan, _open_state_file(config, ranks.rank, plan, assignment))


def assign(model: nn.Module, optimizer: Any) -> Assignment:
    """Finds the optimizer and the rule of each trainable parameter."""
    optimizers = listed(optimizer)
    params = check(model)
    check_optimizers(model, params, optimizers)
    rules = tuple(rule_of(each) for each in optimizers)
    return Assignment(optimizer, optimizers, rules, params, owners_of(params, optimizers))


@contextmanager
def on_all_ranks(ranks: Group) -> Iterator[None]:
    """The body succeeds on all ranks, or raises on each: its own error where it failed, RankMismatchError elsewhere."""
    failure = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  (raised again, when the others know)
        failure = error
    ranks.agree_on(failure)


def notes_of(request: Request, ranks: Group) -> list[str]:
    """What `zc.explain` should say from the start."""
    plan, device = request.plan, request.device
    notes = [note_of(each) for each in request.assignment.optimizers] if ranks.world_size > 1 else []
    notes += [ranks.shard.note, kernels.note_of(device), note_of_shared(request.assignment.params)]
    notes.append(_note_of_frozen(request.model, request.config.param_dtype))
    if request.config.shard_frozen and not plan.frozen:
        notes.append(
            "shard_frozen=True: no parameter is frozen that is a dense tensor with memory of its own, so every rank "
            "keeps what it keeps without the option. Freeze (requires_grad_(False)) before zc.compile"
        )
    if not request.config.verify:
        notes.append("verify=False: schedules run without their proof")
    if device.type == "cuda" and plan.overlap and ranks.world_size > 1:
        notes.append(note_of_connections())
    return [note for note in notes if note is not None]


def _note_of_frozen(model: nn.Module, param_dtype: torch.dtype | None) -> str | None:
    """Frozen parameters that may meet trained ones of another dtype in one operation."""
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()]
    names = [name for name, param in frozen if param_dtype is not None and param.dtype != param_dtype]
    if not names:
        return None
    dtypes = ", ".join(sorted({str(p.dtype) for name, p in frozen if name in names}))
    return (
        f"param_dtype={param_dtype} is for parameters that train. Frozen ones stay in {dtypes}: {', '.join(names[:3])}"
        f"{', ...' * (len(names) > 3)}. Where both meet in one operation, cast the frozen ones before zc.compile"
    )


def plan_of(
    model: nn.Module, assignment: Assignment, config: Config, ranks: Group, after: Plan | None = None
) -> Plan:
    """The plan for the parameters of ``assignment``, after those of ``after`` if it is given."""
    params = assignment.params
    if after is None:
        topology = usable(ranks.shard.topology, config.reduce, {p.device.type for p in params.values()})
    else:
        topology = after.topology
    specs = [ParamSpec.of(name, p, config.param_dtype, assignment.owners[name]) for name, p in params.items()]
    check_encodings(config, {spec.name: spec.dtype for spec in specs}, assignment.rules)
    plan = make_plan(
        specs,
        world_size=ranks.shard.world_size,
        placement=config.placement,
        reduce=config.reduce,
        reduce_dtype=config.reduce_dtype,
        gather_dtype=config.gather_dtype,
        bucket_nbytes=config.bucket_nbytes,
        num_buffers=config.num_buffers,
        overlap=config.overlap,
        overlap_gather=config.overlap_gather,
        weight_nbytes=config.weight_nbytes,
        rules=assignment.rules,
        offload=config.host,
        after=after,
        topology=topology,
        num_replicas=ranks.num_replicas,
        kinds=after.kinds if after is not None else find_kinds(model) if config.compiles_blocks else (),
    )
    is_frozen_too = after is None and config.shards_frozen
    return with_frozen(plan, shardable(model, params), config.bucket_nbytes) if is_frozen_too else plan


def check_wire(plan: Plan) -> None:
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


def check_weights(plan: Plan) -> None:
    """The largest sharded bucket must fit into what gathered weights may take."""
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


def check_memory(plan: Plan) -> None:
    """What a model on meta becomes must fit: this rank's shards, and the gathered weights of one unit."""
    device = plan.buckets[0].device
    kinds, _, _ = resident(plan, [0] * plan.num_optimizers)
    counted = ("weight", "frozen", "master_shard", "arena")
    needed: dict[str, int] = {kind: kinds[kind] for kind in counted if kind in kinds}
    why = ("stage=3", "use more ranks, a smaller bucket_nbytes or weight_nbytes, or offload='cpu'")
    if device.type == "cuda":
        check_room(needed, 1, torch.cuda.mem_get_info(device)[0], why)
    elif device.type == "cpu":
        check_room(needed, ranks_on_this_host(plan.world_size), available_nbytes(), why)


def check_host(plan: Plan, assignment: Assignment) -> None:
    """With offload the update runs on the processor, and its memory must fit into the host's."""
    num_states = []
    for optimizer in assignment.optimizers:
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {name} was made with capturable=True, which keeps its state on the device; make it without"
            )
        num_states.append(len(state_keys(optimizer)) if is_elementwise(optimizer) else STATES.get(name, 2))
    _, needed, _ = resident(plan, num_states)
    check_room(needed, ranks_on_this_host(plan.world_size), available_nbytes())


def _open_state_file(config: Config, rank: int, plan: Plan, assignment: Assignment) -> StateFile | None:
    if config.offload_dir is None:
        return None
    optimizer, *others = assignment.optimizers
    if others:
        kinds = ", ".join(type(each).__name__ for each in assignment.optimizers)
        raise PlanError(f"offload='disk' takes one optimizer, and was given {kinds}: use offload='cpu'")
    if not is_elementwise(optimizer):
        raise PlanError(
            f"offload='disk' takes torch's elementwise optimizers ({', '.join(ELEMENTWISE)}), not "
            f"{type(optimizer).__name__}: use offload='cpu'"
        )
    return open_file(config.offload_dir, rank, plan, optimizer, assignment.params)


def fingerprint(model: nn.Module, config: Config, assignment: Assignment) -> list[str]:
    """Everything that must be the same on all ranks, one item per line, so that an error can name a difference."""
    kinds = zip(assignment.optimizers, assignment.rules, strict=True)
    optimizers = [f"optimizer {k}: {type(each).__name__}, {rule}" for k, (each, rule) in enumerate(kinds)]
    owners = [f"{name} of optimizer {number}" for name, number in assignment.owners.items()]
    options = [f"{k}={v}" for k, v in vars(config).items() if k not in ("dump_dir", "offload_dir")]
    params = []
    for name, param in model.named_parameters():
        strides = own_strides(param.shape, param.stride())
        order = f" strides={strides}" if strides is not None else ""
        params.append(f"{name} {tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}{order}")
    buffers = [f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers()]
    return options + optimizers + params + (owners if len(optimizers) > 1 else []) + buffers
