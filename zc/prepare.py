"""From the arguments of `zc.compile` to a checked request, and the features of a model put together: what `zc.compile`
hands to its ranks and its engine, which import none of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc import kernels, torch_private
from zc.checks import (
    check_encodings,
    check_host,
    check_model,
    check_module,
    check_optimizers,
    check_plan,
    check_replicas,
    check_scripts,
    left_to_ranks,
    owners_of,
    shardable,
)
from zc.config import Config
from zc.engine import owners, param_checks
from zc.engine.agreement import Agreement
from zc.engine.announcements import Announcements
from zc.engine.core import Features
from zc.errors import PlanError, some
from zc.machine import is_cuda, note_of_connections
from zc.offload.disk import open_file
from zc.optim.assignment import Assignment, is_elementwise, note_of, optimizers_in, rule_of, try_out
from zc.optim.trials import whole_keys
from zc.passes.pipeline import pipelines
from zc.planning.blocks import find_kinds
from zc.planning.layout import Rule, own_strides
from zc.planning.ownership import assign_owners
from zc.planning.packing import ParamSpec, make_plan, with_frozen
from zc.planning.plan import BlockKind, Plan, Topology, usable
from zc.planning.traits import elementwise_names
from zc.ranks.control import Parts
from zc.ranks.group import Group
from zc.ranks.hosts import find_hosts
from zc.ranks.watch import Watch
from zc.registry import COMPILED

if TYPE_CHECKING:
    from zc.offload.disk import StateFile

# one line for each feature: without it the rest works
RANKS = Parts(
    find_hosts=find_hosts,
    watch_of=Watch.of_this_process,
)


@dataclass(frozen=True)
class Request:
    """The arguments of `zc.compile`, resolved and checked on this rank. Nothing has changed yet, except for the files
    of offload="disk"."""

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
    """Resolves the arguments, with every check that a rank can make by itself. Raises PlanError or TypeError."""
    config = Config(**options)
    check_module(model)
    if model in COMPILED:
        raise PlanError(
            f"this {type(model).__name__} is compiled already: call zc.compile once, before the loop. To train it with "
            "another optimizer, call zc.close(model) on all ranks first"
        )
    assignment = assign(model, optimizer)
    param_checks.refuse_compiled_autograd()
    device = next(iter(assignment.params.values())).device if config.offload is None else torch.device("cpu")
    for each in assignment.optimizers:
        try_out(each, ranks.shard.world_size, device)
    check_replicas(config, ranks.num_replicas)
    plan = plan_of(model, assignment, config, ranks)
    check_plan(plan)
    check_scripts(model, plan)
    if plan.offload is not None:
        check_host(plan, assignment)
    return Request(model, config, assignment, plan, _open_state_file(config, ranks.rank, plan, assignment))


def assign(model: nn.Module, optimizer: Any) -> Assignment:
    """Finds the optimizer and the rule of each trainable parameter."""
    optimizers = optimizers_in(optimizer)
    params = check_model(model)
    check_optimizers(model, params, optimizers)
    rules = tuple(map(rule_of, optimizers))
    return Assignment(optimizer, optimizers, rules, params, owners_of(params, optimizers))


def notes_of(request: Request, ranks: Group) -> list[str]:
    """The notes that `zc.explain` lists from the start."""
    plan, device = request.plan, request.device
    notes = [*map(note_of, request.assignment.optimizers)] if ranks.world_size > 1 else []
    notes += [ranks.shard.note, kernels.note_of(device), _note_of_shared(request.assignment.params)]
    notes.append(_note_of_held(request.model, request.assignment.params))
    notes.append(_note_of_frozen(request.model, request.config.param_dtype))
    if request.config.shard_frozen and not plan.frozen:
        notes.append(
            "shard_frozen=True: no parameter is frozen that is a dense tensor with memory of its own, so the option "
            "changes nothing. Freeze (requires_grad_(False)) before zc.compile"
        )
    if not request.config.verify:
        notes.append("verify=False: schedules run without their proof")
    if is_cuda(device) and plan.overlap and ranks.world_size > 1:
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


def _note_of_shared(params: Mapping[str, nn.Parameter]) -> str | None:
    """The note for parameters that `zc.compile` takes out of memory that other processes may read."""
    shared = next((name for name, param in params.items() if param_checks.is_shared(param)), None)
    if shared is None:
        return None
    return (
        f"{shared} lay in memory that processes share (share_memory, or it came through a queue), and is in a bucket "
        "of this process now: other processes don't see its updates. Copy it into a second model that is shared"
    )


def _note_of_held(model: nn.Module, params: Mapping[str, nn.Parameter]) -> str | None:
    """The note for parameters whose memory something outside of the model holds, too. `zc.compile` moves parameters out
    of it, so under DDP it would follow the updates, and here it does not."""
    own = Counter(torch_private.storage_number(tensor) for tensor in _tensors_of(model) if _has_bytes(tensor))
    of_model = ((n, p, own[torch_private.storage_number(p)]) for n, p in params.items() if _has_bytes(p))
    names = [name for name, param, num_own in of_model if torch_private.num_sharing(param) - 1 > num_own]
    if not names:
        return None
    return (
        f"something outside of the model holds the memory in which {some(names)} lay: p.data, a state_dict() or a flat "
        "tensor from before zc.compile, or an output with its graph. It keeps the values of then, and what is written "
        "into it changes no parameter. Make such tensors after zc.compile, or read the parameters themselves"
    )


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and what `torch.nn.utils.spectral_norm` has as the weight until the first forward."""
    every = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        names = (name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False))
        every += (tensor for tensor in map(vars(module).get, names) if isinstance(tensor, Tensor))
    return every


