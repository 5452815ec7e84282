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

A schedule on one stream has nothing to wait for; (c) and (d) are still checked. `Order` has the clocks. The
cost is near-linear: one walk, and for each wait the steps whose clock it changes, as a rule one.

`Order` is happens-before in a finished schedule, and the order that its accesses need. It shares nothing with
insert_events but the records of the nodes: a check by the same code would find no fault of it.

A clock has a position for each stream, counted from 1; 0 is the stream's past at entry, -1 nothing. It also has a set
of carried events, as bits: those that were waited for before this schedule has recorded them.

An *obligation* of a node is a point that its clock must reach. Obligations stand between nearest conflicting accesses
only. Every other conflict is a chain of these, so if all obligations hold, all conflicts are ordered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from zc.errors import RaceError
from zc.passes import exactly_once
from zc.passes.base import Pass
from zc.planning.plan import Plan
from zc.schedule.buffer import COPY, HOST, MAIN, Access, Buffer, Place, carried_by, carried_event, overlap
from zc.schedule.nodes import accesses, kind_of, maker, op_of, shared_buffers, steps, stream_of, summary, value
from zc.schedule.spec import FreeWeights, Gather, ReadWeights, RecordEvent, Sync, TakeWeights, WaitEvent

ProofPart = Callable[["Order", Plan], list[str]]  # of the proof: the faults that it finds, as texts


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


def verify(graph: fx.Graph, plan: Plan, parts: Sequence[ProofPart] = ()) -> Verdict:
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


def examine(graph: fx.Graph, plan: Plan, parts: Sequence[ProofPart] = ()) -> Findings:
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
        if isinstance(order.ops[k], Sync) or k in (low, high) or not low <= k <= high
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


def run(graph: fx.Graph, plan: Plan, parts: Sequence[ProofPart] = ()) -> fx.Graph:
    verify(graph, plan, parts)
    return graph


PASS = Pass("verify", run, requires=frozenset({"events"}))


Clock = tuple[list[int], int]  # positions by stream, bits of carried events
_ISSUED = 1  # the bit that stands for the issuing thread's own accesses to host memory


class Obligation(NamedTuple):
    """``node`` must come after position ``position`` of stream ``stream``, or after carried event ``bit``."""

    stream: int
    position: int
    bit: int  # 0, or the carried event that stands for the same thing
    earlier: fx.Node | None  # None: before the schedule
    access: Access
    writes: tuple[bool, bool]  # the earlier touch, this one


@dataclass
class _Touch:
    """An access. ``node`` None: before the schedule; ``bit``: as of an `Obligation`."""

    access: Access
    writes: bool
    stream: int
    position: int
    bit: int
    node: fx.Node | None


