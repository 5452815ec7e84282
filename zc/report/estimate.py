"""What `zc.plan` returns: bytes and seconds of one rank, counted from a plan.

It counts bytes from the buckets that `zc.compile` would make. The floor of a step's time is the longest of its parts,
each at full speed and all at once: a lower bound, not a prediction. (Bytes that a ring sends: Thakur et al., 2005;
ZeRO's volumes: arXiv:1910.02054, section 7.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zc.errors import megabytes
from zc.planning.allocations import copied, heaviest, of_ddp, resident, sent, sent_between_hosts
from zc.planning.plan import Plan, Topology
from zc.planning.traits import num_states


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
        lines = [f"{head}; {megabytes(sum(self.wire.values()))} sent per step.{hint}"]
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
        return "\n".join([*lines, *([f"\n{self.residency}"] if self.residency else [])])


def estimate(
    plan: Plan,
    optimizers: Sequence[str],
    microbatches: int,
    offload: str | None,
    rates: Mapping[str, float | None],
    hosts: Topology,
    frozen_nbytes: int,
) -> Estimate:
    """Counts what a plan holds, sends and copies, and the floor of a step.

    ``optimizers``: the class name of each; ``hosts``: where the ranks are; ``frozen_nbytes``: of all frozen parameters.
    A rank keeps those whole that are in no bucket.
    """
    device, host, disk = resident(plan, [num_states(name) for name in optimizers])
    whole = frozen_nbytes - sum(slot.numel * b.param_dtype.itemsize for b in plan.frozen for slot in b.slots)
    if whole:
        device["frozen"] = device.get("frozen", 0) + whole
    wire, bus = sent(plan, microbatches), copied(plan, microbatches)
    left = sent_between_hosts(plan, microbatches, hosts.ranks_per_host)
    # gradient, master and each state are read, the last two written: 28 bytes an fp32 element with two states
    update = heaviest(plan.buckets, lambda b: b.acc_dtype.itemsize * (3 + 2 * num_states(optimizers[b.optimizer])))
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
        peers=ddp_and_fsdp2(by_optimizer, plan.num_ranks, microbatches, width, frozen_nbytes),
    )


def ddp_and_fsdp2(
    numel_by_optimizer: Mapping[str, int], world_size: int, microbatches: int, itemsize: int, frozen_nbytes: int
) -> dict[str, Peer]:
    """DDP has fp32 weights, and all-reduces once per step inside no_sync (arXiv:2006.15704). FSDP2 has fp32 shards
    (arXiv:2304.11277). It gathers weights of ``itemsize`` bytes for each forward and each backward, and reduces as many
    bytes; what is gathered at one time comes on top. DDP keeps frozen parameters whole, FSDP2 shards and gathers them.
    """
    numel, whole = sum(numel_by_optimizer.values()), of_ddp(numel_by_optimizer) + frozen_nbytes
    once = numel * (world_size - 1) // world_size
    frozen = 2 * microbatches * (frozen_nbytes * (world_size - 1) // world_size)
    return {
        "DDP, fp32": Peer(whole, 2 * once * 4),
        "FSDP2": Peer(-(-whole // world_size), 3 * microbatches * once * itemsize + frozen),
    }
