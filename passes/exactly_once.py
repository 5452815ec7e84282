"""Part (c) of the proof: each gradient that is owed arrives, in full and once.

It does not depend on streams: without a race, the order in which the nodes are issued is as good as any. A buffer holds
one thing of one bucket at a time. Each kind of node says what it needs in the buffers that it names, and what it leaves
there (`zc.schedule.buffer`). Bucket 2 in stage 2::

    flatten_cast(2, "flat_grad[0]", ...)        flat_grad[0]: nothing -> gradient
    take(2, "scratch[0]", "flat_grad[0]")       flat_grad[0]: gradient -> nothing; scratch[0]: nothing -> rows
    finish(2, "acc[2]", "scratch[0]")           scratch[0]: rows -> nothing; acc[2]: sum -> total

So these are faults: a gradient that is overwritten before it was sent, rows that nothing sums, and a second
reduction of one bucket (deepspeed#7985, #7981 and #7366). On top of that:

- A node that takes a ``gradient`` takes a whole one: flatten_cast or accumulate_cast (with spans) and wgrad_into have
  written each element of the bucket once, padding included, and each slot where the plan lays it out.
- A slot is written or deposited once, with the value that tag_gradients has marked as its gradient.
- With the graph's debt (passes/base.py): no slot of it is missing and none is written that is not owed; a bucket that
  is owed whole is written, reduced and copied to host memory here, if the plan says so, and no other is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from zc.passes.base import Debt
from zc.planning.layout import Slot
from zc.planning.plan import Plan
from zc.schedule.buffer import GRADIENT, NOTHING, Buffer, at_entry, facts_of, may_be_left, rows_for
from zc.schedule.nodes import op_of
from zc.schedule.spec import BucketOp, CopyToHost, Deposit, Reduce, Reduction, Spans, WgradInto, Write

if TYPE_CHECKING:
    from zc.passes.verify import Order


def check(order: Order, plan: Plan, debt: Debt | None) -> list[str]:
    """The faults, as texts that name the bucket and the nodes."""
    ledger = _Ledger(plan, debt)
    for node, op in zip(order.nodes, order.ops, strict=True):
        if isinstance(op, Write | Deposit):
            ledger.write(node, op)
        if isinstance(op, BucketOp):
            ledger.move(node, op)
    ledger.close()
    return ledger.faults


class _Ledger:
    def __init__(self, plan: Plan, debt: Debt | None) -> None:
        self.plan, self.debt, self.facts = plan, debt, facts_of(plan)
        self.faults: list[str] = []
        self.holds: dict[Buffer, tuple[int, str]] = {}  # buffer -> bucket, and what of it
        self.written: dict[Buffer, list[tuple[int, int]]] = {}  # buffer -> the elements of its gradient so far
        self.writers: dict[tuple[int, int], fx.Node] = {}  # bucket, slot -> its write or deposit
        self.reduced, self.landed = set[int](), set[int]()  # buckets

    def move(self, node: fx.Node, op: BucketOp) -> None:
        """Checks what the buffers of one operation hold before it, and notes what they hold after it."""
        if isinstance(op, Reduction):
            self._check_hop(node.name, op)
        if isinstance(op, CopyToHost):
            self.landed.add(op.bucket)
        for name in dict.fromkeys((*(row.field for row in op.contents), *op.writes)):
            if (buffer := op.buffers.get(name)) is None:
                continue
            of, content = self.holds.get(buffer) or at_entry(buffer)
            rows = rows_for(op, name, buffer, self.facts, len(self.plan.hops))
            row = next((row for row in rows if content in row.needs and (of == op.bucket or content == NOTHING)), None)
            if row is None:
                self._refuse(node.name, op.bucket, buffer, of, content, [need for row in rows for need in row.needs])
            leaves = (row or rows[0]).leaves if rows else content
            if content == GRADIENT != leaves:
                self._check_whole(of, buffer)
            self.holds[buffer] = (op.bucket, leaves)

    def _check_hop(self, name: str, op: Reduction) -> None:
        if op.hop >= len(self.plan.hops):
            return  # nothing ever holds the sum that it starts from: `_refuse`
        if isinstance(op, Reduce) != self.plan.hops[op.hop].is_direct:
            self.faults.append(f"{name} can't be hop {op.hop}, which goes by {self.plan.hops[op.hop].way.value}")
        if op.brings_mean(self.plan):
            self.reduced.add(op.bucket)

    def _refuse(self, name: str, bucket: int, buffer: Buffer, of: int, content: str, needs: list[str]) -> None:
        wanted = " or ".join(dict.fromkeys(needs))
        if wanted != NOTHING:
            wanted = f"its {wanted}" if of == bucket or content == NOTHING else f"bucket {bucket}'s {wanted}"
        takes = f"needs {wanted} there" if needs else f"of bucket {bucket} can't take it"
        holds = content if content == NOTHING else f"the {content} of bucket {of}"
        self.faults.append(f"{buffer} holds {holds}; {name} {takes}")

    def write(self, node: fx.Node, op: Write | Deposit) -> None:
        """Checks a write or a deposit: its slots, their values, and the elements that it writes."""
        bucket, values, spans = op.bucket, values_of(node, op), spans_of(op, self.plan)
        if not isinstance(op, Deposit):
            self.written.setdefault(op.buffer, []).extend(spans)
        if len(values) != len(op.slots):
            self.faults.append(f"{node.name} of bucket {bucket} has {len(op.slots)} slots and {len(values)} gradients")
        for slot, value in zip(op.slots, values, strict=False):
            gradient = f"the gradient of bucket {bucket}, slot {slot}"
            first = self.writers.get((bucket, slot))
            if first is not None:
                self.faults.append(f"{gradient} is written by {first.name} and {node.name}")
            self.writers[bucket, slot] = node
            if self.debt is not None and (bucket, slot) not in value.meta.get("gradient_of", ()):
                self.faults.append(f"{node.name} takes %{value.name} for {gradient}, which it is not")
            self._check_extent(node.name, op, self.plan.buckets[bucket].slots, slot, spans)

    def _check_extent(self, name: str, op: Write | Deposit, layout: Sequence[Slot], slot: int, spans: Spans) -> None:
        if slot >= len(layout):
            self.faults.append(f"{name} brings slot {slot} of bucket {op.bucket}, which has {len(layout)}")
            return
        at = layout[slot]
        inside = [start <= at.offset and at.stop <= stop for start, stop in spans]
        if isinstance(op, WgradInto):
            inside = [spans == ((at.offset, at.stop),)]
        if at.numel and not any(inside):
            written = ", ".join(f"[{start}, {stop})" for start, stop in spans) or "nothing"
            extent = f"slot {slot} is [{at.offset}, {at.stop})"
            self.faults.append(f"{name} writes {written} of bucket {op.bucket}; {extent}")

    def _check_whole(self, bucket: int, buffer: Buffer) -> None:
        """Checks that each element of the bucket was written once, padding included."""
        spans = self.written.pop(buffer, [])
        reached, numel = 0, self.plan.buckets[bucket].numel
        for start, stop in [*sorted(spans), (numel, numel)]:
            if start > reached:
                self.faults.append(f"nobody writes the elements [{reached}, {start}) of bucket {bucket}")
            elif start < reached:
                self.faults.append(f"the elements [{start}, {min(stop, reached)}) of bucket {bucket} are written twice")
            reached = max(reached, stop)

    def close(self) -> None:
        for buffer, (bucket, content) in self.holds.items():
            if not may_be_left(buffer, content):
                self.faults.append(f"{buffer} holds the {content} of bucket {bucket} at the end, and nobody takes it")
            elif content == GRADIENT:
                self._check_whole(bucket, buffer)
        if self.debt is not None:
            self._settle(self.plan, self.debt)

    def _settle(self, plan: Plan, debt: Debt) -> None:
        """Compares the graph's debt with what was done."""
        for bucket, slot in sorted(debt.gradients - self.writers.keys()):
            name = plan.buckets[bucket].slots[slot].name
            self.faults.append(f"the gradient of {name} (bucket {bucket}, slot {slot}) is owed, and nobody writes it")
        whole = debt.whole(plan)
        for (bucket, slot), node in sorted(self.writers.items(), key=lambda item: item[0]):
            if (bucket, slot) not in debt.gradients:
                self.faults.append(f"{node.name} writes bucket {bucket}, slot {slot}: the graph has no such gradient")
            elif isinstance(op_of(node), Deposit) and bucket in whole:
                self.faults.append(f"{node.name} leaves slot {slot} to a flush; all of bucket {bucket} is owed here")
        for what, done, owed in (
            ("reduced", self.reduced, debt.reductions(plan)),
            ("copied to host memory", self.landed, debt.landings(plan)),
        ):
            self.faults += [f"bucket {b} is owed whole, and never {what}" for b in sorted(owed - done)]
            self.faults += [f"bucket {b} is {what}, and not owed whole" for b in sorted(done - owed)]


def spans_of(op: Write | Deposit, plan: Plan) -> Spans:
    """The elements that a node writes."""
    if isinstance(op, WgradInto):
        return ((op.start, op.stop),)
    if isinstance(op, Write) and op.spans is not None:
        return op.spans
    return ((0, plan.buckets[op.bucket].numel),)


def values_of(node: fx.Node, op: Write | Deposit) -> Sequence[fx.Node]:
    """The gradients of a write or a deposit; wgrad_into computes its own."""
    if isinstance(op, WgradInto):
        return (node,)
    return (op.grad,) if isinstance(op, Deposit) else op.grads
