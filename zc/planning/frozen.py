"""Buckets of frozen parameters (stage 3): sharded and gathered like the others, without gradients, masters or states.

They are numbered from `FIRST_FROZEN` on, so that the buckets that `zc.recompile` adds can follow those of `make_plan`.
A parameter that becomes trainable moves to a bucket of its own, and leaves its slot (`Plan.without`)::

    buckets      0: adapters                            1: what zc.recompile has added, embed.weight
    frozen       100000: (left), norm.weight           100001: layers.0.weight ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from zc.planning.layout import ALIGN_NBYTES, flat_layout
from zc.planning.packing import ParamSpec, limit_of, split_at_blocks, with_strides
from zc.planning.plan import FIRST_FROZEN, Bucket, Plan


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
            layout = flat_layout(shapes, plan.world_size, align, num_hosts, plan.num_replicas)
            layout = with_strides(layout, members)
            buckets.append(Bucket(FIRST_FROZEN + len(buckets), layout, dtype, dtype, dtype, device, net_dtype=dtype))
    return replace(plan, frozen=tuple(buckets))
