"""The proof that a schedule is right: every needed wait is there, and no other. It changes nothing.

The model (docs/proof.md): each node accesses buffers, as `zc.schedule.nodes.accesses` says; two accesses to overlapping
elements conflict if one of them writes; happens-before is program order on a stream, plus record -> wait. Shown:

    (a) sufficient    two conflicting accesses are ordered, those of earlier schedules and of the caller included
    (b) necessary     without any one wait, some conflict would not be
    (c) exactly once  a gradient that the graph owes is written once and in full, before its bucket's one reduction,
                      which enters the accumulator once; or it is deposited, for the flush that owes it then
    (d) residency     gathered weights are there while they are read, in bytes of their own, within the cap (stage 3);
                      `zc.passes.residency`, handed over: a schedule that needs it has no proof without it

Before and after: a proved schedule comes back equal. One that isn't raises, here with ``wait_event("e0")`` deleted::

    compute | flatten_cast(0, "flat_grad[0]", ...)     RaceError: flat_grad[0] is written by flatten_cast on compute
       comm | reduce(0, "acc[0]", "flat_grad[0]")   and read by reduce on comm, and nothing orders them

A schedule on one stream has nothing to wait for; (c) and (d) are still checked. `zc.passes._order` has the clocks. The
cost is near-linear: one walk, and for each wait the steps whose clock it changes, as a rule one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from zc.errors import RaceError
from zc.passes import exactly_once
from zc.passes._order import Obligation, Order
from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule.buffer import COPY, HOST, carried_by, carried_event
from zc.schedule.nodes import kind_of, maker, shared_buffers, steps, stream_of, summary
from zc.schedule.spec import Event, FreeWeights, Gather, ReadWeights, Sync, TakeWeights, WaitEvent

Part = Callable[[Order, Plan], list[str]]  # of the proof: the faults that it finds, as texts


@dataclass(frozen=True)
class Verdict:
    """A schedule is proved: its counts. It has no race and no redundant wait, or there would be no Verdict."""

    nodes: int
    streams: int
    events: int
    waits: int
    races: int = 0
    redundant: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())


@dataclass(frozen=True)
class Findings:
    """All faults of a schedule, as texts; ``redundant`` is empty where there is a race."""

    races: tuple[str, ...]
    redundant: tuple[str, ...]
    faults: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.races or self.redundant or self.faults)


def verify(graph: fx.Graph, plan: Plan, parts: Sequence[Part] = ()) -> Verdict:
    """Proves a schedule. Raises RaceError naming both nodes, their streams and the buffer, or the wait that nothing
    needs, or the gradient that does not arrive once.

    The plan says which buffers other schedules share, and where slots lie. Every schedule that zc has made has its debt
    on its output, ``meta["debt"]``. For one made by hand without it, (c) says that nothing arrives twice or in parts,
    and does not see a gradient that is missing altogether. ``parts``: of the proof, that features bring.
    """
    findings = examine(graph, plan, parts)
    if findings:
        raise RaceError("\n".join((findings.races or findings.faults or findings.redundant)[:1]))
    return Verdict(**summary(graph))


def examine(graph: fx.Graph, plan: Plan, parts: Sequence[Part] = ()) -> Findings:
    """Everything that `verify` would refuse, without raising."""
    output = graph.output_node()
    order = Order([*steps(graph), output], shared_buffers(graph, plan))
    races = [
        _race(order, need, node)
        for k, node in enumerate(order.nodes)
        for need in order.obligations[k]
        if not order.holds(order.clocks[k], need)
    ]
    faults = [f"{stream_of(n)} waits for {event}, which no node before records" for n, event in order.unrecorded]
    races += _carried(order)
    faults += exactly_once.check(order, plan, output.meta.get("debt")) + _misplaced(order)
    faults += [fault for part in parts for fault in part(order, plan)] if parts else _unproved(order)
    redundant: list[str] = []
    if not races:
        waits = [(k, op.event) for k, op in enumerate(order.ops) if isinstance(op, WaitEvent)]
        # the carried ones last: where either of two could go, the one inside this schedule is what stalls it
        for k, event in sorted(waits, key=lambda wait: carried_by(wait[1]) is not None):
            if not order.is_needed(k):
                node = order.nodes[k]
                text = f"{stream_of(node)} waits for {event}, and every conflict is ordered without it"
                redundant.append(f"redundant wait: {text}\n{_excerpt(order, node, node)}")
    return Findings(tuple(races), tuple(redundant), tuple(faults))


def _unproved(order: Order) -> list[str]:
    """Faults of a schedule that reads sharded weights, where nobody looks whether they are there."""
    kinds = TakeWeights | ReadWeights | FreeWeights
    of_weights = [
        f"{kind_of(node)} ({node.name})"
        for node, op in zip(order.nodes, order.ops, strict=True)
        if isinstance(op, kinds) or (isinstance(op, Gather) and op.dst.kind == "arena")
    ]
    inputs = order.nodes[-1].graph.find_nodes(op="placeholder")
    of_weights += [f"%{node.name}" for node in inputs if "weight" in node.meta]
    return [f"{each} is of sharded weights, and part (d) of the proof was not handed over" for each in of_weights]


def _carried(order: Order) -> list[str]:
    """Races with later schedules, for which the carried event stands for every use of the buffer on its carrier."""
    races: list[str] = []
    for buffer, need in order.futures:
        if not order.holds(order.future_clock(buffer), need):
            used = "earlier schedules" if need.earlier is None else f"{kind_of(need.earlier)} ({need.earlier.name})"
            races.append(
                f"race: {buffer} is used by {used} on {order.streams[need.stream]} and by later schedules, and "
                f"{carried_event(buffer)} is not recorded after it"
            )
    return races


def _misplaced(order: Order) -> list[str]:
    """Host memory is touched by the processor and by copies on the copy stream: whose events it can wait for. A value
    is used on the stream that made it, whose allocations may reuse its storage after the last use there."""
    faults: list[str] = []
    for node, op in zip(order.nodes, order.ops, strict=True):
        stream = stream_of(node)
        for used in node.all_input_nodes:
            if (owner := stream_of(maker(used))) != stream:
                faults.append(f"%{used.name} of {owner} is used by {kind_of(node)} ({node.name}) on {stream}")
        if op is None or isinstance(op, Sync):
            continue
        if stream != op.stream and (op.stream in (HOST, COPY) or stream == HOST):
            faults.append(f"{kind_of(node)} ({node.name}) can't be on {stream}")
    return faults


_HOW = {(True, True): ("written", "written"), (True, False): ("written", "read"), (False, True): ("read", "written")}


def _race(order: Order, need: Obligation, node: fx.Node) -> str:
    first, second = _HOW[need.writes]
    here = f"{second} by {kind_of(node)} ({node.name}) on {stream_of(node)}"
    if need.earlier is None:
        before = "the caller" if not need.bit else f"an earlier schedule on {order.streams[need.stream]}"
        there = f"{first} by {before}"
    else:
        there = f"{first} by {kind_of(need.earlier)} ({need.earlier.name}) on {stream_of(need.earlier)}"
    text = f"race: {need.access.buffer} is {there} and {here}, and nothing orders them"
    return f"{text}\n{_excerpt(order, need.earlier or node, node)}"


def _excerpt(order: Order, first: fx.Node, second: fx.Node, limit: int = 12) -> str:
    """The smallest piece of the schedule around two nodes (marked), with the records and waits between them."""
    low, high = sorted((order.index[first], order.index[second]))
    streams = {stream_of(first), stream_of(second)}
    printed = [
        k
        for k in range(max(0, low - 1), min(len(order.nodes), high + 2))
        if isinstance(order.ops[k], Event) or k in (low, high) or not low <= k <= high
        if stream_of(order.nodes[k]) in streams
    ]
    if len(printed) > limit:
        near = {k for k in printed if min(abs(k - low), abs(k - high)) <= limit} & set(
            printed[: limit // 2] + printed[-limit // 2 :]
        )
        printed = sorted(near | {low, high})
    lines, before = [], printed[0]
    for k in printed:
        if k > before + 1:
            lines.append(f"        ... {k - before - 1} more")
        before = k
        node = order.nodes[k]
        mark = ">" if k in (low, high) else " "
        lines.append(f"{mark} {k:5d} {stream_of(node):>10} | {kind_of(node)}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


def run(graph: fx.Graph, plan: Plan, parts: Sequence[Part] = ()) -> fx.Graph:
    verify(graph, plan, parts)
    return copy_graph(graph)


PASS = Pass("verify", run, requires=frozenset({"events"}))


def with_parts(parts: Sequence[Part]) -> Pass:
    """The same, with the parts of the proof that features bring."""
    return PASS._replace(run=partial(run, parts=parts))
