"""Makes a plan: packs parameters into buckets, and decides the layout of each.

Parameters are grouped by (dtype, device), taken in reverse order of registration (the order in which a backward pass
tends to finish them; PyTorch DDP, arXiv:2006.15704), and packed into buckets of about ``bucket_nbytes``.

Frozen parameters that lie in shards have buckets of their own: sharded and gathered like the others, without gradients,
masters or states. They are numbered from `FIRST_FROZEN` on, so that the buckets that `zc.recompile` adds can follow
those of `make_plan`. A parameter that becomes trainable moves to a bucket of its own, and leaves its slot
(`Plan.without`)::

    buckets      0: adapters                            1: what zc.recompile has added, embed.weight
    frozen       100000: (left), norm.weight           100001: layers.0.weight ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zc.planning.layout import ALIGN_NBYTES, Rule, flat_layout, own_strides
from zc.planning.plan import FIRST_FROZEN, BlockKind, Bucket, Plan, Topology, block_of, split_name

if TYPE_CHECKING:
    from zc.config import Config

# The default size of a bucket is that of PyTorch's DDP, which overlaps well. It is larger where there would be more
# buckets than ENOUGH_BUCKETS, since each costs the host a write, a reduction and their events in every backward.
DEFAULT_NBYTES = 25 * 2**20
ENOUGH_BUCKETS = 32
# between hosts of CPUs: on a slow link, a step waits for the last bucket's reduction, and a layer for its gather
BETWEEN_HOSTS_NBYTES = 8 * 2**20


@dataclass(frozen=True)
class ParamSpec:
    """The facts of one parameter that a plan depends on: fully qualified name, shape, dtype after ``param_dtype``,
    device, the number of its optimizer, and `own_strides` of its memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    optimizer: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(name: str, param: Tensor, dtype: torch.dtype | None = None, optimizer: int = 0) -> ParamSpec:
        """The facts of ``param``; ``dtype`` None: its own."""
        strides = own_strides(param.shape, param.stride())
        return ParamSpec(name, tuple(param.shape), dtype or param.dtype, param.device, optimizer, strides)


