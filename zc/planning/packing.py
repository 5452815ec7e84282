"""Makes a plan: packs parameters into buckets, and decides the layout of each.

Parameters are grouped by (dtype, device), taken in reverse order of registration (the order in which a backward pass
tends to finish them; PyTorch DDP, arXiv:2006.15704), and packed into buckets of about ``bucket_nbytes``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zc.planning.blocks import (
    BETWEEN_HOSTS_NBYTES,
    DEFAULT_NBYTES,
    BlockKind,
    default_nbytes,
    nbytes_of,
    split_at_blocks,
)
from zc.planning.layout import ALIGN_NBYTES, FlatLayout, Rule, layout_of, own_strides
from zc.planning.ownership import COSTS, assign
from zc.planning.placement import Offload, Placement
from zc.planning.plan import Bucket, Plan
from zc.planning.topology import Topology, flat
from zc.planning.wire import BITS, BLOCK


@dataclass(frozen=True)
class ParamSpec:
    """What the plan needs to know of one trainable parameter: fully qualified name, shape, dtype after
    ``param_dtype``, device, the number of the optimizer that has it, and `own_strides` of its memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    optimizer: int = 0
    strides: tuple[int, ...] | None = None

    @staticmethod
    def of(name: str, param: Tensor, dtype: torch.dtype | None = None, optimizer: int = 0) -> ParamSpec:
        """Of this parameter; ``dtype`` None: its own."""
        strides = own_strides(param.shape, param.stride())
        return ParamSpec(name, tuple(param.shape), dtype or param.dtype, param.device, optimizer, strides)


def make_plan(
    params: Sequence[ParamSpec],
    *,
    world_size: int,
    placement: Placement,
    reduce: str,
    reduce_dtype: torch.dtype | None,
    bucket_nbytes: int | None,
    num_buffers: int,
    overlap: bool,
    rules: Sequence[Rule] = (Rule(),),
    offload: Offload | None = None,
    overlap_gather: bool = False,
    after: Plan | None = None,
    topology: Topology | None = None,
    num_replicas: int = 1,
    kinds: Sequence[BlockKind] = (),
    weight_nbytes: int | None = None,
    gather_dtype: torch.dtype | str | None = None,
) -> Plan:
    """Packs ``params`` (in order of registration) into buckets. A bucket closes before it would pass ``bucket_nbytes``
    bytes; None: `default_nbytes` of its dtype and device. ``rules``: of each optimizer, what its layout must keep;
    buckets of several follow each other as their last gradients come in. ``after``: a plan whose owners have their
    load already. ``kinds``: the model's blocks, which buckets follow.

    ``reduce_dtype`` None: the parameters' own dtype where every backward is reduced (a gradient has no more bits than
    that), the accumulator's where a sum is reduced (deepspeed#7985: rounding the sum would lose what fp32 has kept).
    torch.int8, and ``gather_dtype``: what leaves a host is encoded (`zc.planning.wire`).
    """
    reduce_bits, gather_bits = (8 if reduce_dtype == torch.int8 else 0), BITS.get(gather_dtype, 0)
    groups: dict[tuple[torch.dtype, torch.device], list[ParamSpec]] = {}
    for spec in reversed(params):
        groups.setdefault((spec.dtype, spec.device), []).append(spec)
    hosts = topology or flat(world_size)
    levels = hosts.has_levels
    leaves_host = world_size > 1 and (levels or not hosts.reads_memory)
    if reduce_bits:
        reduce_dtype = None
    if not leaves_host:
        reduce_bits = gather_bits = 0
    owners = _owners(params[::-1], rules, world_size, after)
    buckets: list[Bucket] = []
    for (dtype, device), specs in groups.items():
        acc_dtype = torch.promote_types(dtype, torch.float32)
        wire = reduce_dtype or (dtype if placement.shards_gradients else acc_dtype)
        align = ALIGN_NBYTES // min(dtype.itemsize, wire.itemsize)
        if reduce_bits or gather_bits:
            align = math.lcm(align, BLOCK)
        is_far = hosts.num_hosts > 1 and device.type == "cpu"
        least = BETWEEN_HOSTS_NBYTES if is_far else DEFAULT_NBYTES
        nbytes = bucket_nbytes or default_nbytes([nbytes_of(spec) for spec in specs], least)
        if bucket_nbytes is None and weight_nbytes is not None and placement.shards_weights:  # room for two buckets
            nbytes = min(nbytes, max(weight_nbytes // 2, 1))
        arrival = {spec.name: k for k, spec in enumerate(specs)}
        chunks: list[list[ParamSpec]] = []
        for number in sorted({spec.optimizer for spec in specs}):
            own = [spec for spec in specs if spec.optimizer == number]
            chunks += split_at_blocks(own, nbytes, kinds, is_default=bucket_nbytes is None)
        for members in sorted(chunks, key=lambda members: arrival[members[-1].name]):
            number, shapes = members[0].optimizer, [(spec.name, spec.shape) for spec in members]
            num_hosts = hosts.num_hosts if levels else 1
            layout = layout_of(rules[number], shapes, world_size, align, owners, num_hosts, num_replicas)
            layout = with_strides(layout, members)
            net = reduce_dtype or acc_dtype
            differs = gather_bits > 0 and not placement.shards_weights
            buckets.append(Bucket(len(buckets), layout, dtype, wire, acc_dtype, device, number, net, differs))
    packed = tuple(buckets)
    return Plan(
        packed, world_size, placement, reduce, num_buffers, overlap, offload=offload, overlap_gather=overlap_gather,
        topology=hosts, num_replicas=num_replicas, kinds=tuple(kinds), weight_nbytes=weight_nbytes,
        reduce_bits=reduce_bits, gather_bits=gather_bits,
    )  # fmt: skip


def with_strides(layout: FlatLayout, members: Sequence[ParamSpec]) -> FlatLayout:
    """The same layout; each slot has the memory order of its parameter."""
    strides = {spec.name: spec.strides for spec in members}
    return replace(layout, slots=tuple(replace(s, strides=strides[s.name]) for s in layout.slots))


def _owners(specs: Sequence[ParamSpec], rules: Sequence[Rule], world_size: int, after: Plan | None) -> dict[str, int]:
    """The rank that updates each parameter of an optimizer that reads whole ones."""
    owners: dict[str, int] = {}
    for number, rule in enumerate(rules):
        if not rule.whole:
            continue
        cost, taken = COSTS[rule.cost], dict[int, tuple[float, int]]()
        for bucket in after.buckets if after is not None else ():
            for slot, rank in zip(bucket.slots, bucket.layout.owners or (), strict=False):
                load, count = taken.get(rank, (0.0, 0))
                is_its = bucket.optimizer == number  # other optimizers' costs have other units
                taken[rank] = (load + (cost(slot.shape) if is_its else 0.0), count + slot.numel)
        for spec in specs:
            if spec.name in owners:
                load, count = taken.get(owners[spec.name], (0.0, 0))
                taken[owners[spec.name]] = (load, count + math.prod(spec.shape))
        shapes = [(spec.name, spec.shape) for spec in specs if spec.optimizer == number]
        owners.update(assign(shapes, cost, world_size, taken))
    return owners
