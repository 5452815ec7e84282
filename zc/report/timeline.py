"""The timeline of a clocked step (`zc.engine.ledger`): one lane per stream, one box per operation, one arrow per wait.
`zc.report.html` draws it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from zc.engine.ledger import ClockedStep, Span
from zc.errors import some
from zc.planning.plan import Plan
from zc.ranks.exchanges import WaitForRank
from zc.schedule.buffer import COMM, COMPUTE, MAIN
from zc.schedule.nodes import kind_of, op_of, ops, results, stream_of
from zc.schedule.spec import (
    BucketOp,
    Cast,
    Deposit,
    FreeWeights,
    Gather,
    Op,
    ReadWeights,
    RecordEvent,
    Role,
    Segment,
    WaitEvent,
    WgradInto,
)

if TYPE_CHECKING:
    from zc.engine.program import Program


LOOP = "loop"


@dataclass(frozen=True)
class Box:
    """One operation on its lane, in microseconds from the start. ``node``: of a schedule; None for a phase of the
    caller's loop. ``waits``: when it waited for other ranks, and for which."""

    node: fx.Node | None
    lane: str
    start: float
    stop: float
    label: str = ""
    detail: str = ""
    waits: tuple[WaitForRank, ...] = ()

    @property
    def op(self) -> Op | None:
        return op_of(self.node) if self.node is not None else None


@dataclass(frozen=True)
class Arrow:
    """From a recorded event to a wait for it. ``delayed``: the waiting stream was idle until the event."""

    source: str
    start: float
    target: str
    stop: float
    event: str
    delayed: bool


@dataclass(frozen=True)
class Timeline:
    """``memory``: (microseconds, bytes). ``gathered``: the same of gathered weights, from each time on, and
    ``weight_cap``, which they never pass (stage 3)."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    memory: tuple[tuple[float, int], ...] = ()
    gathered: tuple[tuple[float, int], ...] = ()
    weight_cap: int = 0
    exposed_on_host: float | None = None  # the calling thread's own waits, where they were measured

    @property
    def stop(self) -> float:
        return max((box.stop for box in self.boxes), default=0.0)

    @property
    def waits(self) -> list[WaitForRank]:
        return [wait for box in self.boxes for wait in box.waits]

    def exposed(self) -> float:
        """Microseconds of communication during which neither a compute stream nor the caller's forward runs."""
        if self.exposed_on_host is not None:
            return self.exposed_on_host
        busy = (b for b in self.boxes if b.lane.startswith(COMPUTE) or (b.lane == LOOP and b.label == "forward"))
        compute = _union([(b.start, b.stop) for b in busy])
        comm = _union([(b.start, b.stop) for b in self.boxes if b.lane == COMM])
        covered = sum(max(0.0, min(s, t) - max(a, b)) for a, s in comm for b, t in compute)
        return sum(stop - start for start, stop in comm) - covered


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged


def measured(step: ClockedStep, programs: Iterable[Program]) -> Timeline:
    """The timeline of a clocked step. A schedule that ran several times, once per microbatch, appears as often."""
    by_name = {program.name: program for program in programs}
    runs: dict[tuple[str, int], dict[str, Span]] = {}  # (program, number of the run) -> spans by node
    times: Counter[tuple[str, str]] = Counter()
    for span in step.spans:
        number = times[span.program, span.name]
        times[span.program, span.name] += 1
        runs.setdefault((span.program, number), {})[span.name] = span
    boxes = [Box(None, LOOP, p.start, p.stop, p.name, f"the caller's loop: {p.name}") for p in step.phases]
    arrows: list[Arrow] = []
    free: dict[str, float] = {}
    moves: list[tuple[float, Gather | FreeWeights]] = []
    for (name, _), spans in sorted(runs.items(), key=lambda run: min(span.start for span in run[1].values())):
        if name in by_name:
            _place(by_name[name], spans, free, boxes, arrows)
            moves += _moves(by_name[name].graph, spans)
    cap = max((program.plan.weight_cap for program in by_name.values()), default=0) if moves else 0
    return Timeline(
        tuple(boxes),
        tuple(arrows),
        memory=step.memory,
        gathered=_gathered(moves),
        weight_cap=cap,
        exposed_on_host=step.exposed,
    )


def _moves(graph: fx.Graph, spans: Mapping[str, Span]) -> Iterator[tuple[float, Gather | FreeWeights]]:
    """When a gather began to fill its bytes of the arena, and when these were free again."""
    for node, op in ops(graph):
        if node.name in spans and isinstance(op, Gather) and op.dst.kind == "arena":
            yield spans[node.name].start, op
        elif node.name in spans and isinstance(op, FreeWeights):
            yield spans[node.name].stop, op


