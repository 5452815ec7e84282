"""`zc.plan`: predicts what a rank would hold, send and copy, without processes, GPUs or memory for it.

An `Estimate` is counted from a plan. It counts bytes from the buckets that `zc.compile` would make. The floor of a
step's time is the longest of its parts, each at full speed and all at once: a lower bound, not a prediction. (Bytes
that a ring sends: Thakur et al., 2005; ZeRO's volumes: arXiv:1910.02054, section 7.)
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zc.checks import check_plan, check_replicas, check_scripts, shardable, trainable
from zc.config import OPTIONS, Config, check_count
from zc.errors import PlanError, megabytes
from zc.optim.trials import num_kept
from zc.planning.allocations import copied, heaviest, of_ddp, resident, sent, sent_between_hosts
from zc.planning.blocks import find_kinds
from zc.planning.layout import Rule
from zc.planning.packing import ParamSpec
from zc.planning.plan import PLACEMENTS, Plan, Topology, flat, usable
from zc.planning.residency import plan_residency
from zc.planning.traits import TRAITS, counted_names, num_states
from zc.prepare import plan_for
from zc.registry import COMPILED

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


MAX_WORLD_SIZE = 4096


def plan(
    model: nn.Module,
    *,
    world_size: int | None = None,
    stage: int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | str | None = None,
    reduce: str | None = None,
    bucket_nbytes: int | None = None,
    num_buffers: int | None = None,
    weight_nbytes: int | None = None,
    shard_frozen: bool | None = None,
    ranks_per_host: int | None = None,
    num_replicas: int = 1,
    offload: str | None = None,
    offload_accumulate: str | None = None,
    optimizer: str | Mapping[str, str] | None = None,
    microbatches: int = 1,
    compute_seconds: float | None = None,
    bus_bandwidth: float | None = None,
    wire_bandwidth: float | None = None,
    net_bandwidth: float | None = None,
    host_bandwidth: float | None = None,
    device_bandwidth: float | None = None,
    disk_bandwidth: float | None = None,
) -> Estimate:
    """Predicts what each of ``world_size`` ranks (up to 4,096) would hold, send and copy under `zc.compile` with these
    options.

    Needs no process group, GPU or memory: the model may be on the meta device. Nothing is changed. Options that you
    leave out (None) are those of the model's `zc.compile` call. Without such a call they are `zc.compile`'s defaults,
    and the optimizer is AdamW.

    Args:
        world_size: None takes that of the process group.
        ranks_per_host: None counts each rank as a host of its own.
        num_replicas: the first size of a mesh of two dimensions, (replicate, shard), of ``world_size`` ranks.
        optimizer: class name of a torch optimizer, which decides the size of its state, with default options, and the
            layout. None takes those that `zc.compile` was given, with their options. For several, a
            dict from parameter names, or patterns of them, to class names; the first pattern that matches counts:
            ``{"embed*": "AdamW", "*norm*": "AdamW", "*.weight": "Muon", "*": "AdamW"}``.
        microbatches: backwards per update, all but the last declared with `zc.no_sync`.
        compute_seconds: forward and backward of all microbatches, without communication.
        bus_bandwidth: bytes/s between device and pinned host memory, each way.
        wire_bandwidth: bytes/s that a rank sends while it receives as much.
        net_bandwidth: bytes/s that leave a host while as many come in.
        host_bandwidth: bytes/s of a rank's share of the host's memory, for an update with offload.
        device_bandwidth: bytes/s of the device's memory, for an update without offload.
        disk_bandwidth: bytes/s, read and written together, of a rank's share of the disk (offload="disk").

    Raises:
        PlanError (a ValueError): an option, a bandwidth or the world size is out of range, or `zc.compile` refuses the
            plan. TypeError: ``model`` is no module, ``optimizer`` neither a name nor a dict.
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS and value is not None}
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    compiled = COMPILED.get(model)
    base = Config() if compiled is None else compiled.runtime.config
    if offload == "disk":
        options["offload_dir"] = "."
    config = replace(base, **options)
    if world_size is None:
        world_size = _world_size(compiled)
    check_count("world_size", world_size, MAX_WORLD_SIZE)
    check_count("microbatches", microbatches)
    check_count("num_replicas", num_replicas)
    if world_size % num_replicas:
        raise PlanError(f"num_replicas must divide the {world_size} ranks, got {num_replicas}")
    rates = {"bus_bandwidth": bus_bandwidth, "wire_bandwidth": wire_bandwidth, "net_bandwidth": net_bandwidth,
             "host_bandwidth": host_bandwidth,
             "device_bandwidth": device_bandwidth, "disk_bandwidth": disk_bandwidth,
             "compute_seconds": compute_seconds}  # fmt: skip
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise PlanError(f"{name} must be above 0, got {rate!r}")
    if ranks_per_host is not None:
        check_count("ranks_per_host", ranks_per_host)
        if world_size % ranks_per_host:
            raise PlanError(f"{world_size} ranks are no whole number of hosts of {ranks_per_host}")
    check_replicas(config, num_replicas)
    params = trainable(model)
    if not params:
        raise PlanError(f"{type(model).__name__} has no trainable parameter (requires_grad is False for all)")
    if optimizer is None and compiled is not None:
        counted, owners = _optimizers_of(compiled, params)
    else:
        counted, owners = _optimizers(params, "AdamW" if optimizer is None else optimizer)
    specs = [ParamSpec.of(name, p, config.param_dtype, owners[name]) for name, p in params.items()]
    rules = [each.rule for each in counted]
    hosts = flat(world_size) if ranks_per_host is None else Topology(world_size // ranks_per_host, ranks_per_host)
    topology = _topology_of_replica(hosts, num_replicas, ranks_per_host)
    types = {spec.device.type for spec in specs}
    topology = usable(topology, config.reduce, types)

    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    with compiled.runtime.weights.named_plainly() if compiled is not None else nullcontext():
        in_shards = shardable(model, params)
    kinds = find_kinds(model)

    def of_stage(number: int) -> Plan:
        """Raises PlanError where `zc.compile` refuses this stage."""
        is_gathered = PLACEMENTS[number].shards_weights or config.shard_frozen
        weight_nbytes = config.weight_nbytes if is_gathered else None
        its_config = replace(config, stage=number, overlap=True, overlap_gather=False, weight_nbytes=weight_nbytes)
        plan = plan_for(its_config, specs, rules, topology, num_replicas, kinds, in_shards if is_gathered else {})
        check_plan(plan)
        check_scripts(model, plan)
        return plan

    def estimate_of(stage_plan: Plan) -> Estimate:
        return estimate(stage_plan, counted, microbatches, config.offload, rates, hosts, frozen)

    chosen_plan = of_stage(config.stage)
    chosen = estimate_of(chosen_plan)
    others: dict[str, Peer] = {}
    for number in PLACEMENTS:
        if number != config.stage:
            with contextlib.suppress(PlanError):  # a stage that zc.compile refuses is no alternative
                other = estimate_of(of_stage(number))
                others[f"zc, stage {number}"] = Peer(other.device_nbytes, sum(other.wire.values()))
    residency = _residency(chosen_plan) if chosen_plan.sharded else ""
    return replace(chosen, peers={**others, **chosen.peers}, residency=residency)


def _topology_of_replica(hosts: Topology, num_replicas: int, ranks_per_host: int | None) -> Topology:
    """Which of the ranks that share the state are on one host, as `zc.ranks.group` has it."""
    if num_replicas == 1:
        return replace(hosts, reads_memory=ranks_per_host is not None)
    shard, on_host = hosts.world_size // num_replicas, ranks_per_host or 1
    if shard % on_host == 0 and shard > on_host:
        return Topology(shard // on_host, on_host)
    return Topology(1, shard, reads_memory=True) if on_host % shard == 0 else flat(shard)


def _world_size(compiled: ShardedModel | None) -> int:
    if compiled is not None:
        return compiled.runtime.plan.num_ranks
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    raise PlanError("world_size is not given, and there is no process group: zc.plan(model, world_size=8)")


class _Counted(NamedTuple):
    """What an optimizer requires of the layout, and how many tensors of a parameter's size it keeps. ``assumed``: the
    options for which that holds, where it was given by name."""

    rule: Rule
    num_states: int
    assumed: str = ""


def _optimizers_of(
    compiled: ShardedModel, params: Mapping[str, nn.Parameter]
) -> tuple[list[_Counted], dict[str, int]]:
    """The optimizers that `zc.compile` was given, with their options, and which of them each parameter has."""
    owners = {slot.name: b.optimizer for b in compiled.runtime.plan.buckets for slot in b.slots}
    for name in params:
        if name not in owners:
            raise PlanError(f"parameter {name} trains since zc.compile, which gave it no bucket: call zc.recompile")
    counted = [_Counted(one.rule, num_kept(one.local)) for one in compiled.optimizers]
    return counted, owners


def _optimizers(
    params: Mapping[str, nn.Parameter], optimizer: str | Mapping[str, str]
) -> tuple[list[_Counted], dict[str, int]]:
    """The optimizers of these class names, and which of them each parameter has."""
    if not isinstance(optimizer, (str, Mapping)):
        raise TypeError(
            f'optimizer must be a name of a class, "AdamW", or a dict of such by patterns of names, got {optimizer!r}'
        )
    by_pattern = {"*": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    for name in by_pattern.values():
        if name not in counted_names():
            raise PlanError(f"optimizer must be one of {', '.join(counted_names())}, got {name!r}")
    classes = list(dict.fromkeys(by_pattern.values()))
    owners: dict[str, int] = {}
    for name, param in params.items():
        pattern = next((p for p in by_pattern if p == name or fnmatch.fnmatchcase(name, p)), None)
        if pattern is None:
            raise PlanError(f'parameter {name} fits none of the patterns {", ".join(by_pattern)}: add "*" as the last')
        if by_pattern[pattern] == "Muon" and param.dim() != 2:
            raise PlanError(
                f"torch.optim.Muon takes matrices, and {name} is {tuple(param.shape)} (pattern {pattern!r}): give it "
                f'to another one, as in optimizer={{"{name}": "AdamW", ..., "*": "Muon"}}'
            )
        owners[name] = classes.index(by_pattern[pattern])
    return [_Counted(TRAITS[c].rule, num_states(c), "SGD without momentum" * (c == "SGD")) for c in classes], owners


class Peer(NamedTuple):
    """What another system would need for the same model: bytes of one rank between steps, with gradients, and sent in
    one step."""

    held: int
    sent: int


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, by kind, and seconds. ``str()`` of it is a table.

    ``wire``: what a rank sends in a step, or what others read of its memory; it receives as much. ``host_wire``: what
    all ranks of a host send to other hosts. ``bus``: what goes each way between device and host.
    ``peers``: what DDP, FSDP2 and the other stages of zc would hold and send.
    ``floor_seconds`` has a part only where its bandwidth was given; ``step_floor`` is the largest.
    """

    world_size: int
    stage: int
    offload: str | None
    num_params: int
    num_buckets: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    wire: Mapping[str, int]
    host_wire: Mapping[str, int]
    bus: Mapping[str, int]
    update_nbytes: int  # of memory that the update reads and writes: 28 an element with Adam
    floor_seconds: Mapping[str, float]
    num_replicas: int = 1
    microbatches: int = 1
    peers: Mapping[str, Peer] = field(default_factory=dict)
    assumed: str = field(default="", compare=False)  # of options of an optimizer that was given by name
    residency: str = ""  # of sharded weights: what a forward and backward gather and free, in the order of registration

    @property
    def device_nbytes(self) -> int:
        """Persistent bytes on the device; activations come on top."""
        return sum(self.device.values())

    @property
    def host_nbytes(self) -> int:
        return sum(self.host.values())

    @property
    def step_floor(self) -> float | None:
        """Seconds that no step can be below; None where nothing was given to compute it from."""
        return max(self.floor_seconds.values(), default=None)

    def __str__(self) -> str:
        ranks = f"{self.world_size} ranks{f' in {self.num_replicas} replicas' if self.num_replicas > 1 else ''}"
        batches = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        where = f", offload to {self.offload}" if self.offload is not None else ""
        ddp = "".join(f"; {name} {megabytes(peer.held)}" for name, peer in self.peers.items() if name.startswith("DDP"))
        head = f"{ranks}, stage {self.stage}, {batches}{where}: {megabytes(self.device_nbytes)} per rank{ddp}"
        less = self.peers.get("zc, stage 1") if self.microbatches > 1 else None  # which reduces once per update
        hint = "" if less is None else f" Stage 1: {megabytes(less.held)} per rank, {megabytes(less.sent)} sent."
        assumed = f", {self.assumed}" if self.assumed else ""
        lines = [f"{head}; {megabytes(sum(self.wire.values()))} sent per step.{hint}"]
        lines.append(f"{self.num_params:,} parameters in {self.num_buckets} buckets{assumed}; bytes per rank:")
        groups = {"device": self.device, "host": self.host, "disk": self.disk,
                  "wire, a step": self.wire, "leaves a host": self.host_wire, "bus, a step": self.bus}  # fmt: skip
        for name, group in groups.items():
            lines += [f"{name:>14} | {kind:<16} {nbytes:>20,}" for kind, nbytes in group.items() if nbytes]
            if name in ("device", "host") or (name == "disk" and group):
                lines.append(f"{name:>14} | {'total':<16} {sum(group.values()):>20,}")
        for name, peer in self.peers.items():
            lines += [f"{name:>14} | {kind:<16} {nbytes:>20,}" for kind, nbytes in peer._asdict().items()]
        for name, seconds in self.floor_seconds.items():
            lines.append(f"{'floor':>14} | {name:<16} {seconds * 1e3:>17.3f} ms")
        if self.step_floor is not None:
            lines.append(f"{'floor':>14} | {'step':<16} {self.step_floor * 1e3:>17.3f} ms")
        return "\n".join([*lines, *([f"\n{self.residency}"] if self.residency else [])])


def estimate(
    plan: Plan,
    optimizers: Sequence[_Counted],
    microbatches: int,
    offload: str | None,
    rates: Mapping[str, float | None],
    hosts: Topology,
    frozen_nbytes: int,
) -> Estimate:
    """Counts what a plan holds, sends and copies, and the floor of a step.

    ``hosts``: where the ranks are; ``frozen_nbytes``: of all frozen parameters.
    A rank keeps those whole that are in no bucket.
    """
    states = [each.num_states for each in optimizers]
    device, host, disk = resident(plan, states)
    whole = frozen_nbytes - sum(slot.numel * b.param_dtype.itemsize for b in plan.frozen for slot in b.slots)
    if whole:
        device["frozen"] = device.get("frozen", 0) + whole
    wire, bus = sent(plan, microbatches), copied(plan, microbatches)
    left = sent_between_hosts(plan, microbatches, hosts.ranks_per_host)
    # gradient, master and each state are read, the last two written: 28 bytes an fp32 element with two states
    update = heaviest(plan.buckets, lambda b: b.acc_dtype.itemsize * (3 + 2 * states[b.optimizer]))
    memory = rates["host_bandwidth"] if plan.offload is not None else rates["device_bandwidth"]
    parts = {
        "compute": (rates["compute_seconds"], 1.0),
        "wire": (float(sum(wire.values())), rates["wire_bandwidth"]),
        "between hosts": (float(sum(left.values())), rates["net_bandwidth"]),
        "bus to host": (float(bus["to host"]), rates["bus_bandwidth"]),
        "bus to device": (float(bus["to device"]), rates["bus_bandwidth"]),
        "update": (float(update), memory),
    }
    if disk:  # each state is read and written
        parts["disk"] = (2.0 * disk["optimizer_state"], rates["disk_bandwidth"])
    floor = {name: amount / rate for name, (amount, rate) in parts.items() if amount and rate is not None}
    numel = sum(slot.numel for b in plan.buckets for slot in b.slots)
    return Estimate(
        world_size=plan.num_ranks,
        stage=plan.placement.stage,
        offload=offload,
        num_params=numel,
        num_buckets=len(plan.buckets),
        device=device,
        host=host,
        disk=disk,
        wire=wire,
        host_wire=left,
        bus=bus,
        update_nbytes=update,
        floor_seconds=floor,
        num_replicas=plan.num_replicas,
        microbatches=microbatches,
        peers=ddp_and_fsdp2(plan, states, microbatches, frozen_nbytes),
        assumed=", ".join(each.assumed for each in optimizers if each.assumed),
    )


def ddp_and_fsdp2(plan: Plan, states: Sequence[int], microbatches: int, frozen_nbytes: int) -> dict[str, Peer]:
    """DDP has fp32 weights, float64 ones of a float64 model, and all-reduces once per step inside no_sync
    (arXiv:2006.15704). FSDP2 has shards of the same dtype (arXiv:2304.11277). It gathers weights in ``param_dtype`` for
    each forward and each backward, and reduces as many bytes; what is gathered at one time comes on top. DDP keeps
    frozen parameters whole, FSDP2 shards and gathers them. ``states`` as in `resident`.
    """
    world_size, whole = plan.num_ranks, of_ddp(plan, states) + frozen_nbytes
    numel: Counter[tuple[int, int]] = Counter()  # by bytes of an element: of masters, of weights
    for b in plan.buckets:
        numel[b.acc_dtype.itemsize, b.param_dtype.itemsize] += sum(slot.numel for slot in b.slots)
    once = {widths: n * (world_size - 1) // world_size for widths, n in numel.items()}
    masters, weights = (sum(n * widths[k] for widths, n in once.items()) for k in (0, 1))
    frozen = 2 * microbatches * (frozen_nbytes * (world_size - 1) // world_size)
    return {
        "DDP, fp32": Peer(whole, 2 * masters),
        "FSDP2": Peer(-(-whole // world_size), 3 * microbatches * weights + frozen),
    }


def _residency(plan: Plan) -> str:
    """The table of a forward in the order of registration and its backward."""
    # bucket 0, and the first of the frozen ones, have what was registered last
    buckets = [(bucket.index,) for bucket in plan.sharded]
    nbytes = {bucket.index: bucket.nbytes for bucket in plan.sharded}
    return plan_residency((*reversed(buckets), *buckets), nbytes, plan.weight_cap).table(plan.weight_cap)
