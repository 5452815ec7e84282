"""What each operation of a schedule needs in the buffers that it names, and what it leaves there. `exactly_once` walks
a schedule through this table.

    launch_reduce(2, "recv[0]", "flat_grad[0]")     stage 2: flat_grad holds a GRADIENT, then NOTHING
                                                    recv holds NOTHING, then FLIGHT
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zc.planning.plan import Plan
from zc.schedule import spec
from zc.schedule.buffer import Buffer
from zc.schedule.spec import Op

# What a buffer holds. Of gradients: SUM of the backwards before; GRADIENT, that of this backward (in an accumulator
# added to SUM); FLIGHT and ROWS, all ranks' parts on their way and there; SENT, a partial sum that has left; TOTAL, the
# mean over ranks added; LANDED, in host memory. Of weights: OLD, NEW, CAST, SPREAD, GATHERED, PUBLISHED. Of what other
# ranks read where it lies: OFFERED by this rank, OPEN by all, READ here, RETURNED by this rank.
NOTHING, SUM, GRADIENT, FLIGHT, ROWS = "nothing", "sum", "gradient", "rows in flight", "rows"
SEGMENT = "sum of some ranks"
SENT, TOTAL, LANDED = "sent sum", "total", "landed total"
OFFERED, OPEN, READ, RETURNED = "offered rows", "open rows", "read rows", "returned rows"
OLD, NEW, CAST, GATHERED, PUBLISHED = "old weights", "new weights", "cast weights", "gathered weights", "weights"

AT_ENTRY = {"acc": SUM, "host": SUM, "master": OLD, "flat_param": OLD, "gathered": OLD}  # all others: NOTHING
AT_EXIT = {  # all others: NOTHING
    "acc": (SUM, GRADIENT, TOTAL, LANDED), "host": (SUM, LANDED), "master": (OLD, CAST),
    "flat_param": (OLD, PUBLISHED), "gathered": (OLD, GATHERED, PUBLISHED),
}  # fmt: skip


class Row(NamedTuple):
    """One field of an operation: in a buffer of one of ``kinds`` it needs one of ``needs``, and ``leaves`` this;
    ``when``: under plans of which these are true (`facts_of`)."""

    field: str
    kinds: str
    needs: tuple[str, ...]
    leaves: str
    when: str = ""


TABLE: dict[type[Op], tuple[Row, ...]] = {
    spec.FlattenCast: (Row("buffer", "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),),
    spec.AccumulateCast: (Row("buffer", "acc staging", (SUM,), GRADIENT, "partial"),),
    spec.WgradInto: (
        Row("buffer", "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),
        Row("buffer", "acc staging", (GRADIENT,), GRADIENT, "partial"),  # accumulate_cast has emptied or kept it
    ),
    spec.SumRows: (
        Row("src", "flat_grad", (OPEN,), READ, "ring"),
        Row("src", "acc staging", (OPEN,), SENT, "partial"),
        Row("dst", "part", (NOTHING,), SEGMENT),
    ),
    spec.SumReceived: (
        Row("src", "recv", (ROWS,), NOTHING, "replicas"),
        Row("dst", "part", (NOTHING,), SEGMENT, "replicas"),
    ),
    spec.ReduceReplicas: (
        Row("src", "part", (SEGMENT,), NOTHING, "replicas"),
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "ring unsharded"),
        Row("src", "acc", (GRADIENT, SUM), SENT, "partial unsharded"),
        Row("via", "recv", (NOTHING,), NOTHING, "replicas"),
        Row("dst", "acc", (SUM,), TOTAL, "ring replicas"),
        Row("dst", "acc", (SENT,), TOTAL, "partial replicas"),
    ),
    spec.LaunchReduce: (
        Row("src", "part", (SEGMENT,), NOTHING, "levels"),
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "ring"),
        Row("src", "acc staging", (GRADIENT, SUM), SENT, "partial"),
        Row("dst", "recv", (NOTHING,), FLIGHT),
    ),
    spec.WaitReduce: (Row("dst", "recv", (FLIGHT,), ROWS),),
    spec.Accumulate: (
        Row("src", "recv", (ROWS,), NOTHING, "flat"),
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "alone flat"),  # one rank sends nothing
        Row("dst", "acc staging", (SUM,), TOTAL, "ring"),
        Row("dst", "acc staging", (SENT,), TOTAL, "partial"),
    ),
    spec.SignalFull: (
        Row("buffer", "flat_grad", (GRADIENT,), OFFERED, "ring"),
        Row("buffer", "acc staging", (GRADIENT, SUM), OFFERED, "partial"),
        Row("buffer", "flat_param", (NEW,), OFFERED, "offload"),
        Row("buffer", "flat_param", (OLD,), OFFERED, "device"),
        Row("buffer", "gathered", (OLD,), OFFERED),
    ),
    spec.AwaitFull: (Row("buffer", "flat_grad acc staging flat_param gathered", (OFFERED,), OPEN),),
    spec.ReduceRows: (
        Row("src", "flat_grad", (OPEN,), READ, "ring flat"),
        Row("src", "acc staging", (OPEN,), SENT, "partial flat"),
        Row("dst", "acc staging", (SUM,), TOTAL, "ring"),
        Row("dst", "acc staging", (SENT,), TOTAL, "partial"),
    ),
    spec.SignalFree: (
        Row("buffer", "flat_grad flat_param gathered", (READ,), RETURNED),
        Row("buffer", "acc staging", (TOTAL,), TOTAL, "partial"),
        Row("buffer", "acc staging", (SENT,), SENT, "partial parts"),
    ),
    spec.AwaitFree: (
        Row("buffer", "flat_grad", (RETURNED,), NOTHING),
        Row("buffer", "acc staging", (TOTAL,), TOTAL, "partial"),
        Row("buffer", "acc staging", (SENT,), SENT, "partial parts"),
        Row("buffer", "flat_param gathered", (RETURNED,), GATHERED),
    ),
    spec.StageShard: (
        Row("src", "acc", (TOTAL, SUM), LANDED),
        Row("src", "acc", (GRADIENT,), LANDED, "alone"),
        Row("dst", "staging", (NOTHING,), TOTAL),
    ),
    spec.CopyToHost: (Row("src", "staging", (TOTAL, GRADIENT), NOTHING), Row("dst", "host", (SUM,), LANDED)),
    spec.CopyToDevice: (
        Row("src", "host", (SUM,), SUM),
        Row("dst", "staging", (NOTHING,), SUM),
        Row("src", "master", (OLD, NEW), CAST),
        Row("src", "param", (CAST,), NOTHING),
        Row("dst", "flat_param", (OLD,), NEW),
    ),
    spec.Update: (Row("dst", "master", (OLD,), NEW), Row("src", "host", (SUM,), SUM)),
    spec.CastParam: (Row("src", "master", (OLD, NEW), CAST), Row("dst", "param", (NOTHING,), CAST)),
    spec.Spread: (
        Row("buffer", "flat_param", (NEW,), NEW, "offload"),
        Row("buffer", "flat_param gathered", (OLD,), OLD, "device"),
    ),
    spec.GatherNet: (
        Row("buffer", "flat_param", (NEW,), NEW, "levels offload"),
        Row("buffer", "flat_param gathered", (OLD,), OLD, "levels device"),
    ),
    spec.Gather: (
        Row("buffer", "flat_param gathered", (OPEN,), READ, "memory"),
        Row("buffer", "flat_param", (NEW,), GATHERED, "messages offload"),
        Row("buffer", "flat_param", (OLD,), GATHERED, "messages device"),
        Row("buffer", "gathered", (OLD,), GATHERED, "messages"),
    ),
    spec.Publish: (
        Row("buffer", "flat_param", (GATHERED,), PUBLISHED),
        Row("buffer", "flat_param", (NEW, OLD), PUBLISHED, "alone"),
        Row("buffer", "gathered", (OLD, GATHERED), PUBLISHED),
    ),
}


def facts_of(plan: Plan | None) -> frozenset[str]:
    """What is true of a plan, as ``Row.when`` names it; without a plan, all of it."""
    if plan is None:
        return frozenset(fact for rows in TABLE.values() for row in rows for fact in row.when.split())
    where = "ring" if plan.placement.shards_gradients else "partial"
    ways = {"device" if plan.offload is None else "offload", "memory" if plan.reads_weights else "messages"}
    others = {
        "alone": plan.world_size == 1, "levels": plan.has_levels, "parts": plan.has_parts,
        "flat": plan.num_replicas == 1, "replicas": plan.num_replicas > 1,
        "unsharded": plan.num_replicas > 1 and plan.world_size == 1,
    }  # fmt: skip
    return frozenset({where} | ways | {fact for fact, is_true in others.items() if is_true})


def rows_for(kind: type[Op], field: str, buffer: Buffer, facts: frozenset[str]) -> list[Row]:
    """The rows that speak of this buffer in this field, under plans with these facts."""
    rows = (row for row in TABLE[kind] if row.field == field and buffer.kind in row.kinds.split())
    return [row for row in rows if facts.issuperset(row.when.split())]


def fields_of(kind: type[Op]) -> Iterable[str]:
    """Those that name buffers of which the table speaks."""
    return dict.fromkeys(row.field for row in TABLE[kind])


def at_entry(buffer: Buffer) -> tuple[int, str]:
    """Bucket, and what the buffer holds of it: what lasts between schedules is numbered by bucket; the rings are
    empty."""
    return buffer.index, AT_ENTRY.get(buffer.kind, NOTHING)


def may_be_left(buffer: Buffer, held: str) -> bool:
    return held in AT_EXIT.get(buffer.kind, (NOTHING,))