def make_plan(
    params: Sequence[ParamSpec],
    config: Config,
    topology: Topology,
    *,
    rules: Sequence[Rule] = (Rule(),),
    kinds: Sequence[BlockKind] = (),
    num_replicas: int = 1,
    owners: Mapping[str, int] = {},
) -> Plan:
    """Packs ``params``, in order of registration, into buckets. Buckets of several optimizers are in the order in which
    their last gradients come in.

    ``config.reduce_dtype`` None means the parameters' own dtype if every backward is reduced, since a gradient has no
    more bits. If a sum is reduced it means the accumulator's dtype, since rounding the sum would lose bits that fp32
    has kept (deepspeed#7985).

    Args:
        topology: of the ranks that together have one copy of the state.
        rules: of each optimizer, the requirement on its layout.
        kinds: the model's blocks, which buckets follow.
        owners: the rank that updates each parameter of an optimizer that reads whole ones (`zc.planning.ownership`).
    """
    placement, world_size, reduce_dtype = config.placement, topology.world_size, config.reduce_dtype
    reduce_encoding, gather_encoding = config.reduce_encoding, config.gather_encoding
    groups: dict[tuple[torch.dtype, torch.device], list[ParamSpec]] = {}
    for spec in reversed(params):
        groups.setdefault((spec.dtype, spec.device), []).append(spec)
    leaves_host = world_size > 1 and (topology.has_levels or not topology.reads_memory)
    if reduce_encoding is not None:
        reduce_dtype = None
    if not leaves_host:
        reduce_encoding = gather_encoding = None
    buckets: list[Bucket] = []
    for (dtype, device), specs in groups.items():
        acc_dtype = torch.promote_types(dtype, torch.float32)
        grad_dtype = reduce_dtype or (dtype if placement.shards_gradients else acc_dtype)
        blocks = [encoding.block for encoding in (reduce_encoding, gather_encoding) if encoding is not None]
        align = math.lcm(ALIGN_NBYTES // min(dtype.itemsize, grad_dtype.itemsize), *blocks)
        is_far = topology.num_hosts > 1 and device.type == "cpu"
        least = BETWEEN_HOSTS_NBYTES if is_far else DEFAULT_NBYTES
        weight_nbytes = config.weight_nbytes if placement.shards_weights else None
        nbytes = config.bucket_nbytes or limit_of(specs, least, weight_nbytes)
        arrival = {spec.name: k for k, spec in enumerate(specs)}
        chunks: list[list[ParamSpec]] = []
        for number in sorted({spec.optimizer for spec in specs}):
            its_specs = [spec for spec in specs if spec.optimizer == number]
            chunks += split_at_blocks(its_specs, nbytes, kinds, is_default=config.bucket_nbytes is None)
        for members in sorted(chunks, key=lambda members: arrival[members[-1].name]):
            number, shapes = members[0].optimizer, [(spec.name, spec.shape) for spec in members]
            num_hosts = topology.num_hosts if topology.has_levels else 1
            rule, strides = rules[number], {spec.name: spec.strides for spec in members}
            own, multiple = owners if rule.whole else None, math.lcm(align, rule.block)
            layout = flat_layout(shapes, world_size, multiple, num_hosts, num_replicas, own, strides)
            net = reduce_dtype or acc_dtype
            differs = gather_encoding is not None and not placement.shards_weights
            buckets.append(Bucket(len(buckets), layout, dtype, grad_dtype, acc_dtype, device, number, net, differs))
    return Plan(
        tuple(buckets),
        world_size,
        placement,
        config.reduce,
        config.num_buffers,
        config.overlap,
        offload=config.host,
        overlap_gather=config.overlap_gather,
        topology=topology,
        num_replicas=num_replicas,
        kinds=tuple(kinds),
        weight_nbytes=config.weight_nbytes,
        reduce_encoding=reduce_encoding,
        gather_encoding=gather_encoding,
    )


def with_frozen(plan: Plan, params: Mapping[str, nn.Parameter], bucket_nbytes: int | None) -> Plan:
    """``plan`` with buckets for the frozen ``params`` (in order of registration), packed as `make_plan` packs others,
    each in its own dtype."""
    groups: dict[torch.dtype, list[ParamSpec]] = {}
    device, num_hosts = plan.buckets[0].device, plan.buckets[0].layout.num_hosts
    for name, param in reversed(list(params.items())):
        groups.setdefault(param.dtype, []).append(ParamSpec.of(name, param))
    buckets: list[Bucket] = []
    for dtype, specs in groups.items():
        align = ALIGN_NBYTES // dtype.itemsize
        nbytes = bucket_nbytes or limit_of(specs, weight_nbytes=plan.weight_nbytes)
        for members in split_at_blocks(specs, nbytes, plan.kinds, is_default=bucket_nbytes is None):
            shapes = [(spec.name, spec.shape) for spec in members]
            strides = {spec.name: spec.strides for spec in members}
            layout = flat_layout(shapes, plan.world_size, align, num_hosts, plan.num_replicas, strides=strides)
            buckets.append(Bucket(FIRST_FROZEN + len(buckets), layout, dtype, dtype, dtype, device, net_dtype=dtype))
    return replace(plan, frozen=tuple(buckets))


def default_nbytes(sizes: Sequence[int], least: int = DEFAULT_NBYTES) -> int:
    """The default size of a bucket for parameters of these ``sizes`` in bytes: enough for ENOUGH_BUCKETS, but at most
    the largest parameter. That one is a bucket in any case and decides the ring's size, so larger buckets cost no
    memory."""
    return max(least, min(max(sizes), sum(sizes) // ENOUGH_BUCKETS))


def limit_of(specs: Sequence[ParamSpec], least: int = DEFAULT_NBYTES, weight_nbytes: int | None = None) -> int:
    """`default_nbytes` for these parameters, but two buckets of sharded weights fit into ``weight_nbytes``."""
    nbytes = default_nbytes([spec.nbytes for spec in specs], least)
    return nbytes if weight_nbytes is None else min(nbytes, max(weight_nbytes // 2, 1))


def split_at_blocks(
    specs: Sequence[ParamSpec], bucket_nbytes: int, kinds: Sequence[BlockKind], *, is_default: bool
) -> list[list[ParamSpec]]:
    """Splits parameters into buckets: whole blocks of one kind, as many as ``bucket_nbytes`` allows, the same part of
    each block, or parameters outside of blocks. With the default size, a block of at least a quarter of it gets its own
    bucket, which its compiled graph fills alone."""
    positions = block_of(kinds)
    outside: list[ParamSpec] = []
    blocks: dict[tuple[int, int], list[ParamSpec]] = {}
    for spec in specs:
        parts = split_name(spec.name, positions)
        if parts is None:
            outside.append(spec)
        else:
            blocks.setdefault(positions[parts[0]], []).append(spec)
    chunks = _split(outside, bucket_nbytes) if outside else []
    for kind in range(len(kinds)):
        members = [block for (number, _), block in blocks.items() if number == kind]
        largest = max((sum(spec.nbytes for spec in block) for block in members), default=1)
        if largest > bucket_nbytes:
            chunks += [chunk for block in members for chunk in _split(block, bucket_nbytes)]
            continue
        count = 1 if is_default and 4 * largest >= bucket_nbytes else bucket_nbytes // largest
        for start in range(0, len(members), count):
            chunks.append([spec for block in members[start : start + count] for spec in block])
    return chunks


def _split(specs: Sequence[ParamSpec], bucket_nbytes: int) -> list[list[ParamSpec]]:
    """Splits in order, so that no bucket is larger than ``bucket_nbytes`` unless one parameter is."""
    chunks: list[list[ParamSpec]] = [[]]
    filled = 0
    for spec in specs:
        if chunks[-1] and filled + spec.nbytes > bucket_nbytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(spec)
        filled += spec.nbytes
    return chunks