def _has_bytes(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.numel() > 0


def plan_of(
    model: nn.Module, assignment: Assignment, config: Config, ranks: Group, after: Plan | None = None
) -> Plan:
    """The plan for the parameters of ``assignment``, after those of ``after`` if it is given."""
    params, owners = assignment.params, assignment.owners
    specs = [ParamSpec.of(name, p, config.param_dtype, owners[name]) for name, p in params.items()]
    if after is not None:
        return plan_for(config, specs, assignment.rules, after.topology, ranks.num_replicas, after.kinds, after=after)
    types = {param.device.type for param in params.values()}
    topology = usable(ranks.shard.topology, config.reduce, types)
    kinds = find_kinds(model) if config.compiles_blocks else ()
    frozen = shardable(model, params) if config.shards_frozen else {}
    return plan_for(config, specs, assignment.rules, topology, ranks.num_replicas, kinds, frozen)


def plan_for(
    config: Config,
    specs: Sequence[ParamSpec],
    rules: Sequence[Rule],
    topology: Topology,
    num_replicas: int,
    kinds: Sequence[BlockKind],
    frozen: Mapping[str, nn.Parameter] | None = None,
    after: Plan | None = None,
) -> Plan:
    """`make_plan` with the options of ``config``, and buckets for the parameters ``frozen``, which lie in shards.
    ``after``: a plan whose owners of whole parameters have their load already."""
    check_encodings(config, {spec.name: spec.dtype for spec in specs}, rules)
    owners = assign_owners(specs, rules, topology.world_size, after)
    plan = make_plan(specs, config, topology, rules=rules, kinds=kinds, num_replicas=num_replicas, owners=owners)
    return with_frozen(plan, frozen or {}, config.bucket_nbytes)


def _open_state_file(config: Config, rank: int, plan: Plan, assignment: Assignment) -> StateFile | None:
    if config.offload_dir is None:
        return None
    optimizer, *others = assignment.optimizers
    if others:
        kinds = ", ".join(type(o).__name__ for o in assignment.optimizers)
        raise PlanError(f"offload='disk' takes one optimizer, and was given {kinds}: use offload='cpu'")
    if not is_elementwise(optimizer):
        raise PlanError(
            f"offload='disk' takes torch's elementwise optimizers ({', '.join(elementwise_names())}), not "
            f"{type(optimizer).__name__}: use offload='cpu'"
        )
    keys = list(dict.fromkeys(itertools.chain(*whole_keys(optimizer))))
    return open_file(config.offload_dir, rank, plan, type(optimizer).__name__, keys, assignment.params)


def fingerprint(model: nn.Module, config: Config, assignment: Assignment) -> list[str]:
    """Everything that must be the same on all ranks, one item per line, so that an error can name a difference."""
    kinds = zip(assignment.optimizers, assignment.rules, strict=True)
    optimizers = [f"optimizer {k}: {type(each).__name__}, {rule}" for k, (each, rule) in enumerate(kinds)]
    owners = [f"{name} of optimizer {number}" for name, number in assignment.owners.items()]
    options = [f"{k}={v}" for k, v in vars(config).items() if k not in ("dump_dir", "offload_dir")]
    own = left_to_ranks(model)
    params = [f"left to each rank: {name}" for name in sorted(own)]
    for name, param in model.named_parameters():
        if name in own:
            continue
        strides = own_strides(param.shape, param.stride())
        order = f" strides={strides}" if strides is not None else ""
        params.append(f"{name} {tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}{order}")
    buffers = [f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers() if n not in own]
    return options + optimizers + params + (owners if len(optimizers) > 1 else []) + buffers


def features_of(plan: Plan, config: Config) -> Features:
    """Those of a model with this plan."""
    from zc.weights import make_weights  # late: these are the longest chains of imports

    return Features(
        pipelines(in_place=config.write_in_place, prove=config.verify, windows=bool(plan.sharded)),
        make_weights,
        owners.OPERATIONS,
        owners.gather_whole,
        make_agreement=Announcements if plan.num_ranks > 1 else Agreement,
    )
