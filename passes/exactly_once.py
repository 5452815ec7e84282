"""Parts (c) and (d) of the proof: each gradient that is owed arrives, in full and once; each launch completes once.

They don't depend on streams: where no race is, the order in which the nodes are issued is as good as any. A buffer
holds one thing of one bucket at a time, and TABLE says of each operation what it needs in the buffers that it names,
and what it leaves there. Bucket 2 in stage 2::

    flatten_cast(2, "flat_grad[0]", ...)               flat_grad[0]: nothing -> gradient
    %w = launch_reduce(2, "recv[0]", "flat_grad[0]")   flat_grad[0]: gradient -> nothing; recv[0]: nothing -> flight
    wait_reduce(2, %w, "recv[0]", "flat_grad[0]")      recv[0]: flight -> rows
    accumulate(2, "acc[2]", "recv[0]")                 recv[0]: rows -> nothing; acc[2]: sum -> total

So an overwritten gradient that was not sent, rows that no accumulate took, a second reduction of one bucket are faults
(PR#7985, DS#7981, DS#7366). On top of the table:

- Whoever takes a ``gradient`` takes a whole one: what flatten_cast or accumulate_cast (with spans) and wgrad_into have
  written covers each element of the bucket once, padding included, and each slot as the plan lays it out.
- A slot is written or deposited once, with the value that tag_gradients has marked as its gradient.
- With the graph's debt (passes/debt.py): no slot of it is missing and none is written that is not owed; a bucket that
  is owed whole is written, reduced and copied to host memory here, if the plan says so, and no other is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from zc.passes.debt import Debt
from zc.plan import Plan
from zc.schedule import (
    accumulate,
    accumulate_cast,
    cast_param,
    copy_to_device,
    copy_to_host,
    deposit,
    flatten_cast,
    gather,
    launch_reduce,
    publish,
    slots_of,
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
    ``when``: under plans of which this is true (`_facts`)."""

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
_WRITES = (flatten_cast, accumulate_cast, wgrad_into)
_ROWS = {
    (target, kind): [row for row in rows if kind in row.kinds.split()]
    for target, rows in TABLE.items()
    for kind in {k for row in rows for k in row.kinds.split()}
}
_ARGUMENTS = {target: sorted({row.argument for row in rows}) for target, rows in TABLE.items()}


def _facts(plan: Plan | None) -> frozenset[str]:
    if plan is None:
        return frozenset(("", "ring", "partial", "alone", "offload", "on device"))
    where = "ring" if plan.placement.gradient_in_ring else "partial"
    alone = {"alone"} if plan.world_size == 1 else set()
    return frozenset({"", where, "on device" if plan.offload is None else "offload"} | alone)


def check(nodes: Sequence[fx.Node], plan: Plan | None, debt: Debt | None = None) -> list[str]:
    """What is wrong, as texts that name the bucket and the nodes."""
    ledger = _Ledger(plan)
    for node in nodes:
        if node.target in _WRITES or node.target is deposit:
            ledger.bring(node)
        if node.target in TABLE:
            ledger.move(node)
    ledger.close()
    if plan is not None and debt is not None:
        ledger.settle(plan, debt)
    return ledger.faults


