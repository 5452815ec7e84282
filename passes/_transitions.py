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
# added to SUM); FLIGHT and ROWS, all ranks' shards on their way and there; HOST_SUM, the sum of the first of two
# reductions, SUMS_FLIGHT and SUMS those of the other hosts or replicas; of two levels by messages HOST_FLIGHT and
# HOST_ROWS, those of this host's ranks; SENT, a partial sum that has left; TOTAL, the mean over ranks added; LANDED, in
# host memory. Of weights: OLD, NEW, CAST, RANGE, whole in this rank's host range, GATHERED, PUBLISHED. Of what others
# read where it lies: OFFERED by this rank, OPEN by all, READ here, RETURNED by this rank. In few bits: ENCODED, a
# gradient or HOST_SUM, on its way (ENCODED_FLIGHT) and of all ranks (ENCODED_ROWS); DIFFERENCE, what this rank's
# masters are ahead of weights that are BEHIND until the DIFFERENCES of all ranks are added.
NOTHING, SUM, GRADIENT, FLIGHT, ROWS = "nothing", "sum", "gradient", "rows in flight", "rows"
HOST_SUM, SUMS_FLIGHT, SUMS = "sum of some ranks", "sums in flight", "sums"
HOST_FLIGHT, HOST_ROWS = "rows of a host in flight", "rows of a host"
SENT, TOTAL, LANDED = "sent sum", "total", "landed total"
ENCODED, ENCODED_FLIGHT, ENCODED_ROWS = "encoded gradient", "encoded rows in flight", "encoded rows"
DIFFERENCE, DIFFERENCES, BEHIND = "encoded difference", "encoded differences", "weights without their difference"
OFFERED, OPEN, READ, RETURNED = "offered rows", "open rows", "read rows", "returned rows"
OLD, NEW, CAST, GATHERED, PUBLISHED = "old weights", "new weights", "cast weights", "gathered weights", "weights"
RANGE = "weights of a host range"

AT_ENTRY = {  # all others: NOTHING
    "acc": SUM, "host": SUM, "master": OLD, "flat_param": OLD, "gathered": OLD, "weight": OLD,
}  # fmt: skip
AT_EXIT = {  # all others: NOTHING
    "acc": (SUM, GRADIENT, TOTAL, LANDED), "host": (SUM, LANDED), "master": (OLD, CAST),
    "flat_param": (OLD, PUBLISHED), "gathered": (OLD, GATHERED, PUBLISHED), "weight": (OLD, PUBLISHED),
}  # fmt: skip


class Row(NamedTuple):
    """One field of an operation: in a buffer of one of ``kinds`` it needs one of ``needs``, and ``leaves`` this.

    ``when``: under plans of which these are true (`facts_of`). ``beside``: where the operation's other buffer is of one
    of these kinds; empty: of any. ``among``: of a reduction, that field of it.
    """

    field: str
    kinds: str
    needs: tuple[str, ...]
    leaves: str
    when: str = ""
    beside: str = ""
    among: str | None = None


