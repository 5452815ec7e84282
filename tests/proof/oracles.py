"""Another way to find a race, sharing nothing with `verify` but what each node touches: `Enumeration` tries all orders
that the events allow, without any clock.

The contract of docs/proof.md becomes operations: the caller and earlier schedules before, the caller and later
schedules after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from zc.planning.plan import Plan
from zc.schedule.buffer import HOST, MAIN, Access, Buffer, carried_event, overlap
from zc.schedule.nodes import accesses, op_of, shared_buffers, steps, stream_of
from zc.schedule.spec import RecordEvent, Sync, WaitEvent


class Op(NamedTuple):
    """One thing that happens: ``kind`` is touch, record or wait."""

    stream: str
    kind: str
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    event: str = ""
    node: fx.Node | None = None


def operations(graph: fx.Graph, plan: Plan) -> list[Op]:
    """The schedule, with what the contract says of before and after."""
    shared = sorted(shared_buffers(graph, plan))
    nodes = list(steps(graph))
    touched = {a.buffer for n in nodes for group in accesses(n) for a in group if isinstance(a.buffer, Buffer)}
    on_host = tuple(Access(f"caller {b}") for b in sorted(touched) if b.on_host)
    ops = [Op(MAIN, "touch", writes=on_host)]
    # the thread that issues the schedule is the processor: what it did with host memory is done, what it has issued on
    # main is not
    ops += [Op(MAIN, "record", event="entry"), Op(HOST, "wait", event="entry")]
    on_device = tuple(Access(f"caller {b}") for b in sorted(touched) if not b.on_host)
    ops.append(Op(MAIN, "touch", writes=on_device))
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    ops.append(Op(MAIN, "touch", writes=tuple(Access(f"%{n.name}") for n in placeholders)))
    for buffer in shared:
        ops.append(Op(f"past {buffer}", "touch", writes=(Access(f"carried {buffer}"),)))
        ops.append(Op(f"past {buffer}", "record", event=carried_event(buffer)))
        ops.append(Op(buffer.carrier, "wait", event=carried_event(buffer)))
    lasting = {b.carrier for b in touched}
    sides = {stream_of(n) for n in nodes} - lasting - {MAIN}
    for node in nodes:
        ops += _operations_of(node, sides)
    ends = tuple(Access(f"end of {s}") for s in sorted(sides))
    output = graph.output_node()
    ops.append(Op(MAIN, "touch", ends, tuple(Access(f"%{n.name}") for n in output.all_input_nodes), node=output))
    ops += [Op(MAIN, "record", event="the end"), Op(HOST, "record", event="the processor's end")]
    for buffer in shared:
        end = "the processor's end" if buffer.on_host else "the end"
        ops.append(Op(f"future {buffer}", "wait", event=end))
        ops.append(Op(f"future {buffer}", "wait", event=carried_event(buffer)))
        ops.append(Op(f"future {buffer}", "touch", writes=_both(Access(buffer))))
    elsewhere = [(a.buffer, stream_of(n)) for n in nodes for group in accesses(n) for a in group]
    for buffer in sorted({b for b, s in elsewhere if isinstance(b, Buffer) and s in lasting - {MAIN, b.carrier}}):
        if buffer not in shared:  # no carried event stands for it: main's end must
            ops.append(Op(f"future {buffer}", "wait", event="the end"))
            ops.append(Op(f"future {buffer}", "touch", writes=_both(Access(buffer))))
    return ops


def _operations_of(node: fx.Node, sides: set[str]) -> Iterator[Op]:
    stream, op = stream_of(node), op_of(node)
    if isinstance(op, RecordEvent | WaitEvent):
        yield Op(stream, "record" if isinstance(op, RecordEvent) else "wait", event=op.event, node=node)
        return
    reads, writes = accesses(node)
    reads, writes = (tuple(b for a in group for b in _both(a)) for group in (reads, writes))
    if stream in sides and not isinstance(op, Sync):
        writes = (*writes, Access(f"end of {stream}"))
    yield Op(stream, "touch", reads, writes, node=node)


def _both(access: Access) -> tuple[Access, ...]:
    """A plan-owned buffer has two pasts, the caller's and the earlier schedules', that nothing orders: two places."""
    if not isinstance(access.buffer, Buffer):
        return (access,)
    return access._replace(buffer=f"caller {access.buffer}"), access._replace(buffer=f"carried {access.buffer}")


class Enumeration:
    """All orders that the events allow: which operation may run while an earlier, conflicting one has not."""

    def __init__(self, graph: fx.Graph, plan: Plan) -> None:
        self.ops = operations(graph, plan)
        last: dict[str, int] = {}
        recorded: dict[str, int] = {}
        self._before = [0] * len(self.ops)  # bits of the operations that must have run
        for k, op in enumerate(self.ops):
            if op.stream in last:
                self._before[k] |= 1 << last[op.stream]
            if op.kind == "wait" and op.event in recorded:
                self._before[k] |= 1 << recorded[op.event]
            if op.kind == "record":
                recorded[op.event] = k
            last[op.stream] = k
        self._conflicts = [0] * len(self.ops)
        for k, op in enumerate(self.ops):
            for j in range(k):
                if _conflict(self.ops[j], op):
                    self._conflicts[k] |= 1 << j

    def finds_a_race(self) -> bool:
        """Walks every reachable set of touches that have run. Records and waits run as soon as they can: that allows
        more, and takes nothing away."""
        first = self._passed(0)
        seen, todo = {first}, [first]
        while todo:
            done = todo.pop()
            for k, op in enumerate(self.ops):
                if op.kind != "touch" or done >> k & 1 or self._before[k] & ~done:
                    continue
                if self._conflicts[k] & ~done:
                    return True
                after = self._passed(done | 1 << k)
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return False

    def _passed(self, done: int) -> int:
        moved = True
        while moved:
            moved = False
            for k, op in enumerate(self.ops):
                if op.kind != "touch" and not done >> k & 1 and not self._before[k] & ~done:
                    done |= 1 << k
                    moved = True
        return done


def _conflict(a: Op, b: Op) -> bool:
    pairs = [(x, y) for x in a.writes for y in (*b.reads, *b.writes)] + [(x, y) for x in a.reads for y in b.writes]
    return any(overlap(x, y) for x, y in pairs)