class _Ledger:
    def __init__(self, plan: Plan | None) -> None:
        self.plan, self.facts = plan, _facts(plan)
        self.faults: list[str] = []
        self.holds: dict[str, tuple[int, str]] = {}  # buffer -> bucket, and what of it
        self.parts: dict[str, list[tuple[int, int]]] = {}  # buffer -> elements of its gradient written so far
        self.brought: dict[tuple[int, int], fx.Node] = {}  # bucket, slot -> its write or deposit
        self.done: dict[object, set[int]] = {}  # operation -> buckets

    def move(self, node: fx.Node) -> None:
        """Takes the buffers of one operation through the table."""
        bucket = int(str(node.args[0]))
        self.done.setdefault(node.target, set()).add(bucket)
        if node.target is wait_reduce:
            self._check_work(node)
        for argument in _ARGUMENTS[node.target]:  # type: ignore[index]
            buffer = str(node.args[argument])
            of, held = self.holds.get(buffer) or _at_entry(buffer)
            rows = _ROWS.get((node.target, _kind(buffer)), ())  # type: ignore[arg-type]
            rows = [row for row in rows if row.argument == argument and row.when in self.facts]
            found = next((row for row in rows if held in row.needs and (of == bucket or held is NOTHING)), None)
            if found is None:
                needs = " or ".join(dict.fromkeys(need for row in rows for need in row.needs))
                if needs != NOTHING:
                    needs = f"its {needs}" if of == bucket or held == NOTHING else f"bucket {bucket}'s {needs}"
                wanted = f"needs {needs} there" if rows else f"of bucket {bucket} can't take it"
                holds = held if held == NOTHING else f"the {held} of bucket {of}"
                self.faults.append(f"{buffer} holds {holds}; {node.name} {wanted}")
            leaves = found.leaves if found is not None else next((row.leaves for row in rows), held)
            if held is GRADIENT and leaves is not GRADIENT:
                self._check_whole(of, buffer)
            self.holds[buffer] = (bucket, leaves)

    def bring(self, node: fx.Node) -> None:
        """A write or a deposit: which slots, with which values, into which elements."""
        bucket, slots = int(str(node.args[0])), slots_of(node)
        spans = self._spans(node, bucket)
        if node.target is not deposit:
            self.parts.setdefault(str(node.args[1]), []).extend(spans)
        values = list(_values(node))
        if len(values) != len(slots):
            self.faults.append(f"{node.name} of bucket {bucket} has {len(slots)} slots and {len(values)} gradients")
        for slot, value in zip(slots, values, strict=False):
            gradient = f"the gradient of bucket {bucket}, slot {slot}"
            if (bucket, slot) in self.brought:
                first = self.brought[bucket, slot].name
                self.faults.append(f"{gradient} is written by {first} and {node.name}")
            self.brought[bucket, slot] = node
            if (bucket, slot) not in value.meta.get("gradient_of", ((bucket, slot),)):
                self.faults.append(f"{node.name} takes %{value.name} for {gradient}, which it is not")
            if self.plan is None or node.target is deposit:
                continue
            layout = self.plan.buckets[bucket].slots
            if slot >= len(layout):
                self.faults.append(f"{node.name} writes slot {slot} of bucket {bucket}, which has {len(layout)}")
                continue
            at = layout[slot]
            exact = node.target is wgrad_into
            inside = [(at.offset, at.stop) == s if exact else s[0] <= at.offset and at.stop <= s[1] for s in spans]
            if at.numel and not any(inside):
                written = ", ".join(f"[{start}, {stop})" for start, stop in spans) or "nothing"
                extent = f"slot {slot} is [{at.offset}, {at.stop})"
                self.faults.append(f"{node.name} writes {written} of bucket {bucket}; {extent}")

    def _spans(self, node: fx.Node, bucket: int) -> list[tuple[int, int]]:
        if node.target is wgrad_into:
            return [(int(str(node.args[3])), int(str(node.args[4])))]
        numel = self.plan.buckets[bucket].numel if self.plan is not None else 1 << 62
        spans: Any = node.kwargs.get("spans", ((0, numel),))
        return [(int(start), int(stop)) for start, stop in spans]

    def _check_whole(self, bucket: int, buffer: str) -> None:
        """Whoever takes a gradient takes all of it: what was written covers each element once, padding included."""
        parts = self.parts.pop(buffer, [])
        if self.plan is None:
            return
        reached, numel = 0, self.plan.buckets[bucket].numel
        for start, stop in [*sorted(parts), (numel, numel)]:
            if start > reached:
                self.faults.append(f"nobody writes the elements [{reached}, {start}) of bucket {bucket}")
            elif start < min(reached, stop):
                self.faults.append(f"the elements [{start}, {min(stop, reached)}) of bucket {bucket} are written twice")
            reached = max(reached, stop)
        if reached > numel:
            self.faults.append(f"elements up to {reached} of bucket {bucket} are written, which has {numel}")

    def _check_work(self, node: fx.Node) -> None:
        work = node.args[1]
        if not isinstance(work, fx.Node) or work.target is not launch_reduce:
            self.faults.append(f"{node.name} completes {work}, which is no launch")
        elif (node.args[0], *node.args[2:]) != work.args:
            self.faults.append(f"{node.name} names another bucket or buffers than {work.name}, which it completes")

    def close(self) -> None:
        for buffer, (bucket, held) in self.holds.items():
            if held not in AT_EXIT.get(_kind(buffer), (NOTHING,)):
                self.faults.append(f"the {held} of bucket {bucket} stay in {buffer}: nobody takes them")
            elif held is GRADIENT:
                self._check_whole(bucket, buffer)

    def settle(self, plan: Plan, debt: Debt) -> None:
        """What the graph owed against what was done."""
        for bucket, slot in sorted(debt.gradients - self.brought.keys()):
            name = plan.buckets[bucket].slots[slot].name
            self.faults.append(f"the gradient of {name} (bucket {bucket}, slot {slot}) is owed, and nobody writes it")
        for bucket, slot in sorted(self.brought.keys() - debt.gradients):
            node = self.brought[bucket, slot].name
            self.faults.append(f"{node} writes bucket {bucket}, slot {slot}, of which the graph had no gradient")
        whole = debt.whole(plan)
        for (bucket, slot), node in self.brought.items():
            if node.target is deposit and bucket in whole:
                self.faults.append(f"{node.name} leaves slot {slot} to a flush, and all of bucket {bucket} is owed here")
        for what, target, owed in (
            ("reduced", accumulate, debt.reductions(plan)),
            ("copied to host memory", copy_to_host, debt.landings(plan)),
        ):
            done = self.done.get(target, set())
            self.faults += [f"bucket {b} is owed, and never {what}" for b in sorted(owed - done)]
            self.faults += [f"bucket {b} is {what}, and not owed whole" for b in sorted(done - owed)]


def _values(node: fx.Node) -> Iterator[fx.Node]:
    """The gradients that a write or a deposit brings; wgrad_into makes its own."""
    if node.target is wgrad_into:
        return iter((node,))
    given: Any = node.args[2] if node.target is deposit else node.args[3]
    return iter(given if isinstance(given, (list, tuple)) else (given,))


def _kind(buffer: str) -> str:
    return buffer[: buffer.index("[")]


def _at_entry(buffer: str) -> tuple[int, str]:
    """What lasts between schedules is numbered by bucket; the rings are empty."""
    kind = _kind(buffer)
    return int(buffer[len(kind) + 1 : -1]), AT_ENTRY.get(kind, NOTHING)
