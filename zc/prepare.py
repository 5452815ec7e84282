"""What `zc.compile` and `zc.recompile` make of model and config: the plan, its checks, the weights in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from zc import torch_private
from zc.engine.memory_order import flattened, in_shape
from zc.errors import PlanError
from zc.machine import available_nbytes, check_room, ranks_on_this_host
from zc.offload.disk import open_file, state_keys
from zc.optim.kinds import ELEMENTWISE, is_elementwise, rule_of
from zc.planning.layout import Rule, own_strides
from zc.planning.nbytes import STATES, held
from zc.planning.plan import Bucket, ParamSpec, Plan, make_plan
from zc.planning.topology import Topology, usable
from zc.ranks.comm import Group

if TYPE_CHECKING:
    from zc.config import Config
    from zc.engine.runtime import Runtime
    from zc.offload.disk_file import StateFile


def plan_of(
    params: dict[str, nn.Parameter],
    config: Config,
    world_size: int,
    owners: Mapping[str, int],
    rules: Sequence[Rule],
    behind: Plan | None = None,
    topology: Topology | None = None,
    num_replicas: int = 1,
) -> Plan:
    """The plan for ``params`` under ``config``. ``owners``: the number of each one's optimizer, which has a rule.
    ``behind``: the plan that it goes on. ``topology``: of the ranks; they read each other's memory on a CPU alone."""
    if topology is not None:
        topology = usable(topology, config.reduce, {p.device.type for p in params.values()})
    specs = [
        ParamSpec(
            name,
            tuple(p.shape),
            config.param_dtype or p.dtype,
            p.device,
            owners[name],
            own_strides(p.shape, p.stride()),
        )
        for name, p in params.items()
    ]
    return make_plan(
        specs,
        world_size=world_size,
        placement=config.placement,
        reduce=config.reduce,
        reduce_dtype=config.reduce_dtype,
        bucket_nbytes=config.bucket_nbytes,
        num_buffers=config.num_buffers,
        overlap=config.overlap,
        overlap_gather=config.overlap_gather,
        rules=rules,
        offload=config.host,
        behind=behind,
        topology=topology,
        num_replicas=num_replicas,
    )


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


def check_host(plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """With offload: the update runs on the processor, and what it needs must fit into the host's memory."""
    num_states = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {name} was made with capturable=True, which keeps its state on the device; make it without"
            )
        num_states.append(len(state_keys(optimizer)) if is_elementwise(optimizer) else STATES.get(name, 2))
    _, needed, _ = held(plan, num_states)
    check_room(needed, ranks_on_this_host(plan.world_size), available_nbytes())


def open_state_file(
    config: Config, rank: int, plan: Plan, optimizers: Sequence[Optimizer], params: dict[str, nn.Parameter]
) -> StateFile | None:
    if config.offload_dir is None:
        return None
    optimizer, *others = optimizers
    if others:
        raise PlanError(
            f"offload='disk' takes one optimizer, and was given {', '.join(type(o).__name__ for o in optimizers)}: use "
            "offload='cpu'"
        )
    if not is_elementwise(optimizer):
        raise PlanError(
            f"offload='disk' takes torch's elementwise optimizers ({', '.join(ELEMENTWISE)}), not "
            f"{type(optimizer).__name__}: use offload='cpu'"
        )
    return open_file(config.offload_dir, rank, plan, optimizer, params)


def fingerprint(
    model: nn.Module, config: Config, optimizers: Sequence[Optimizer], owners: Mapping[str, int]
) -> list[str]:
    """What must be the same on every rank, a line an item, so that a difference can be named."""
    kinds = [f"optimizer {k}: {type(o).__name__}, {rule_of(o)}" for k, o in enumerate(optimizers)]
    mine = [f"{name} of optimizer {number}" for name, number in owners.items()] if len(optimizers) > 1 else []
    options = [f"{k}={v}" for k, v in vars(config).items() if k not in ("dump_dir", "offload_dir")]
    params = [
        f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        f"{'' if (found := own_strides(p.shape, p.stride())) is None else f' strides={found}'}"
        for n, p in model.named_parameters()
    ]
    buffers = [f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers()]
    return options + kinds + params + mine + buffers


@torch.no_grad()
def broadcast_rest(model: nn.Module, params: dict[str, nn.Parameter], ranks: Group) -> None:
    """What the plan leaves out, frozen parameters and buffers, is rank 0's everywhere."""
    planned = {id(p) for p in params.values()}
    for tensor in [*(p for p in model.parameters() if id(p) not in planned), *model.buffers()]:
        given = tensor.detach().contiguous()
        ranks.broadcast_(given)
        tensor.copy_(given)


@torch.no_grad()
def fill(runtime: Runtime, buckets: Sequence[Bucket]) -> None:
    """Broadcasts from rank 0, takes the masters from the given values, and makes flat_param the parameters' memory, a
    bucket at a time: what a parameter had before is given back before the next bucket is allocated."""
    ranks, rank, buffers = runtime.group, runtime.group.shard.rank, runtime.buffers
    for bucket in buckets:
        buffers.add(bucket)
        flat, master = buffers.flat_param[bucket.index], buffers.master_shard[bucket.index]
        start, _ = bucket.layout.owned_range(rank)
        for slot in bucket.slots:
            param = runtime.params[slot.name]
            given, place = flattened(param.detach(), slot), flat[slot.offset : slot.stop]
            ranks.broadcast_(given)
            first, stop = bucket.layout.owned(slot, rank)
            if bucket.has_master or runtime.plan.offload is not None:
                master[first - start : stop - start] = given[first - slot.offset : stop - slot.offset]
            place.copy_(given)
            del given
            param.data = in_shape(torch_private.own_storage(place), slot)
    buffers.add_staging()
    if buffers.note is not None:
        runtime.say_once(buffers.note)