TABLE: dict[type[Op], tuple[Row, ...]] = {
    spec.FlattenCast: (Row("buffer", "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),),
    spec.AccumulateCast: (Row("buffer", "acc staging", (SUM,), GRADIENT, "partial"),),
    spec.WgradInto: (
        Row("buffer", "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),
        Row("buffer", "acc staging", (GRADIENT,), GRADIENT, "partial"),  # accumulate_cast has emptied or kept it
    ),
    spec.LaunchReduce: (
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "ring", among=spec.WITHIN_HOST),
        Row("src", "acc staging", (GRADIENT,), SENT, "partial", among=spec.WITHIN_HOST),
        Row("dst", "recv", (NOTHING,), HOST_FLIGHT, "in_place", among=spec.WITHIN_HOST),
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "ring plain direct"),
        Row("src", "acc staging", (GRADIENT,), SENT, "partial plain direct"),
        Row("src", "flat_grad", (HOST_SUM,), NOTHING, "ring plain in_place"),
        Row("src", "acc staging", (HOST_SUM,), SENT, "partial plain in_place"),
        Row("src", "host_sum", (HOST_SUM,), NOTHING, "twice plain"),
        Row("src", "wire", (ENCODED,), NOTHING, "encoded"),
        Row("dst", "recv", (NOTHING,), FLIGHT, beside="flat_grad acc staging"),
        Row("dst", "recv", (NOTHING,), SUMS_FLIGHT, "twice", beside="host_sum"),
        Row("dst", "recv", (NOTHING,), ENCODED_FLIGHT, "encoded", beside="wire"),
    ),
    spec.WaitReduce: (
        Row("dst", "recv", (HOST_FLIGHT,), HOST_ROWS, among=spec.WITHIN_HOST),
        Row("dst", "recv", (FLIGHT,), ROWS),
        Row("dst", "recv", (SUMS_FLIGHT,), SUMS),
        Row("dst", "recv", (ENCODED_FLIGHT,), ENCODED_ROWS, "encoded"),
    ),
    spec.Quantise: (
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "ring once direct"),
        Row("src", "acc staging", (GRADIENT,), SENT, "partial once direct"),
        Row("src", "flat_grad", (HOST_SUM,), NOTHING, "ring in_place"),
        Row("src", "acc staging", (HOST_SUM,), SENT, "partial in_place"),
        Row("src", "host_sum", (HOST_SUM,), NOTHING, "twice"),
        Row("dst", "wire", (NOTHING,), ENCODED, "encoded"),
    ),
    spec.AccumulateQuantised: (
        Row("src", "recv", (ENCODED_ROWS,), NOTHING, "encoded"),
        Row("dst", "acc staging", (SUM,), TOTAL, "ring"),
        Row("dst", "acc staging", (SENT,), TOTAL, "partial"),
    ),
    spec.Accumulate: (
        Row("src", "recv", (HOST_ROWS,), NOTHING, "in_place", among=spec.WITHIN_HOST),
        Row("dst", "flat_grad", (NOTHING,), HOST_SUM, "ring", among=spec.WITHIN_HOST),
        Row("dst", "acc staging", (SENT,), HOST_SUM, "partial", among=spec.WITHIN_HOST),
        Row("src", "recv", (ROWS,), NOTHING, "once", beside="acc staging"),
        Row("src", "recv", (ROWS,), NOTHING, "twice", beside="host_sum"),
        Row("src", "recv", (SUMS,), NOTHING, "twice", beside="acc staging"),
        Row("src", "flat_grad", (GRADIENT,), NOTHING, "alone"),  # one rank sends nothing
        Row("dst", "host_sum", (NOTHING,), HOST_SUM, "twice"),
        Row("dst", "acc staging", (SUM,), TOTAL, "ring"),
        Row("dst", "acc staging", (SENT,), TOTAL, "partial"),
    ),
    spec.ReduceRows: (
        Row("src", "flat_grad", (OPEN,), READ, "ring"),
        Row("src", "acc staging", (OPEN,), SENT, "partial"),
        Row("dst", "host_sum", (NOTHING,), HOST_SUM, "twice"),
        Row("dst", "acc staging", (SUM,), TOTAL, "ring once"),
        Row("dst", "acc staging", (SENT,), TOTAL, "partial once"),
    ),
    spec.SignalFull: (
        Row("buffer", "flat_grad", (GRADIENT,), OFFERED, "ring"),
        Row("buffer", "acc staging", (GRADIENT,), OFFERED, "partial"),
        Row("buffer", "flat_param", (NEW,), OFFERED, "offload flat"),
        Row("buffer", "flat_param gathered", (OLD,), OFFERED, "device whole flat"),
        Row("buffer", "flat_param gathered", (RANGE,), OFFERED, "levels"),
    ),
    spec.AwaitFull: (Row("buffer", "flat_grad acc staging flat_param gathered", (OFFERED,), OPEN),),
    spec.SignalFree: (
        Row("buffer", "flat_grad flat_param gathered", (READ,), RETURNED),
        Row("buffer", "acc staging", (TOTAL,), TOTAL, "partial"),
        Row("buffer", "acc staging", (SENT,), SENT, "partial twice"),
    ),
    spec.AwaitFree: (
        Row("buffer", "flat_grad", (RETURNED,), NOTHING),
        Row("buffer", "acc staging", (TOTAL,), TOTAL, "partial"),
        Row("buffer", "acc staging", (SENT,), SENT, "partial twice"),
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
        Row("dst", "staging", (NOTHING,), SUM, beside="host"),
        Row("src", "master", (OLD, NEW), CAST),
        Row("src", "param", (CAST,), NOTHING),
        Row("dst", "flat_param", (OLD,), NEW, "replicated"),
        Row("dst", "weight", (OLD,), NEW, "sharded"),
        Row("dst", "staging", (NOTHING,), NEW, "sharded", beside="master param"),
    ),
    spec.Update: (Row("dst", "master", (OLD,), NEW), Row("src", "host", (SUM,), SUM)),
    spec.CastParam: (Row("src", "master", (OLD, NEW), CAST), Row("dst", "param", (NOTHING,), CAST)),
    spec.Spread: (
        Row("buffer", "flat_param", (NEW,), NEW, "offload"),
        Row("buffer", "flat_param gathered", (OLD,), OLD, "device"),
    ),
    spec.SpreadShards: (Row("src", "staging", (NEW,), NOTHING), Row("dst", "weight", (OLD,), NEW, "sharded")),
    spec.GatherNet: (
        Row("buffer", "flat_param", (NEW,), RANGE, "levels offload"),
        Row("buffer", "flat_param gathered", (OLD,), RANGE, "levels device whole"),
    ),
    spec.EncodeUpdate: (
        Row("src", "flat_param gathered", (OLD,), BEHIND, "differs"),
        Row("dst", "update", (NOTHING,), DIFFERENCE, "differs"),
    ),
    spec.ExchangeUpdates: (Row("buffer", "update", (DIFFERENCE,), DIFFERENCES, "differs"),),
    spec.ApplyUpdate: (
        Row("src", "update", (DIFFERENCES,), NOTHING, "differs"),
        Row("dst", "flat_param gathered", (BEHIND,), GATHERED, "differs flat"),
        Row("dst", "flat_param gathered", (BEHIND,), RANGE, "differs levels"),
    ),
    spec.Gather: (
        Row("buffer", "flat_param gathered", (OPEN,), READ, "memory"),
        Row("buffer", "flat_param", (NEW,), GATHERED, "messages offload flat"),
        Row("buffer", "flat_param gathered", (OLD,), GATHERED, "messages device whole flat"),
        Row("buffer", "flat_param gathered", (RANGE,), GATHERED, "messages levels"),
    ),
    spec.Publish: (
        Row("buffer", "flat_param", (GATHERED,), PUBLISHED),
        Row("buffer", "flat_param", (NEW, OLD), PUBLISHED, "unsharded"),
        Row("buffer", "gathered", (OLD, GATHERED), PUBLISHED),
        Row("buffer", "weight", (NEW,), PUBLISHED),
    ),
    spec.GatherWeights: (
        Row("src", "weight", (OLD,), OLD),
        Row("dst", "flat_param", (OLD,), GATHERED),
        Row("dst", "arena", (NOTHING,), NOTHING),  # `residency` knows what its extents hold
    ),
    spec.GatherEncoded: (
        Row("src", "weight", (OLD,), OLD),
        Row("via", "update", (NOTHING,), NOTHING),
        Row("dst", "flat_param", (OLD,), GATHERED),
        Row("dst", "arena", (NOTHING,), NOTHING),
    ),
    spec.FreeWeights: (),
}


