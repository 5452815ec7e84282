"""What buffers hold while a schedule runs. Each kind of node says in its record (`zc.schedule.spec`) what it needs in
the buffers that it names, and what it leaves there; `zc.passes.exactly_once` proves that a schedule fits together.

    exchange(2, "recv[0]", "flat_grad[0]")     stage 2: flat_grad holds a GRADIENT, then NOTHING
                                               recv holds NOTHING, then ROWS
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from zc.planning.plan import Plan
    from zc.schedule.buffer import Buffer
    from zc.schedule.spec import Op

# Gradients. SUM: of the backwards before. GRADIENT: of this backward; an accumulator has it added to SUM. ROWS: all
# ranks' shards. SENT: a partial sum that has left. TOTAL: the mean over ranks is added. LANDED: it is in host memory.
NOTHING, SUM, GRADIENT, ROWS = "nothing", "sum", "gradient", "rows"
SENT, TOTAL, LANDED = "sent sum", "total", "landed total"
# Of two reductions: the sum of the first, and those of the other hosts or replicas. Where the ranks of a host exchange
# messages: the rows of these ranks.
HOST_SUM, SUMS, HOST_ROWS = "sum of some ranks", "sums", "rows of a host"
# In few bits: a gradient or HOST_SUM, then of all ranks.
ENCODED, ENCODED_ROWS = "encoded gradient", "encoded rows"
# Weights.
OLD, NEW, CAST, GATHERED, PUBLISHED = "old weights", "new weights", "cast weights", "gathered weights", "weights"

AT_ENTRY = {  # all others: NOTHING
    "acc": SUM, "host": SUM, "master": OLD, "flat_param": OLD, "gathered": OLD, "weight": OLD,
}  # fmt: skip
AT_EXIT = {  # all others: NOTHING
    "acc": (SUM, GRADIENT, TOTAL, LANDED), "host": (SUM, LANDED), "master": (OLD, CAST),
    "flat_param": (OLD, PUBLISHED), "gathered": (OLD, GATHERED, PUBLISHED), "weight": (OLD, PUBLISHED),
}  # fmt: skip


class Row(NamedTuple):
    """One field of an operation: in a buffer of one of ``kinds`` it needs one of ``needs``, and ``leaves`` this.

    ``when``: under plans of which these are true (`FACTS`). ``beside``: where the operation's other buffer is of one
    of these kinds; empty: of any. ``among``: of a reduction, that field of it.
    """

    field: str
    kinds: str
    needs: tuple[str, ...]
    leaves: str
    when: str = ""
    beside: str = ""
    among: str | None = None


FACTS: tuple[tuple[str, str, Callable[[Plan], bool]], ...] = (  # true of a plan, otherwise, and what decides it
    ("ring", "partial", lambda plan: plan.placement.shards_gradients),
    ("offload", "device", lambda plan: plan.offload is not None),
    ("in_place", "direct", lambda plan: plan.sums_in_place),
    ("twice", "once", lambda plan: plan.reduces_twice),
    ("encoded", "plain", lambda plan: plan.reduce_bits > 0),
    ("differs", "whole", lambda plan: plan.gather_bits > 0),
    ("sharded", "replicated", lambda plan: plan.placement.shards_weights),
    ("alone", "together", lambda plan: plan.num_ranks == 1),
    ("unsharded", "divided", lambda plan: plan.world_size == 1),
)


def facts_of(plan: Plan) -> frozenset[str]:
    """The facts of a plan, as ``Row.when`` names them."""
    return frozenset(fact if decides(plan) else otherwise for fact, otherwise, decides in FACTS)


def rows_for(op: Op, field: str, buffer: Buffer, facts: frozenset[str]) -> list[Row]:
    """The rows that apply to this field of an operation, under plans with these facts."""
    beside = {other.kind for name, other in op.buffers.items() if name != field}
    among = getattr(op, "among", None)
    return [
        row
        for row in op.contents
        if row.field == field and buffer.kind in row.kinds.split() and facts.issuperset(row.when.split())
        if row.among == among and (not row.beside or beside & set(row.beside.split()))
    ]


def at_entry(buffer: Buffer) -> tuple[int, str]:
    """Bucket, and what the buffer holds of it: what lasts between schedules is numbered by bucket; the rings are
    empty."""
    return buffer.index, AT_ENTRY.get(buffer.kind, NOTHING)


def may_be_left(buffer: Buffer, content: str) -> bool:
    return content in AT_EXIT.get(buffer.kind, (NOTHING,))
