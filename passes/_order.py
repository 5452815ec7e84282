"""Happens-before in a finished schedule, and the order that its accesses need. Only the proof uses it.

It shares nothing with insert_events but the records of the nodes: a check by the same code would find no fault of it.

A clock has a position for each stream, counted from 1; 0 is the stream's past at entry, -1 nothing. It also has a set
of carried events, as bits: those that were waited for before this schedule has recorded them.

An *obligation* of a node is a point that its clock must reach. Obligations stand between nearest conflicting accesses
only. Every other conflict is a chain of these, so if all obligations hold, all conflicts are ordered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from zc.schedule.buffer import HOST, MAIN, Access, Buffer, Place, carried_event, overlap
from zc.schedule.nodes import accesses, op_of, stream_of, value
from zc.schedule.spec import RecordEvent, Sync, WaitEvent

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
        self.accesses = [accesses(node) for node in nodes]  # reads and writes
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
            reads, writes = self.accesses[k]
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
