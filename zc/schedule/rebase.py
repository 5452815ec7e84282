"""A proved schedule for other buckets: what is compiled for one block runs for every block of its kind.

Before and after, of a schedule whose block has bucket 4, for the block before it, which has bucket 5; both write one
bucket, so the ring of two turns by one::

    wait_event("done/flat_grad[0]")                wait_event("done/flat_grad[1]")
    flatten_cast(4, "flat_grad[0]", ...)     ->    flatten_cast(5, "flat_grad[1]", ...)
    reduce(4, "acc[4]", "flat_grad[0]")            reduce(5, "acc[5]", "flat_grad[1]")
    record_event("done/flat_grad[0]")              record_event("done/flat_grad[1]")

Renaming buffers and events one-to-one keeps every order, and docs/proof.md says the same of every bucket and of every
buffer of a ring. The result is proved all the same: that takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from zc.planning.layout import outside
from zc.planning.plan import NUM_HOST_SUMS, Bucket, Plan
from zc.schedule import spec
from zc.schedule.buffer import AT_ENTRY, Buffer, carried_by, carried_event
from zc.schedule.nodes import op_of, written


class Shift(NamedTuple):
    """Where a bucket's gradients go: to ``bucket``, ``slots`` further on in its list of slots, ``offset`` elements."""

    bucket: int
    slots: int = 0
    offset: int = 0


def shifts(plan: Plan, names: Mapping[str, str]) -> dict[int, Shift] | None:
    """How to rebase a schedule for the parameters ``names`` on those that they are mapped to, by bucket; None: their
    places differ by more than that."""
    where = plan.slot_of
    moves: dict[int, Shift] = {}
    counts: dict[int, int] = {}
    for old, new in names.items():
        if old not in where or new not in where:
            return None
        (bucket, number), (to_bucket, to_number) = where[old], where[new]
        slot, to_slot = plan.bucket(bucket).slots[number], plan.bucket(to_bucket).slots[to_number]
        shift = Shift(to_bucket, to_number - number, to_slot.offset - slot.offset)
        if moves.setdefault(bucket, shift) != shift:
            return None
        if (slot.shape, slot.strides) != (to_slot.shape, to_slot.strides):
            return None
        counts[bucket] = counts.get(bucket, 0) + 1
    if len({shift.bucket for shift in moves.values()}) < len(moves):
        return None
    for bucket, shift in moves.items():
        here, there = plan.bucket(bucket), plan.bucket(shift.bucket)
        is_whole = counts[bucket] == len(here.slots)
        if is_whole != (counts[bucket] == len(there.slots)) or _dtypes(here) != _dtypes(there):
            return None
        if is_whole and (shift[1:] != (0, 0) or here.numel != there.numel):
            return None
    return moves


def _dtypes(bucket: Bucket) -> tuple[Any, ...]:
    return bucket.param_dtype, bucket.grad_dtype, bucket.acc_dtype, bucket.net_dtype, bucket.device


def rebased(graph: fx.Graph, plan: Plan, names: Mapping[str, str], moves: Mapping[int, Shift], turn: int) -> fx.Graph:
    """A copy of a finished schedule, for the parameters that ``names`` maps its own to. Its nodes go where ``moves``
    says, and its rings turn by ``turn`` writes. Its debt follows from ``names`` alone, so `verify` would refuse a
    gradient that has moved to another place."""
    where = plan.slot_of
    targets = {where[old]: where[new] for old, new in names.items()}
    rings = {"flat_grad": plan.num_buffers, "host_sum": NUM_HOST_SUMS, "staging": plan.num_staging}

    def buffer(old: Buffer) -> Buffer:
        if old.kind in AT_ENTRY:  # it lasts, so it is numbered by bucket; others are rings, or shared by all buckets
            return Buffer(old.kind, moves[old.index].bucket)
        size = rings.get(old.kind, 0)
        return Buffer(old.kind, (old.index + turn) % size) if size else old

    def moved(op: spec.Op) -> spec.Op:
        changes: dict[str, Any] = {name: buffer(b) for name, b in op.buffers.items()}
        if isinstance(op, spec.Sync) and (carried := carried_by(op.event)) is not None:
            changes["event"] = carried_event(buffer(carried))
        if isinstance(op, spec.TakeWeights):
            changes["places"] = tuple(targets[place] for place in op.places)
        if isinstance(op, spec.BucketOp):
            shift = moves[op.bucket]
            changes["bucket"] = shift.bucket
            for name, by in (("slot", shift.slots), ("start", shift.offset), ("stop", shift.offset)):
                if hasattr(op, name):
                    changes[name] = getattr(op, name) + by
            if isinstance(op, spec.Cast):
                changes["slots"] = tuple(slot + shift.slots for slot in op.slots)
                if op.spans is not None:  # of the whole bucket, without the slots whose gradients are made in place
                    in_place = outside(op.spans, plan.bucket(op.bucket).numel)
                    moved_there = [(start + shift.offset, stop + shift.offset) for start, stop in in_place]
                    changes["spans"] = outside(moved_there, plan.bucket(shift.bucket).numel)
        return replace(op, **changes) if changes else op

    new = fx.Graph(owning_module=graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        op = op_of(node)
        args, kwargs = (node.args, node.kwargs) if op is None else written(moved(op))
        args, kwargs = fx.map_arg((args, kwargs), lambda n: copies[n])
        copies[node] = copy = new.create_node(node.op, node.target, args, kwargs, name=node.name, type_expr=node.type)
        copy.meta = {key: item for key, item in node.meta.items() if key != "record"}
        if "gradient_of" in node.meta:
            copy.meta["gradient_of"] = tuple(targets[place] for place in node.meta["gradient_of"])
    debt = graph.output_node().meta.get("debt")
    if debt is not None:
        gradients = frozenset(targets[place] for place in debt.gradients)
        new.output_node().meta["debt"] = replace(debt, gradients=gradients)
    return new
