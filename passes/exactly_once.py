"""Parts (c) and (d) of the proof: each gradient that is owed arrives, in full and once; each launch completes once.

They don't depend on streams: where no race is, the order in which the nodes are issued is as good as any. A buffer
holds one thing of one bucket at a time, and `_transitions` says of each operation what it needs in the buffers that it
names, and what it leaves there. Bucket 2 in stage 2::

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

from collections.abc import Sequence
from typing import Any

from torch import fx

from zc.passes._transitions import (
    GRADIENT,
    NOTHING,
    TABLE,
    arguments_of,
    at_entry,
    facts_of,
    may_be_left,
    rows_for,
)
from zc.passes.debt import Debt
from zc.planning.layout import Slot
from zc.planning.plan import Plan
from zc.schedule.nodes import (
    accumulate,
    accumulate_cast,
    copy_to_host,
    deposit,
    flatten_cast,
    launch_reduce,
    slots_of,
    wait_reduce,
    wgrad_into,
)

_WRITES = (flatten_cast, accumulate_cast, wgrad_into, deposit)


def check(nodes: Sequence[fx.Node], plan: Plan | None, debt: Debt | None = None) -> list[str]:
    """What is wrong, as texts that name the bucket and the nodes."""
    ledger = _Ledger(plan, debt)
    for node in nodes:
        if node.target in _WRITES:
            ledger.bring(node)
        if node.target in TABLE:
            ledger.move(node)
    ledger.close()
    return ledger.faults


class _Ledger:
    def __init__(self, plan: Plan | None, debt: Debt | None) -> None:
        self.plan, self.debt, self.facts = plan, debt, facts_of(plan)
        self.faults: list[str] = []
        self.holds: dict[str, tuple[int, str]] = {}  # buffer -> bucket, and what of it
        self.parts: dict[str, list[tuple[int, int]]] = {}  # buffer -> elements of its gradient written so far
        self.brought: dict[tuple[int, int], fx.Node] = {}  # bucket, slot -> its write or deposit
        self.done: dict[object, set[int]] = {}  # operation -> buckets

    def move(self, node: fx.Node) -> None:
        """Takes the buffers of one operation through the table."""
        bucket = _int(node.args[0])
        self.done.setdefault(node.target, set()).add(bucket)
        if node.target is wait_reduce:
            self._check_work(node)
        for argument in arguments_of(node.target):
            buffer = str(node.args[argument])
            of, held = self.holds.get(buffer) or at_entry(buffer)
            rows = rows_for(node.target, argument, buffer, self.facts)
            found = next((row for row in rows if held in row.needs and (of == bucket or held == NOTHING)), None)
            if found is None:
                self._refuse(node, buffer, of, held, [need for row in rows for need in row.needs])
            leaves = (found or rows[0]).leaves if rows else held
            if held == GRADIENT != leaves:
                self._check_whole(of, buffer)
            self.holds[buffer] = (bucket, leaves)

    def _refuse(self, node: fx.Node, buffer: str, of: int, held: str, needs: list[str]) -> None:
        bucket, wanted = _int(node.args[0]), " or ".join(dict.fromkeys(needs))
        if wanted != NOTHING:
            wanted = f"its {wanted}" if of == bucket or held == NOTHING else f"bucket {bucket}'s {wanted}"
        takes = f"needs {wanted} there" if needs else f"of bucket {bucket} can't take it"
        holds = held if held == NOTHING else f"the {held} of bucket {of}"
        self.faults.append(f"{buffer} holds {holds}; {node.name} {takes}")

    def bring(self, node: fx.Node) -> None:
        """A write or a deposit: which slots, with which values, into which elements."""
        bucket, slots, values = _int(node.args[0]), slots_of(node), _values(node)
        spans = self._spans(node, bucket)
        if node.target is not deposit:
            self.parts.setdefault(str(node.args[1]), []).extend(spans)
        if len(values) != len(slots):
            self.faults.append(f"{node.name} of bucket {bucket} has {len(slots)} slots and {len(values)} gradients")
        for slot, value in zip(slots, values, strict=False):
            gradient = f"the gradient of bucket {bucket}, slot {slot}"
            first = self.brought.get((bucket, slot))
            if first is not None:
                self.faults.append(f"{gradient} is written by {first.name} and {node.name}")
            self.brought[bucket, slot] = node
            if self.debt is not None and (bucket, slot) not in value.meta.get("gradient_of", ()):
                self.faults.append(f"{node.name} takes %{value.name} for {gradient}, which it is not")
            if self.plan is not None:
                self._check_extent(node, self.plan.buckets[bucket].slots, slot, spans)

    def _spans(self, node: fx.Node, bucket: int) -> list[tuple[int, int]]:
        """The elements that a node writes."""
        if node.target is wgrad_into:
            return [(_int(node.args[3]), _int(node.args[4]))]
        numel = self.plan.buckets[bucket].numel if self.plan is not None else 1 << 62
        spans: Any = node.kwargs.get("spans", ((0, numel),))
        return [(int(start), int(stop)) for start, stop in spans]

    def _check_extent(self, node: fx.Node, layout: Sequence[Slot], slot: int, spans: list[tuple[int, int]]) -> None:
        if slot >= len(layout):
            self.faults.append(f"{node.name} brings slot {slot} of bucket {node.args[0]}, which has {len(layout)}")
            return
        at = layout[slot]
        inside = [start <= at.offset and at.stop <= stop for start, stop in spans]
        if node.target is wgrad_into:
            inside = [spans == [(at.offset, at.stop)]]
        if at.numel and not any(inside):
            written = ", ".join(f"[{start}, {stop})" for start, stop in spans) or "nothing"
            extent = f"slot {slot} is [{at.offset}, {at.stop})"
            self.faults.append(f"{node.name} writes {written} of bucket {node.args[0]}; {extent}")

    def _check_whole(self, bucket: int, buffer: str) -> None:
        """What was written covers each element of the bucket once, padding included."""
        parts = self.parts.pop(buffer, [])
        if self.plan is None:
            return
        reached, numel = 0, self.plan.buckets[bucket].numel
        for start, stop in [*sorted(parts), (numel, numel)]:
            if start > reached:
                self.faults.append(f"nobody writes the elements [{reached}, {start}) of bucket {bucket}")
            elif start < reached:
                self.faults.append(f"the elements [{start}, {min(stop, reached)}) of bucket {bucket} are written twice")
            reached = max(reached, stop)

    def _check_work(self, node: fx.Node) -> None:
        work = node.args[1]
        if not isinstance(work, fx.Node) or work.target is not launch_reduce:
            self.faults.append(f"{node.name} completes {work}, which is no launch")
        elif (node.args[0], *node.args[2:]) != work.args:
            self.faults.append(f"{node.name} names another bucket or buffers than {work.name}, which it completes")

    def close(self) -> None:
        for buffer, (bucket, held) in self.holds.items():
            if not may_be_left(buffer, held):
                self.faults.append(f"{buffer} holds the {held} of bucket {bucket} at the end, and nobody takes it")
            elif held == GRADIENT:
                self._check_whole(bucket, buffer)
        if self.plan is not None and self.debt is not None:
            self._settle(self.plan, self.debt)

    def _settle(self, plan: Plan, debt: Debt) -> None:
        """What the graph owed against what was done."""
        for bucket, slot in sorted(debt.gradients - self.brought.keys()):
            name = plan.buckets[bucket].slots[slot].name
            self.faults.append(f"the gradient of {name} (bucket {bucket}, slot {slot}) is owed, and nobody writes it")
        whole = debt.whole(plan)
        for (bucket, slot), node in sorted(self.brought.items(), key=lambda item: item[0]):
            if (bucket, slot) not in debt.gradients:
                self.faults.append(f"{node.name} writes bucket {bucket}, slot {slot}: the graph has no such gradient")
            elif node.target is deposit and bucket in whole:
                self.faults.append(f"{node.name} leaves slot {slot} to a flush; all of bucket {bucket} is owed here")
        for what, target, owed in (
            ("reduced", accumulate, debt.reductions(plan)),
            ("copied to host memory", copy_to_host, debt.landings(plan)),
        ):
            done = self.done.get(target, set())
            self.faults += [f"bucket {b} is owed whole, and never {what}" for b in sorted(owed - done)]
            self.faults += [f"bucket {b} is {what}, and not owed whole" for b in sorted(done - owed)]


def _values(node: fx.Node) -> Sequence[fx.Node]:
    """The gradients that a write or a deposit brings; wgrad_into makes its own."""
    if node.target is wgrad_into:
        return (node,)
    given: Any = node.args[2] if node.target is deposit else node.args[3]
    return given if isinstance(given, (list, tuple)) else (given,)


def _int(value: object) -> int:
    return int(str(value))