def facts_of(plan: Plan | None) -> frozenset[str]:
    """What is true of a plan, as ``Row.when`` names it; without a plan, all of it."""
    if plan is None:
        return frozenset(fact for rows in TABLE.values() for row in rows for fact in row.when.split())
    where = "ring" if plan.placement.shards_gradients else "partial"
    ways = {"device" if plan.offload is None else "offload", "memory" if plan.reads_weights else "messages"}
    ways |= {"levels" if plan.has_levels else "flat", "in_place" if plan.sums_in_place else "direct"}
    others = {"alone": plan.num_ranks == 1, "unsharded": plan.world_size == 1}
    ways |= {"twice" if plan.reduces_twice else "once", "encoded" if plan.reduce_bits else "plain"}
    ways |= {"differs" if plan.gather_bits else "whole", "sharded" if plan.placement.shards_weights else "replicated"}
    return frozenset({where} | ways | {fact for fact, is_true in others.items() if is_true})


def rows_for(op: Op, field: str, buffer: Buffer, facts: frozenset[str]) -> list[Row]:
    """The rows that apply to this field of an operation, under plans with these facts."""
    beside = {other.kind for name, other in spec.buffers_of(op).items() if name != field}
    among = getattr(op, "among", None)
    return [
        row
        for row in TABLE[type(op)]
        if row.field == field and buffer.kind in row.kinds.split() and facts.issuperset(row.when.split())
        if row.among == among and (not row.beside or beside & set(row.beside.split()))
    ]


def fields_of(kind: type[Op]) -> Iterable[str]:
    """Those that name buffers of which the table speaks."""
    return dict.fromkeys(row.field for row in TABLE[kind])


def at_entry(buffer: Buffer) -> tuple[int, str]:
    """Bucket, and what the buffer holds of it: what lasts between schedules is numbered by bucket; the rings are
    empty."""
    return buffer.index, AT_ENTRY.get(buffer.kind, NOTHING)


def may_be_left(buffer: Buffer, content: str) -> bool:
    return content in AT_EXIT.get(buffer.kind, (NOTHING,))
