"""The buffers of a schedule by name, what each kind of them is, and what they hold while the schedule runs:
docs/proof.md prints the tables.

A buffer that the plan owns is a `Buffer`. Everything else that a node accesses is a value, named after the node that
returns it, ``%name``.

Across schedules: a plan-owned buffer may still be in use by an earlier schedule when this one starts. After the last
use on its carrier every schedule records the *carried* event ``done/<buffer>``, and the first use on another stream in
a later schedule waits for it. Waiting for an event that was never recorded is no wait (as in CUDA). docs/proof.md has
the whole contract at entry and exit.

Each kind of node says in its record (`zc.schedule.spec`) what it needs in the buffers that it names, and what it leaves
there; `zc.passes.exactly_once` proves that a schedule fits together.

    take(2, "scratch[0]", "flat_grad[0]")      stage 2: flat_grad holds a GRADIENT, then NOTHING
                                               scratch holds NOTHING, then what was TAKEN
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from zc.planning.plan import Hop, Plan
    from zc.schedule.spec import Op


COMPUTE, COMM, COPY, HOST = "compute", "comm", "copy", "host"
COMM_HOST = "comm.host"  # with several hops: what ranks of one host exchange by memory; it ends with each schedule
MAIN = COMPUTE  # the stream on which autograd calls the schedule; its program order goes on across schedules


class Kind(NamedTuple):
    """What is true of all buffers of one kind.

    ``holds``: what lies there, in words.
    ``carrier``: the one side stream on which such a buffer may still be in use when a schedule has ended; MAIN: none.
    ``on_host``: the processor itself reads or writes it. A wait of the main stream is the device's, and does not order
    it.
    ``is_shared``: under which plans other schedules may use the buffer number ``index`` on its carrier and elsewhere.
    It then needs a carried event, whatever this schedule does. ``shared`` says the same in words.
    """

    holds: str
    carrier: str
    on_host: bool = False
    shared: str = "never"
    is_shared: Callable[[Plan, int], bool] = lambda plan, index: False


def _is_summed(plan: Plan) -> bool:
    """Accumulators that are read on comm as well: partial sums that are sent, or copied to host memory."""
    return not plan.placement.shards_gradients and (plan.num_ranks > 1 or plan.offload is not None)


def _sums_apart(plan: Plan, hop: Hop) -> bool:
    """Whether this hop of a reduction has a stream of its own beside comm, which takes its sum."""
    return hop.is_direct and len(plan.hops) > 1


def _is_sent_on_comm(plan: Plan) -> bool:
    """Whether comm reads flat_grads. What comm.host alone reads is free when the schedule has ended."""
    return plan.placement.shards_gradients and not _sums_apart(plan, plan.hops[0])


def _gathers_while_reading(plan: Plan) -> bool:
    return plan.overlap and bool(plan.sharded)


KINDS = {
    "flat_grad": Kind("gradients of one bucket; a ring", COMM, shared="stage 2 with overlap, where comm reads it",
                      is_shared=lambda plan, _: plan.overlap and _is_sent_on_comm(plan)),
    "scratch": Kind("what one hop of a reduction sends or has received", COMM),
    "update": Kind("encoded differences between the masters of one bucket and its weights", COMM),
    "host_sum": Kind("several hops: the sum of one, over the ranks of a host or replica; a ring", COMM,
                 shared="with overlap, where ranks read each other's memory",
                 is_shared=lambda plan, _: plan.overlap and any(_sums_apart(plan, hop) for hop in plan.hops)),
    "acc": Kind("the accumulator of bucket i", COMM, shared="stage 1 with overlap, if its sums are sent or offloaded",
                is_shared=lambda plan, _: plan.overlap and _is_summed(plan)),
    "flat_param": Kind("the weights of bucket i", MAIN),
    "gathered": Kind("the same with overlap_gather, as the last update left them", COMM, shared="always",
                     is_shared=lambda plan, _: True),
    "weight": Kind("sharded weights: this rank's shard of the weights of bucket i", COMM,
                   shared="with overlap", is_shared=lambda plan, _: _gathers_while_reading(plan)),
    "arena": Kind("sharded weights: gathered weights, each bucket in bytes of its own while it is read", COMM,
                  shared="with overlap", is_shared=lambda plan, _: _gathers_while_reading(plan)),
    "staging": Kind("offload: a gradient between device and host memory, or stage 3's updated whole parameters; a ring",
                    COPY),
    "host": Kind("offload: the gradient of bucket i that the update reads", COPY, on_host=True, shared="always",
                 is_shared=lambda plan, _: True),
    "master": Kind("offload: the masters of bucket i", COPY, on_host=True, shared="where they are copied as they are",
                   is_shared=lambda plan, index: not plan.buckets[index].has_master),
    "param": Kind("offload: masters, cast to the parameters' dtype; a ring", COPY, on_host=True),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Buffer:
    """Number ``index`` of its kind: of a ring, or of a bucket. ``str()`` gives its name in a schedule,
    ``flat_grad[0]``."""

    kind: str
    index: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.index < 0:
            raise ValueError(f"{self.kind}[{self.index}] is no buffer: {', '.join(KINDS)}")

    def __str__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @staticmethod
    @functools.cache
    def named(name: str) -> Buffer:
        """The buffer whose name this is."""
        kind, bracket, index = name.removesuffix("]").partition("[")
        if not (bracket and name.endswith("]") and index.isdecimal()):
            raise ValueError(f"{name!r} is no buffer's name, such as 'flat_grad[0]'")
        return Buffer(kind, int(index))

    @property
    def carrier(self) -> str:
        return KINDS[self.kind].carrier

    @property
    def on_host(self) -> bool:
        return KINDS[self.kind].on_host

    def is_shared(self, plan: Plan) -> bool:
        return KINDS[self.kind].is_shared(plan, self.index)


Place = Buffer | str  # a buffer, or a value by name


class Access(NamedTuple):
    """An access to elements [start, stop) of a buffer; to all of it where the extent does not matter."""

    buffer: Place
    start: int = 0
    stop: int = 1 << 62


def overlap(a: Access, b: Access) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


_CARRIED = "done/"


def carried_event(buffer: Buffer) -> str:
    """The event that later schedules wait for before they access a plan-owned buffer."""
    return f"{_CARRIED}{buffer}"


def carried_by(event: str) -> Buffer | None:
    """The buffer whose carried event this is; None: one of this schedule alone."""
    return Buffer.named(event.removeprefix(_CARRIED)) if event.startswith(_CARRIED) else None


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
