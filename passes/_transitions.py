"""What each operation of a schedule needs in the buffers that it names, and what it leaves there. `exactly_once` walks
a schedule through this table.

    launch_reduce(2, "recv[0]", "flat_grad[0]")     stage 2: flat_grad holds a GRADIENT, then NOTHING
                                                    recv holds NOTHING, then FLIGHT
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zc.planning.plan import Plan
from zc.schedule.nodes import (
    accumulate,
    accumulate_cast,
    cast_param,
    copy_to_device,
    copy_to_host,
    flatten_cast,
    gather,
    launch_reduce,
    publish,
    stage_shard,
    update,
    wait_reduce,
    wgrad_into,
)

# What a buffer holds. Of gradients: SUM of the backwards before; GRADIENT, that of this backward (in an accumulator
# added to SUM); FLIGHT and ROWS, all ranks' parts on their way and there; SENT, a partial sum that has left; TOTAL, the
# mean over ranks added; LANDED, in host memory. Of weights: OLD, NEW, CAST, GATHERED, PUBLISHED.
NOTHING, SUM, GRADIENT, FLIGHT, ROWS = "nothing", "sum", "gradient", "rows in flight", "rows"
SENT, TOTAL, LANDED = "sent sum", "total", "landed total"
OLD, NEW, CAST, GATHERED, PUBLISHED = "old weights", "new weights", "cast weights", "gathered weights", "weights"

AT_ENTRY = {"acc": SUM, "host": SUM, "master": OLD, "flat_param": OLD, "gathered": OLD}  # all others: NOTHING
AT_EXIT = {  # all others: NOTHING
    "acc": (SUM, GRADIENT, TOTAL, LANDED), "host": (SUM, LANDED), "master": (OLD, CAST),
    "flat_param": (OLD, PUBLISHED), "gathered": (OLD, GATHERED, PUBLISHED),
}  # fmt: skip


class Row(NamedTuple):
    """One argument of an operation: in a buffer of one of ``kinds`` it needs one of ``needs``, and ``leaves`` this;
    ``when``: under plans of which this is true (`facts_of`)."""

    argument: int
    kinds: str
    needs: tuple[str, ...]
    leaves: str
    when: str = ""


TABLE: dict[Callable[..., Any], tuple[Row, ...]] = {
    flatten_cast: (Row(1, "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),),
    accumulate_cast: (Row(1, "acc staging", (SUM,), GRADIENT, "partial"),),
    wgrad_into: (
        Row(1, "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),
        Row(1, "acc staging", (GRADIENT,), GRADIENT, "partial"),  # accumulate_cast has emptied or kept it
    ),
    launch_reduce: (
        Row(2, "flat_grad", (GRADIENT,), NOTHING, "ring"),
        Row(2, "acc staging", (GRADIENT, SUM), SENT, "partial"),
        Row(1, "recv", (NOTHING,), FLIGHT),
    ),
    wait_reduce: (Row(2, "recv", (FLIGHT,), ROWS),),
    accumulate: (
        Row(2, "recv", (ROWS,), NOTHING),
        Row(2, "flat_grad", (GRADIENT,), NOTHING, "alone"),  # one rank sends nothing
        Row(1, "acc staging", (SUM,), TOTAL, "ring"),
        Row(1, "acc staging", (SENT,), TOTAL, "partial"),
    ),
    stage_shard: (
        Row(2, "acc", (TOTAL, SUM), LANDED),
        Row(2, "acc", (GRADIENT,), LANDED, "alone"),
        Row(1, "staging", (NOTHING,), TOTAL),
    ),
    copy_to_host: (Row(2, "staging", (TOTAL, GRADIENT), NOTHING), Row(1, "host", (SUM,), LANDED)),
    copy_to_device: (
        Row(2, "host", (SUM,), SUM),
        Row(1, "staging", (NOTHING,), SUM),
        Row(2, "master", (OLD, NEW), CAST),
        Row(2, "param", (CAST,), NOTHING),
        Row(1, "flat_param", (OLD,), NEW),
    ),
    update: (Row(1, "master", (OLD,), NEW), Row(2, "host", (SUM,), SUM)),
    cast_param: (Row(2, "master", (OLD, NEW), CAST), Row(1, "param", (NOTHING,), CAST)),
    gather: (
        Row(1, "flat_param", (NEW,), GATHERED, "offload"),
        Row(1, "flat_param", (OLD,), GATHERED, "on device"),
        Row(1, "gathered", (OLD,), GATHERED),
    ),
    publish: (
        Row(1, "flat_param", (GATHERED,), PUBLISHED),
        Row(1, "flat_param", (NEW, OLD), PUBLISHED, "alone"),
        Row(1, "gathered", (OLD, GATHERED), PUBLISHED),
    ),
}


def facts_of(plan: Plan | None) -> frozenset[str]:
    """What is true of a plan, as ``Row.when`` names it; without a plan, all of it."""
    if plan is None:
        return frozenset(("", "ring", "partial", "alone", "offload", "on device"))
    where = "ring" if plan.placement.gradient_in_ring else "partial"
    alone = {"alone"} if plan.world_size == 1 else set()
    return frozenset({"", where, "on device" if plan.offload is None else "offload"} | alone)


def rows_for(target: object, argument: int, buffer: str, facts: frozenset[str]) -> list[Row]:
    """The rows that speak of this buffer as this argument, under plans with these facts."""
    return [row for row in _BY_ARGUMENT[target][argument].get(kind_of(buffer), ()) if row.when in facts]


def arguments_of(target: object) -> Iterable[int]:
    """Positions of the buffers' names."""
    return _BY_ARGUMENT[target]


def at_entry(buffer: str) -> tuple[int, str]:
    """Bucket, and what the buffer holds of it: what lasts between schedules is numbered by bucket; the rings are
    empty."""
    kind = kind_of(buffer)
    return int(buffer[len(kind) + 1 : -1]), AT_ENTRY.get(kind, NOTHING)


def may_be_left(buffer: str, held: str) -> bool:
    return held in AT_EXIT.get(kind_of(buffer), (NOTHING,))


def kind_of(buffer: str) -> str:
    return buffer[: buffer.index("[")]


def _by_argument() -> dict[object, dict[int, dict[str, list[Row]]]]:
    found: dict[object, dict[int, dict[str, list[Row]]]] = {}
    for target, rows in TABLE.items():
        for row in rows:
            for kind in row.kinds.split():
                found.setdefault(target, {}).setdefault(row.argument, {}).setdefault(kind, []).append(row)
    return found


_BY_ARGUMENT = _by_argument()
