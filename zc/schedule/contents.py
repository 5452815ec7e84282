"""What buffers hold while a schedule runs. Each kind of node says in its record (`zc.schedule.spec`) what it needs in
the buffers that it names, and what it leaves there; `zc.passes.exactly_once` proves that a schedule fits together.

    take(2, "scratch[0]", "flat_grad[0]")      stage 2: flat_grad holds a GRADIENT, then NOTHING
                                               scratch holds NOTHING, then what was TAKEN
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from zc.planning.plan import Plan
    from zc.schedule.buffer import Buffer
    from zc.schedule.spec import Op

# Gradients. SUM: of the backwards before. GRADIENT: of this backward; an accumulator has it added to SUM. SENT: a
# partial sum that has left. TOTAL: the mean over ranks is added. LANDED: it is in host memory.
NOTHING, SUM, GRADIENT = "nothing", "sum", "gradient"
SENT, TOTAL, LANDED = "sent sum", "total", "landed total"
# In a hop of a reduction: what it starts from, what ranks have sent in it, and what it leaves. Rows name these three,
# and `Row.in_hop` says what they are: the first hop starts from a GRADIENT, each other from the sum of the one before,
# and the last one leaves a TOTAL.
BEFORE, TAKEN, AFTER = "before", "taken", "after"
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
    of these kinds; empty: of any.
    """

    field: str
    kinds: str
    needs: tuple[str, ...]
    leaves: str
    when: str = ""
    beside: str = ""

    def in_hop(self, hop: int, num_hops: int) -> Row:
        """The row with what BEFORE, TAKEN and AFTER are in this hop."""
        names = {
            BEFORE: GRADIENT if hop == 0 else f"sum of hop {hop - 1}",
            TAKEN: f"rows of hop {hop}",
            AFTER: TOTAL if hop == num_hops - 1 else f"sum of hop {hop}",
        }
        return self._replace(
            needs=tuple(names.get(need, need) for need in self.needs), leaves=names.get(self.leaves, self.leaves)
        )


FACTS: tuple[tuple[str, str, Callable[[Plan], bool]], ...] = (  # true of a plan, otherwise, and what decides it
    ("ring", "partial", lambda plan: plan.placement.shards_gradients),
    ("offload", "device", lambda plan: plan.offload is not None),
    ("sharded", "replicated", lambda plan: plan.placement.shards_weights),
    ("alone", "together", lambda plan: plan.num_ranks == 1),
    ("unsharded", "divided", lambda plan: plan.world_size == 1),
    ("encoded", "exact", lambda plan: any(map(plan.encodes_gathers, plan.buckets[:1]))),  # all are alike
)


def facts_of(plan: Plan) -> frozenset[str]:
    """The facts of a plan, as ``Row.when`` names them."""
    return frozenset(fact if decides(plan) else otherwise for fact, otherwise, decides in FACTS)


def rows_for(op: Op, field: str, buffer: Buffer, facts: frozenset[str], num_hops: int) -> list[Row]:
    """The rows that apply to this field of an operation, under plans with these facts, whose reductions have
    ``num_hops`` hops."""
    beside = {other.kind for name, other in op.buffers.items() if name != field}
    rows = [
        row
        for row in op.contents
        if row.field == field and buffer.kind in row.kinds.split() and facts.issuperset(row.when.split())
        if not row.beside or beside & set(row.beside.split())
    ]
    hop = getattr(op, "hop", None)
    return rows if hop is None else [row.in_hop(hop, num_hops) for row in rows]


def at_entry(buffer: Buffer) -> tuple[int, str]:
    """Bucket, and what the buffer holds of it: what lasts between schedules is numbered by bucket; the rings are
    empty."""
    return buffer.index, AT_ENTRY.get(buffer.kind, NOTHING)


def may_be_left(buffer: Buffer, content: str) -> bool:
    return content in AT_EXIT.get(buffer.kind, (NOTHING,))
