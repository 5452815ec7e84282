"""A weight gradient made in place is a sink: nobody waits for it but its bucket. One bucket's go behind the last ones,
where they cover the last reduction, which nothing else would.

Before and after, buckets 0, 1, 2 of which the last, an embedding, is large and bucket 1 is small::

    compute: ... dX | dW of 0 | dX | dW of 1 | dX | scatter 2 |              compute: ... | scatter 2 | dW of 1 |
       comm:                  | reduce 0 | reduce 1 |         | reduce 2 |      comm:                 | reduce 2 | 1 |

    wgrad_into(1, "flat_grad[1]", ...)              ...
    ...                                       ->    wgrad_into(2, "flat_grad[1]", ..., how="scatter")
    wgrad_into(2, "flat_grad[0]", ...)              wgrad_into(1, "flat_grad[0]", ...)

By default each bucket is completed as early as it can be: its gradients stand right behind their last producer. That
is best for every bucket but the last. Each other bucket in turn is tried behind it, on the cost model of
zc.schedule.cost, and the best is taken where it ends the backward earlier by GAIN or more. The model sees the plan and
the order of the writes, and no shape of an activation: ranks with batches of different sizes choose the same
(INVARIANTS I7). A bucket without a matmul in place is no candidate: nothing of it would cover anything. What the
delayed matmuls read lives until the end of the backward, when nothing else of the forward does any more: far from where
memory peaks.

Left alone: schedules that send nothing (one rank, microbatches in no_sync), without overlap, with offload.

The freedom is that of zero-bubble pipelines, which split the backward for input from that for weights
(arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.passes.reduce_buckets import is_complete, writes_of
from zc.planning.plan import Plan
from zc.schedule import cost
from zc.schedule.nodes import slots_of, wgrad_into

GAIN = 0.01  # of the backward's predicted time; less is not worth another order


@dataclass(frozen=True)
class _Group:
    """One complete bucket: its writes, what the matmuls among them take, and what its backward takes beside them."""

    bucket: int
    writes: tuple[fx.Node, ...]
    us_delayed: float
    us_before: float
    us_exchange: float


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new, _ = copy_graph(graph)
    if not (plan.reduces and plan.overlap and plan.world_size > 1) or plan.offload is not None:
        return new
    if any(node.meta.get("delayed") for node in new.nodes):
        return new
    groups = [_group(bucket, nodes, plan) for bucket, nodes in writes_of(new).items() if is_complete(nodes, plan)]
    chosen = choose(groups, plan)
    if chosen is None:
        return new
    last = groups[-1].writes[-1]
    for node in groups[chosen].writes:
        last.append(node)
        node.meta["delayed"] = True
        last = node
    if plan.placement.gradient_in_ring:
        for k, group in enumerate([*groups[:chosen], *groups[chosen + 1 :], groups[chosen]]):
            for node in group.writes:
                node.args = (node.args[0], f"flat_grad[{k % plan.num_buffers}]", *node.args[2:])
    return new


def choose(groups: Sequence[_Group], plan: Plan) -> int | None:
    """Which of the groups goes behind the last one, if any."""
    if len(groups) < 2:
        return None
    early = _end(groups, None)
    ends = [(_end(groups, k), k) for k, g in enumerate(groups[:-1]) if g.us_delayed]
    best = min(ends, default=(early, 0))
    return best[1] if best[0] <= early * (1 - GAIN) else None


def _end(groups: Sequence[_Group], delayed: int | None) -> float:
    """Microseconds until compute and the last reduction are done, with one group's gradients made last."""
    now = free = 0.0
    for k, group in enumerate(groups):
        now += group.us_before + (group.us_delayed if k != delayed else 0.0)
        if k != delayed:
            free = max(now, free) + group.us_exchange
    if delayed is not None:
        now += groups[delayed].us_delayed
        free = max(now, free) + groups[delayed].us_exchange
    return max(now, free)


def _group(bucket: int, nodes: Sequence[fx.Node], plan: Plan) -> _Group:
    record = plan.buckets[bucket]
    matmuls = [n for n in nodes if n.target is wgrad_into and n.kwargs["how"] == "mm"]
    delayed = {k for n in matmuls for k in slots_of(n)}
    us = {k: cost.nominal_us(s.numel, record, plan) for k, s in enumerate(record.slots) if len(s.shape) > 1}
    # the gradient of a layer's input is a matmul of the same size; an embedding (scattered) has none
    scattered = {k for n in nodes if n.target is wgrad_into and n.kwargs["how"] != "mm" for k in slots_of(n)}
    before = sum(us[k] * (1 if k in delayed else 2) for k in us if k not in scattered)
    return _Group(bucket, tuple(nodes), sum(us[k] for k in delayed), before, cost.exchange_us(record, plan))


PASS = Pass("delay_weight_grads", run, requires=frozenset({"writes"}))
