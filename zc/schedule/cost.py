"""How long a schedule's nodes take: bytes and FLOPs over ceilings. For pictures alone, since a decision between
schedules must not depend on a size that differs between ranks.

    microseconds = launch + max(FLOPs / ceiling, bytes / bandwidth)         (the roofline: Williams et al., CACM 2009)

The ceilings are constants of a device type, never measured at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zc.planning.hops import Hop, Way
from zc.planning.plan import Bucket, Plan
from zc.schedule.nodes import op_of
from zc.schedule.spec import (
    BucketOp,
    Cast,
    Role,
    Segment,
    Take,
    WgradInto,
)

Cost = Callable[[fx.Node], float]  # microseconds; of a launch: of the exchange itself


class Ceilings(NamedTuple):
    """Per microsecond: FLOPs of a matmul by width of its inputs, bytes to and from memory, bytes between ranks."""

    flops_full: float
    flops_half: float
    nbytes_memory: float
    nbytes_link: float
    us_launch: float


CEILINGS = {
    # one thread of an AMD EPYC with AVX512-BF16 (bench/kernels.py, matmuls of 512 to 2048), two ranks over gloo
    "cpu": Ceilings(80e3, 200e3, 8e3, 3.5e3, 10.0),
    # round numbers between those of current data-centre GPUs and their links; not measured
    "cuda": Ceilings(60e6, 400e6, 2e6, 2e5, 5.0),
}


def ceilings_of(plan: Plan) -> Ceilings:
    """Of the plan's device; a GPU's without a plan."""
    return CEILINGS.get(plan.buckets[0].device.type if plan.buckets else "cuda", CEILINGS["cuda"])


def hop_us(hop: Hop, bucket: Bucket, plan: Plan) -> float:
    """What one hop of a reduction sends, all but the part for this rank."""
    c = ceilings_of(plan)
    num_messages = 2 if hop.way is Way.REPLICAS else 1  # pieces go out as they are, and come back summed
    return num_messages * c.us_launch + hop.nbytes_sent(plan, bucket) / c.nbytes_link


_aten = torch.ops.aten
_ALIKE: dict[Any, Any] = {  # the counter knows a CPU's attention by no name
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def flops(node: fx.Node) -> float:
    """The FLOPs of one ATen node, as torch's flop counter has them: matmuls, convolutions and attention; 0 for all
    others, which memory bounds."""
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(_ALIKE.get(packet, packet))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _sized(n.meta.get("val")))
    return float(count(*args, **kwargs, out_val=_sized(node.meta.get("val"))))


def segment_us(node: fx.Node, ceilings: Ceilings) -> float:
    """A segment: its matmuls one by one, and the rest as one fused pass over its inputs and outputs."""
    gm = node.meta.get("segment")
    values = [n.meta.get("val") for n in (*node.all_input_nodes, *node.users)]
    total = ceilings.us_launch + sum(_nbytes(v) for v in values) / ceilings.nbytes_memory
    for inner in gm.graph.nodes if isinstance(gm, fx.GraphModule) else ():
        work = flops(inner)
        if work:
            total += _roofline(
                work, [*(n.meta.get("val") for n in inner.all_input_nodes), inner.meta.get("val")], ceilings
            )
    return total


def estimate(plan: Plan) -> Cost:
    """Microseconds of any node of a schedule."""
    c = ceilings_of(plan)

    def cost(node: fx.Node) -> float:
        op = op_of(node)
        if isinstance(op, Segment):
            return segment_us(node, c)
        if not isinstance(op, BucketOp):
            return 0.0
        bucket = plan.bucket(op.bucket)
        if isinstance(op, Take):
            return hop_us(plan.hops[op.hop], bucket, plan)
        if isinstance(op, WgradInto):
            numel = bucket.slots[op.slot].numel
            vals = [n.meta.get("val") for n in op.inputs]
            work = 0.0
            if op.how in (None, "mm") and isinstance(vals[0], torch.Tensor):
                work = 2.0 * numel * _int(vals[0].shape[-1])
            return _roofline(work, vals, c) + numel * 4 / c.nbytes_memory
        numel = bucket.numel
        if isinstance(op, Cast) and op.spans is not None:
            numel = sum(stop - start for start, stop in op.spans)
        elif op.role is Role.REDUCTION:
            numel = bucket.layout.numel_shard * plan.world_size
        return c.us_launch + 2.0 * numel * bucket.reduce_dtype.itemsize / c.nbytes_memory

    return cost


def _roofline(work: float, values: list[Any], c: Ceilings) -> float:
    half = any(isinstance(v, torch.Tensor) and v.is_floating_point() and v.element_size() < 4 for v in values)
    nbytes = sum(_nbytes(v) for v in values)
    return c.us_launch + max(work / (c.flops_half if half else c.flops_full), nbytes / c.nbytes_memory)


def _nbytes(val: Any) -> float:
    if isinstance(val, (tuple, list)):
        return sum(_nbytes(v) for v in val)
    return _numel(val.shape) * val.element_size() if isinstance(val, torch.Tensor) else 0.0


def _sized(val: Any) -> Any:
    """A value of constant sizes: the flop counter reads its shape."""
    if isinstance(val, (tuple, list)):
        return [_sized(v) for v in val]
    if isinstance(val, torch.Tensor):
        return torch.empty([_int(size) for size in val.shape], device="meta")
    return _int(val) if isinstance(val, torch.SymInt) else val


def _numel(shape: Any) -> float:
    return float(prod(_int(size) for size in shape))


def _int(size: Any) -> int:
    """A symbolic size counts as 1: a picture is no reason for a guard."""
    return size if isinstance(size, int) else 1
