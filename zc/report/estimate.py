"""`zc.plan`: predicts what a rank would hold, send and copy, without processes, GPUs or memory for it.

It counts bytes from the buckets that `zc.compile` would make. The floor of a step's time is the longest of its parts,
each at full speed and all at once: a lower bound, not a prediction. (The ring's wire
bytes: Thakur et al., 2005; ZeRO's volumes: arXiv:1910.02054, section 7.)
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zc.checks import check_encodings, check_replicas, trainable
from zc.config import Config
from zc.errors import PlanError
from zc.planning.blocks import find_kinds
from zc.planning.layout import Rule, own_strides
from zc.planning.nbytes import STATES, copied, heaviest, resident, sent, sent_between_hosts
from zc.planning.plan import ParamSpec, Plan, make_plan
from zc.planning.topology import Topology, flat, usable
from zc.report.peers import Peer, peers
from zc.report.summary import megabytes

MAX_WORLD_SIZE = 4096
RULES = {"Muon": Rule(whole=True, cost="newton_schulz")}  # of the others: equal shards


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, by kind, and seconds. ``str()`` of it is a table.

    ``wire`` is what a rank sends in a step and receives as well, or what is read of its memory; ``host_wire`` what
    leaves a host, of all its ranks; ``bus`` what goes each way between device and host.
    ``peers``: what DDP and FSDP2 would hold and send.
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
        lines = [f"{head}; {megabytes(sum(self.wire.values()))} sent per step."]
        lines.append(f"{self.num_params:,} parameters in {self.num_buckets} buckets; bytes per rank:")
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
        return "\n".join(lines)


def plan(
    model: nn.Module,
    *,
    world_size: int,
    stage: int = 2,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | str | None = None,
    reduce: str = "exact",
    bucket_nbytes: int | None = None,
    num_buffers: int = 2,
    ranks_per_host: int | None = None,
    num_replicas: int = 1,
    offload: str | None = None,
    offload_accumulate: str = "cpu",
    optimizer: str | Mapping[str, str] = "AdamW",
    microbatches: int = 1,
    compute_seconds: float | None = None,
    bus_bandwidth: float | None = None,
    wire_bandwidth: float | None = None,
    net_bandwidth: float | None = None,
    host_bandwidth: float | None = None,
    device_bandwidth: float | None = None,
    disk_bandwidth: float | None = None,
) -> Estimate:
    """What `zc.compile` with these options would hold, send and copy on each of ``world_size`` ranks (up to 4,096).

    Needs no process group, GPU or memory: the model may be on the meta device. Nothing is changed.

    Args:
        ranks_per_host: of each host; None: every rank on its own.
        num_replicas: the first size of a mesh of two dimensions, (replicate, shard), of ``world_size`` ranks.
        optimizer: class name of a torch optimizer, for the size of its state and the layout that it asks for. Several:
            names of parameters, or patterns of them as of files (``"*.weight"``), to class names; the first that fits
            counts: ``{"embed*": "AdamW", "*norm*": "AdamW", "*.weight": "Muon", "*": "AdamW"}``.
        microbatches: backwards an update, all but the last declared with `zc.no_sync`.
        compute_seconds: forward and backward of all microbatches, without communication.
        bus_bandwidth: bytes/s between device and pinned host memory, each way.
        wire_bandwidth: bytes/s that a rank sends while it receives as much.
        net_bandwidth: bytes/s that leave a host while as many come in.
        host_bandwidth: bytes/s of a rank's share of the host's memory, for an update with offload.
        device_bandwidth: bytes/s of the device's memory, for an update without offload.
        disk_bandwidth: bytes/s, read and written together, of a rank's share of the disk (offload="disk").

    Raises:
        PlanError (a ValueError): an option, a bandwidth or the world size is out of range. TypeError: no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    config = Config(
        stage=stage, param_dtype=param_dtype, reduce_dtype=reduce_dtype, gather_dtype=gather_dtype, reduce=reduce,
        bucket_nbytes=bucket_nbytes,
        num_buffers=num_buffers, offload=offload, offload_accumulate=offload_accumulate,
        offload_dir="." if offload == "disk" else None,
    )  # fmt: skip
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise PlanError(f"world_size must be a whole number from 1 to {MAX_WORLD_SIZE}, got {world_size!r}")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise PlanError(f"microbatches must be a whole number of at least 1, got {microbatches!r}")
    rates = {"bus_bandwidth": bus_bandwidth, "wire_bandwidth": wire_bandwidth, "net_bandwidth": net_bandwidth,
             "host_bandwidth": host_bandwidth,
             "device_bandwidth": device_bandwidth, "disk_bandwidth": disk_bandwidth,
             "compute_seconds": compute_seconds}  # fmt: skip
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise PlanError(f"{name} must be above 0, got {rate!r}")
    hosts = flat(world_size)
    if ranks_per_host is not None:
        if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int) or ranks_per_host < 1:
            raise PlanError(f"ranks_per_host must be a whole number of at least 1, got {ranks_per_host!r}")
        if world_size % ranks_per_host:
            raise PlanError(f"{world_size} ranks are no whole number of hosts of {ranks_per_host}")
        hosts = Topology(world_size // ranks_per_host, ranks_per_host)
    is_number = isinstance(num_replicas, int) and not isinstance(num_replicas, bool)
    if not is_number or num_replicas < 1 or world_size % num_replicas:
        raise PlanError(f"num_replicas must be a whole number and divide the {world_size} ranks, got {num_replicas!r}")
    check_replicas(config, num_replicas)
    params = trainable(model)
    if not params:
        raise PlanError(f"{type(model).__name__} has no trainable parameter (requires_grad is False for all)")
    classes, owners = _optimizers(params, optimizer)
    specs = [
        ParamSpec(n, tuple(p.shape), param_dtype or p.dtype, p.device, owners[n], own_strides(p.shape, p.stride()))
        for n, p in params.items()
    ]
    rules = [RULES.get(name, Rule()) for name in classes]
    check_encodings(config, {spec.name: spec.dtype for spec in specs}, rules)
    used = replace(hosts, reads_memory=ranks_per_host is not None)
    if num_replicas > 1:  # as `zc.ranks.comm.Group.split` has it
        shard = world_size // num_replicas
        is_inside = ranks_per_host is not None and ranks_per_host % shard == 0
        used = Topology(1, shard, reads_memory=True) if is_inside else flat(shard)
    used = usable(used, reduce, {s.device.type for s in specs})
    made = make_plan(
        specs, world_size=used.world_size, num_replicas=num_replicas, placement=config.placement, reduce=reduce,
        reduce_dtype=reduce_dtype, gather_dtype=gather_dtype, topology=used, bucket_nbytes=bucket_nbytes,
        num_buffers=num_buffers, overlap=True,
        offload=config.host, rules=rules, kinds=find_kinds(model),
    )  # fmt: skip
    return estimate(made, classes, microbatches, offload, rates, hosts)


def _optimizers(
    params: Mapping[str, nn.Parameter], optimizer: str | Mapping[str, str]
) -> tuple[list[str], dict[str, int]]:
    """The class names, and which of them each parameter has."""
    by_pattern = {"*": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    for name in by_pattern.values():
        if name not in STATES:
            raise PlanError(f"optimizer must be one of {', '.join(STATES)}, got {name!r}")
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
    return classes, owners


def estimate(
    plan: Plan,
    optimizers: Sequence[str],
    microbatches: int,
    offload: str | None,
    rates: Mapping[str, float | None],
    hosts: Topology,
) -> Estimate:
    """The same for a plan that exists. ``optimizers``: the class name of each; ``hosts``: where the ranks are."""
    device, host, disk = resident(plan, [STATES[name] for name in optimizers])
    wire, bus = sent(plan, microbatches), copied(plan, microbatches)
    left = sent_between_hosts(plan, microbatches, hosts.ranks_per_host)
    # gradient, master and each state are read, the last two written: 28 bytes an fp32 element with two states
    update = heaviest(plan, plan.buckets, lambda b: b.acc_dtype.itemsize * (3 + 2 * STATES[optimizers[b.optimizer]]))
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
    by_optimizer: Counter[str] = Counter()
    for bucket in plan.buckets:
        by_optimizer[optimizers[bucket.optimizer]] += sum(slot.numel for slot in bucket.slots)
    width = plan.buckets[0].param_dtype.itemsize
    return Estimate(
        plan.num_ranks,
        plan.placement.stage,
        offload,
        numel,
        len(plan.buckets),
        device,
        host,
        disk,
        wire,
        left,
        bus,
        update,
        floor,
        plan.num_replicas,
        microbatches,
        peers(by_optimizer, plan.num_ranks, microbatches, width),
    )
