"""The proof that a schedule is right: every needed wait is there, and no other. It changes nothing.

The model (docs/proof.md): each node touches buffers, as `zc.schedule.accesses` says; two touches of overlapping
elements conflict if one of them writes; happens-before is program order on a stream, plus record -> wait. Shown, node
by node:

    (a) sufficient   two conflicting touches on two streams are ordered                      else a race
    (b) necessary    without any one wait some conflict would not be                         else a redundant wait
    (c) exactly once a gradient is written once, before the reduction of its bucket
    (d) completion   each launch has one, and nothing touches its buffers in between
    (e) release      nothing reads what was given back

    compute | flatten_cast(0, "flat_grad[0]", ...)
       comm | launch_reduce(0, "recv[0]", "flat_grad[0]")       RaceError: no wait orders launch_reduce on comm
                                                                after flatten_cast on compute: flat_grad[0]

A schedule on one stream has nothing to wait for; (c) to (e) are still checked. This file shares nothing with
insert_events but the model. One pass over the nodes with a vector clock a stream; only a wait that stands earlier than
its first use costs another pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zc.errors import RaceError
from zc.passes import exactly_once
from zc.passes.base import Pass, copy_graph
from zc.plan import Plan
from zc.schedule import (
    COMM,
    HOME,
    Access,
    accesses,
    carried_event,
    is_plan_buffer,
    overlap,
    record_event,
    steps,
    stream_of,
    summary,
    wait_event,
)

Clock = dict[str, int]


@dataclass(frozen=True)
class Verdict:
    """What was proved: counts, and no race and no redundant wait (there is no Verdict otherwise)."""

    nodes: int
    streams: int
    events: int
    waits: int
    races: int = 0
    redundant: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())


@dataclass(frozen=True)
class _Touch:
    access: Access
    writes: bool
    stream: str  # a stream, or for what came before the schedule the carried event that stands for it
    position: int
    node: fx.Node | None


def verify(graph: fx.Graph, plan: Plan | None = None) -> Verdict:
    """Proves a schedule. Raises RaceError naming both nodes, their streams and the buffer, or the wait that is not
    needed.

    With ``plan``, (c) also checks the slots of each bucket against its layout.
    """
    nodes = list(steps(graph))
    race, needed = _walk(graph, nodes, skip=None)
    if race is not None:
        raise RaceError(_describe(nodes, *race))
    exactly_once.check(graph, nodes, plan)
    for node in nodes:
        # a wait without a witness at its own place may still serve a later node: take it out and look
        if node.target is wait_event and node not in needed and _walk(graph, nodes, skip=node)[0] is None:
            raise RaceError(
                f"redundant wait: {stream_of(node)} waits for {node.args[0]}, but all conflicts are ordered without it"
                f"\n{_excerpt(nodes, [node])}"
            )
    return Verdict(**summary(graph))


def _walk(
    graph: fx.Graph, nodes: Sequence[fx.Node], skip: fx.Node | None
) -> tuple[tuple[_Touch, _Touch] | None, set[fx.Node]]:
    """The first race, and the waits whose own next node would race without them. ``skip``: a wait to leave out."""
    clocks: dict[str, Clock] = {}
    recorded: dict[str, Clock] = {}
    group: dict[str, list[tuple[fx.Node, Clock]]] = {}  # stream -> waits since its last node, with what each brings
    touches: dict[str, list[_Touch]] = {}
    needed: set[fx.Node] = set()
    for node in nodes:
        stream = stream_of(node)
        clock = clocks.setdefault(stream, {stream: 0})
        if node.target is record_event:
            recorded[str(node.args[0])] = _joined(clock, *(c for _, c in group.get(stream, [])))
            continue
        if node.target is wait_event:
            if node is not skip:
                group.setdefault(stream, []).append((node, _brought(node, recorded)))
            continue
        waits = group.pop(stream, [])
        joined = _joined(clock, *(c for _, c in waits))
        reads, writes = accesses(node)
        mine = [(a, False) for a in reads] + [(a, True) for a in writes]
        before = [_joined(clock, *(c for other, c in waits if other is not wait)) for wait, _ in waits]
        for access, is_write in mine:
            earlier = touches.setdefault(access.buffer, _entry(access.buffer))
            for touch in earlier:
                own = touch.stream == stream or (touch.stream == carried_event(access.buffer) and stream == COMM)
                if own or not (is_write or touch.writes) or not overlap(access, touch.access):
                    continue
                if joined.get(touch.stream, -1) < touch.position:
                    return (touch, _Touch(access, is_write, stream, 0, node)), needed
                for (wait, _), without in zip(waits, before, strict=True):
                    if without.get(touch.stream, -1) < touch.position:
                        needed.add(wait)
        joined[stream] += 1
        clocks[stream] = joined
        for access, is_write in mine:
            kept = touches[access.buffer]
            if is_write:  # all that it covers is ordered before it, so whoever is ordered after it needs no more
                kept = [t for t in kept if not (access.start <= t.access.start and t.access.stop <= access.stop)]
            else:  # a later read of the same place on the same stream stands for the earlier one
                kept = [t for t in kept if t.writes or t.stream != stream or t.access != access]
            touches[access.buffer] = [*kept, _Touch(access, is_write, stream, joined[stream], node)]
    return _exit_race(graph, nodes, clocks, group, touches), needed


def _entry(buffer: str) -> list[_Touch]:
    """The entry contract: the home stream has used the buffer, and where the plan owns it the comm stream too, which
    has recorded the carried event after; neither is ordered after the other."""
    made = [_Touch(Access(buffer), True, HOME, 0, None)]
    if is_plan_buffer(buffer):
        made.append(_Touch(Access(buffer), True, carried_event(buffer), 0, None))
    return made


def _brought(wait: fx.Node, recorded: dict[str, Clock]) -> Clock:
    event = str(wait.args[0])
    if event in recorded:
        return recorded[event]
    if event.startswith("done/"):  # recorded by an earlier schedule: orders its last use of the buffer, nothing else
        return {event: 0}
    raise RaceError(
        f"{stream_of(wait)} waits for {event}, which no node before it records and no earlier schedule carries"
    )


def _joined(first: Clock, *others: Clock) -> Clock:
    merged = dict(first)
    for other in others:
        for stream, position in other.items():
            merged[stream] = max(merged.get(stream, -1), position)
    return merged


def _exit_race(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    clocks: dict[str, Clock],
    group: dict[str, list[tuple[fx.Node, Clock]]],
    touches: dict[str, list[_Touch]],
) -> tuple[_Touch, _Touch] | None:
    """The exit contract: what is returned is ordered before the end of the home stream."""
    outputs = [n for n in graph.nodes if n.op == "output"]
    end = _joined(clocks.get(HOME, {}), *(c for _, c in group.get(HOME, [])))
    for used in outputs[0].all_input_nodes if outputs else ():
        for touch in touches.get(f"%{used.name}", []):
            if touch.writes and touch.stream != HOME and end.get(touch.stream, -1) < touch.position:
                return touch, _Touch(touch.access, False, HOME, 0, outputs[0])
    return None


def _name(touch: _Touch) -> str:
    if touch.node is None:
        return "an earlier schedule"
    return "the output" if touch.node.op == "output" else getattr(touch.node.target, "__name__", str(touch.node.target))


def _describe(nodes: Sequence[fx.Node], first: _Touch, second: _Touch) -> str:
    how = {
        (True, True): "written twice",
        (True, False): "read after a write",
        (False, True): "overwritten after a read",
    }[first.writes, second.writes]
    return (
        f"race on {first.access.buffer} ({how}): {_name(first)} on {first.stream} and {_name(second)} on "
        f"{second.stream} are not ordered\n{_excerpt(nodes, [first.node, second.node])}"
    )


def _excerpt(nodes: Sequence[fx.Node], shown: Sequence[fx.Node | None], margin: int = 1) -> str:
    """The smallest piece of the schedule around the nodes, marked with >."""
    where = [k for k, n in enumerate(nodes) if n in shown]
    if not where:
        return ""
    low, high = max(0, min(where) - margin), min(len(nodes), max(where) + margin + 1)
    lines = []
    for k in range(low, high):
        if k - low > 12 and high - k > 12:
            continue
        mark = ">" if nodes[k] in shown else " "
        name = getattr(nodes[k].target, "__name__", "")
        lines.append(f"{mark} {k:5d} {stream_of(nodes[k]):>10} | {name}({', '.join(map(str, nodes[k].args))})")
    return "\n".join(lines)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    verify(graph, plan)
    return copy_graph(graph)[0]


PASS = Pass("verify", run, requires=frozenset({"events"}))