def _gathered(moves: Iterable[tuple[float, Gather | FreeWeights]]) -> tuple[tuple[float, int], ...]:
    """The bytes of gathered weights from each of these times on.

    A pass that ended early freed nothing: its weights count until the next gather overwrites them.
    """
    alive: set[tuple[int, int]] = set()  # extents
    points: dict[float, int] = {}
    for time, op in sorted(moves, key=lambda move: (move[0], isinstance(move[1], Gather))):
        start, stop = (op.start, op.stop) if isinstance(op, FreeWeights) else (op.extent or (0, 0))
        alive = {(low, high) for low, high in alive if high <= start or stop <= low}
        if isinstance(op, Gather):
            alive.add((start, stop))
        points[time] = sum(stop - start for start, stop in alive)
    return tuple(points.items())


def _place(
    program: Program,
    spans: Mapping[str, Span],
    free: dict[str, float],
    boxes: list[Box],
    arrows: list[Arrow],
) -> None:
    """Adds one run of a schedule. ``free``: when each lane finished its last operation."""
    events: dict[str, tuple[str, float]] = {}
    waits: dict[str, list[tuple[str, float, str]]] = {}
    for node, op in ops(program.graph):
        lane = stream_of(node)
        if isinstance(op, RecordEvent):
            events[op.event] = (lane, free.get(lane, 0.0))
        elif isinstance(op, WaitEvent) and events.get(op.event, (lane, 0.0))[0] != lane:
            waits.setdefault(lane, []).append((*events[op.event], op.event))
        elif node.name in spans:
            span = spans[node.name]
            for source, time, event in waits.pop(lane, ()):
                arrows.append(Arrow(source, time, lane, span.start, event, delayed=time > free.get(lane, 0.0)))
            free[lane] = span.stop
            if isinstance(op, ReadWeights | FreeWeights):
                continue  # it does nothing itself
            said = detail(node, program.plan, program)
            boxes.append(Box(node, lane, span.start, span.stop, label(node, program.plan), said, span.waits))


def color_class(box: Box) -> str:
    """The CSS class of a box: the role of its operation."""
    if box.op is None:
        return "loop"
    return str((Role.WRITE if box.op.role is Role.DEPOSIT else box.op.role).value)


def lanes(timeline: Timeline) -> list[str]:
    used = {box.lane for box in timeline.boxes} | {lane for a in timeline.arrows for lane in (a.source, a.target)}
    return sorted(used, key=lambda lane: (lane != LOOP, lane != MAIN, not lane.startswith(COMPUTE), lane))


def gradients_of(segment: fx.Node, plan: Plan) -> list[str]:
    """The parameters whose gradients a segment computes."""
    names = []
    for value in results(segment):
        for user in value.users:
            op = op_of(user)
            if isinstance(op, Cast):
                names += [plan.buckets[op.bucket].slots[k].name
                          for k, grad in zip(op.slots, op.grads, strict=True) if grad is value]  # fmt: skip
            elif isinstance(op, Deposit | WgradInto):
                names.append(plan.buckets[op.bucket].slots[op.slot].name)
    return list(dict.fromkeys(names))


def module_of(names: list[str]) -> str:
    """The innermost module that contains all of these parameters; otherwise the first and the last module."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    split = [module.split(".") for module in modules]
    common = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    return ".".join(common) or " to ".join(dict.fromkeys((modules[0], modules[-1])))


def label(node: fx.Node, plan: Plan) -> str:
    """A few words inside the box: a segment's module, or the operation and its bucket."""
    op = op_of(node)
    if isinstance(op, Segment):
        names = gradients_of(node, plan)
        return module_of(names) if names else op.key.replace("segment_", "seg ")
    return f"{kind_of(node)} {node.args[0] if node.args else ''}"


def detail(node: fx.Node, plan: Plan, program: Program | None = None) -> str:
    """The text for a box under the pointer."""
    op, words = op_of(node), f"{stream_of(node)}: {kind_of(node)}"
    if program is not None:
        words = f"{program.name}, {words}"
    if isinstance(op, Segment):
        names = gradients_of(node, plan)
        grads = f"; computes the gradients of {some(names, 3)}" if names else ""
        return f"{words} {op.key}{grads}"
    if isinstance(op, BucketOp):
        bucket = plan.bucket(op.bucket)
        nbytes = bucket.numel * bucket.reduce_dtype.itemsize
        return f"{words}, bucket {op.bucket} ({nbytes / 1e6:,.1f} MB): {some([s.name for s in bucket.slots], 3)}"
    return words