class Order:
    """A schedule's nodes in the order of issue, with their records, clocks and obligations. The last node is the
    output: the end of the main stream."""

    def __init__(self, nodes: Sequence[fx.Node], shared: frozenset[Buffer]) -> None:
        carriers = {buffer.carrier for buffer in shared}
        self.nodes, self.shared = nodes, shared
        self.ops = [op_of(node) for node in nodes]
        self.streams = sorted({stream_of(n) for n in nodes} | {MAIN} | carriers)
        self._id = {name: k for k, name in enumerate(self.streams)}
        self._bits = {carried_event(buffer): _ISSUED << k for k, buffer in enumerate(sorted(shared), start=1)}
        self._carriers = {self._id[name] for name in carriers}
        self.unrecorded: list[tuple[fx.Node, str]] = []  # waits for events that nobody has recorded or carries
        self._link()
        self.clocks: list[Clock] = []
        for k in range(len(nodes)):
            self.clocks.append(self._clock(k, {}, skip=-1))
        self.obligations: list[list[Obligation]] = [[] for _ in nodes]
        self.futures: list[tuple[Buffer, Obligation]] = []  # of later schedules, towards the buffer's carrier
        self._find_obligations()

    # --- clocks ---

    def _link(self) -> None:
        """For each step: its stream and position, the step before it there, and for a wait the record it sees."""
        self.stream: list[int] = []
        self.position: list[int] = []
        self.previous: list[int] = []
        self.following: list[int] = [-1] * len(self.nodes)
        self.source: list[int] = [-1] * len(self.nodes)  # of a wait: its record
        self.waiters: list[list[int]] = [[] for _ in self.nodes]
        last, recorded = [-1] * len(self.streams), dict[str, int]()
        for k, (node, op) in enumerate(zip(self.nodes, self.ops, strict=True)):
            stream = self._id[stream_of(node)]
            before = last[stream]
            self.stream.append(stream)
            self.previous.append(before)
            self.position.append(1 if before < 0 else self.position[before] + 1)
            if before >= 0:
                self.following[before] = k
            last[stream] = k
            if isinstance(op, RecordEvent):
                recorded[op.event] = k
            elif isinstance(op, WaitEvent):
                if op.event in recorded:
                    self.source[k] = recorded[op.event]
                    self.waiters[recorded[op.event]].append(k)
                elif op.event not in self._bits:
                    self.unrecorded.append((node, op.event))
        self.index = {node: k for k, node in enumerate(self.nodes)}
        self._latest = recorded

    def _clock(self, k: int, changed: dict[int, Clock], skip: int) -> Clock:
        """The clock of step ``k``, itself included. Without the wait ``skip`` if there is one: ``changed`` then has the
        clocks of earlier steps that differ without it."""
        stream, before = self.stream[k], self.previous[k]
        if before >= 0:
            positions, bits = changed[before] if before in changed else self.clocks[before]
            positions = positions.copy()
        else:
            positions, bits = [-1] * len(self.streams), 0
            if stream == self._id[MAIN] or stream in self._carriers:
                positions[stream] = 0  # a carrier comes after its own past, and so does all that waits for it
            if self.streams[stream] == HOST:
                bits = _ISSUED  # the device may still be at what that thread has issued on main
        op = self.ops[k]
        if isinstance(op, WaitEvent) and k != skip:
            source = self.source[k]
            if source >= 0:
                theirs, more = changed[source] if source in changed else self.clocks[source]
                positions = [a if a > b else b for a, b in zip(positions, theirs, strict=True)]
                bits |= more
            else:
                bits |= self._bits.get(op.event, 0)
        positions[stream] = self.position[k]
        return positions, bits

    @staticmethod
    def holds(clock: Clock, need: Obligation) -> bool:
        return clock[0][need.stream] >= need.position or bool(clock[1] & need.bit)

    def is_needed(self, wait: int) -> bool:
        """Whether some obligation fails without this wait. Visits only steps whose clock changes: as a rule the one
        after the wait."""
        changed: dict[int, Clock] = {}
        todo = [wait]
        while todo:
            k = heapq.heappop(todo)
            if k in changed:
                continue
            clock = self._clock(k, changed, skip=wait)
            if clock == self.clocks[k]:
                continue
            changed[k] = clock
            if not all(self.holds(clock, need) for need in self.obligations[k]):
                return True
            if self.following[k] >= 0:
                heapq.heappush(todo, self.following[k])
            for waiter in self.waiters[k]:
                heapq.heappush(todo, waiter)
        return any(not self.holds(self.future_clock(buffer, changed), need) for buffer, need in self.futures)

    def future_clock(self, buffer: Buffer, changed: dict[int, Clock] | None = None) -> Clock:
        """The clock of a later schedule that starts when the main stream is done and waits for the buffer's carried
        event. For host memory: the clock of the processor, which does not wait for main."""
        changed = changed or {}
        end, record = len(self.nodes) - 1, self._latest.get(carried_event(buffer), -1)
        positions, bits = changed.get(end, self.clocks[end])
        if buffer.on_host:
            end = max((k for k, s in enumerate(self.stream) if self.streams[s] == HOST), default=-1)
            positions, bits = changed.get(end, self.clocks[end]) if end >= 0 else ([-1] * len(self.streams), 0)
        if record < 0:
            return positions, bits | self._bits.get(carried_event(buffer), 0)
        theirs, more = changed.get(record, self.clocks[record])
        return [max(a, b) for a, b in zip(positions, theirs, strict=True)], bits | more

    # --- obligations ---

    def _find_obligations(self) -> None:
        touches: dict[Place, list[_Touch]] = {}
        for node in (n for step in self.nodes for n in step.all_input_nodes if n.op == "placeholder"):
            touches[value(node).buffer] = [_Touch(value(node), True, self._id[MAIN], 0, 0, None)]
        for k, node in enumerate(self.nodes):
            stream, position = self.stream[k], self.position[k]
            reads, writes = accesses(node)
            if node.op == "output":
                reads, writes = (), reads  # the caller may write or free it
            mine = [(a, True) for a in writes] + [(a, False) for a in reads]
            for access, is_write in mine:
                if access.buffer not in touches:
                    touches[access.buffer] = self._entry(access.buffer)
                self._oblige(k, touches[access.buffer], access, is_write)
            for access, is_write in mine:
                touch = _Touch(access, is_write, stream, position, 0, node)
                touches[access.buffer] = [t for t in touches[access.buffer] if not _replaces(touch, t)] + [touch]
        owned = sorted(b for b in touches if isinstance(b, Buffer))
        lasting = {buffer.carrier for buffer in owned}
        self._oblige_end(lasting)
        self.futures = [
            (b, Obligation(t.stream, t.position, t.bit, t.node, t.access, (t.writes, True)))
            for b in owned
            for t in touches[b]
            if self._outlives(b, self.streams[t.stream], lasting - {MAIN})
        ]

    def _outlives(self, buffer: Buffer, stream: str, lasting: set[str]) -> bool:
        """Whether later schedules must be able to wait for an access on ``stream``, since main may end before it. On
        another buffer's carrier always; on its own, program order is enough if no other stream uses the buffer."""
        return stream in lasting and (stream != buffer.carrier or buffer in self.shared)

    def _entry(self, buffer: Place) -> list[_Touch]:
        if not isinstance(buffer, Buffer):
            return []
        past = [_Touch(Access(buffer), True, self._id[MAIN], 0, _ISSUED if buffer.on_host else 0, None)]
        if buffer in self.shared:
            bit = self._bits[carried_event(buffer)]
            past.append(_Touch(Access(buffer), True, self._id[buffer.carrier], 0, bit, None))
        return past

    def _oblige(self, k: int, earlier: list[_Touch], access: Access, is_write: bool) -> None:
        node = self.nodes[k]
        for touch in earlier:
            if not (is_write or touch.writes) or not overlap(access, touch.access):
                continue
            if touch.node is node:  # a node's own read does not conflict with its write
                continue
            if touch.stream != self.stream[k]:
                need = Obligation(touch.stream, touch.position, touch.bit, touch.node, access, (touch.writes, is_write))
                self.obligations[k].append(need)

    def _oblige_end(self, lasting: set[str]) -> None:
        """Streams that are no carrier end in the main stream."""
        end = len(self.nodes) - 1
        last: dict[int, int] = {}
        for k in range(end):
            if not isinstance(self.ops[k], Sync):
                last[self.stream[k]] = k
        for stream, k in sorted(last.items()):
            if stream != self.stream[end] and self.streams[stream] not in lasting:
                touched = Access(f"all of {self.streams[stream]}")
                need = Obligation(stream, self.position[k], 0, self.nodes[k], touched, (True, False))
                self.obligations[end].append(need)


def _replaces(later: _Touch, earlier: _Touch) -> bool:
    """Whether ``later`` stands for ``earlier``: it covers it, every access that conflicts with ``earlier`` conflicts
    with ``later``, too, and ``later`` is obliged to come after ``earlier``."""
    if not (later.access.start <= earlier.access.start and earlier.access.stop <= later.access.stop):
        return False
    if later.writes:
        return later.node is not earlier.node
    same_stream = later.stream == earlier.stream and later.position >= earlier.position
    return same_stream and not earlier.writes
