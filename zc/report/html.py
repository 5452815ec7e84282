"""`zc.explain(model, format="html")`: the report as one self-contained page, without network.

It begins with the main figures. Then come the clocked step, the buckets, and all sections of the text, folded.

Its timelines are drawn as one SVG element each: one lane per stream, all to one scale, and memory below them. In stage
3 a band shows the bytes of gathered weights, and a line the bytes that they may have (weight_nbytes).

It uses no charting library: those that fit into one file take megabytes and draw neither lanes nor waits between them.
Colors are CSS classes, which the page defines for light and dark (`STYLE`).
"""

from __future__ import annotations

import base64
import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from zc.engine.ledger import ClockedStep, Span
from zc.errors import megabytes, some
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
    from zc.report.explain import Summary


WIDTH, LANE, BOX, LEFT, MEMORY, BAND = 1160, 34, 22, 90, 70, 48  # pixels

LEAST_WIDTH = 0.5  # pixels of a wait that is drawn
LEAST_NBYTES = 2**20  # memory is drawn only if the step adds at least as many bytes

COLORS = {  # class: what it is, light, dark
    "loop": ("the caller's loop", "#e4e4e0", "#3b3b38"),
    "compute": ("compiled segments of the backward", "#9ecae1", "#2b6a94"),
    "write": ("gradients are copied into a bucket", "#fdc38d", "#a65d1b"),
    "reduction": ("a bucket is sent and summed", "#a1d99b", "#3c7f3a"),
    "weights": ("weights are gathered", "#c9b8e8", "#654a9c"),
    "offload": ("copies and updates in host memory", "#f4b6c2", "#97435a"),
    "wait": ("there it waits for other ranks", "#cfcfca", "#5c5c58"),
}


def _variables(shade: int) -> str:
    return " ".join(f"--{name}: {colors[shade]};" for name, colors in COLORS.items())


STYLE = f"""
:root {{ color-scheme: light dark; --ink: #222; --dim: #666; --paper: #fff; --rule: #ddd; --hot: #c0141a;
  {_variables(1)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e6e3; --dim: #a3a39e; --paper: #1b1b1a; --rule: #3a3a38;
  --hot: #ff7a70; {_variables(2)} }} }}
svg.timeline {{ font: 11px system-ui, sans-serif; background: var(--paper); }}
svg.timeline text {{ fill: var(--ink); }} svg.timeline text.dim {{ fill: var(--dim); }}
svg.timeline line.rule {{ stroke: var(--rule); }} svg.timeline line.wait {{ stroke: var(--dim); }}
svg.timeline line.delayed {{ stroke: var(--hot); }} svg.timeline rect {{ stroke: var(--dim); stroke-width: .5; }}
svg.timeline path.memory {{ fill: var(--compute); stroke: var(--dim); }}
svg.timeline path.gathered {{ fill: var(--weights); stroke: var(--dim); stroke-width: .5; }}
svg.timeline line.cap {{ stroke: var(--ink); stroke-dasharray: 5 3; }}
{" ".join(f"svg.timeline .{name} {{ fill: var(--{name}); }}" for name in COLORS)}
"""


def draw(timeline: Timeline) -> str:
    """The SVG element."""
    rows = {lane: k for k, lane in enumerate(lanes(timeline))}
    scale = (WIDTH - LEFT - 10) / max(timeline.stop, 1e-9)
    height = LANE * len(rows) + 24
    parts = []
    for lane, k in rows.items():
        parts.append(f'<text x="4" y="{k * LANE + LANE / 2 + 4:.0f}">{html.escape(lane)}</text>')
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{(k + 1) * LANE}" y2="{(k + 1) * LANE}"/>')
    parts += [_arrow(arrow, rows, scale) for arrow in timeline.arrows]
    parts += [_box(box, rows, scale) for box in timeline.boxes]
    parts.append(f'<text class="dim" x="{LEFT}" y="{height - 8}">{caption(timeline)}</text>')
    if timeline.gathered:
        parts.append(_band(timeline, scale, height))
        height += BAND + 28
    memory = [nbytes for _, nbytes in timeline.memory]
    if memory and max(memory) - min(memory) >= LEAST_NBYTES:
        parts.append(_memory(timeline, scale, height))
        height += MEMORY + 20
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{caption(timeline)}">' + "\n".join(parts) + "</svg>\n"
    )


def caption(timeline: Timeline) -> str:
    waits = text_of_waits(timeline.waits)
    waited = f"exchanges waited {waits}; " if waits else ""
    return (
        f"{_ms(timeline.stop)} measured; communication that no computation hides: {_ms(timeline.exposed())}; {waited}"
        "red lines: a stream was idle until the event"
    )


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.1f} ms" if microseconds >= 1e3 else f"{microseconds:.0f} µs"


def _box(box: Box, rows: dict[str, int], scale: float) -> str:
    x, width = LEFT + box.start * scale, max((box.stop - box.start) * scale, 1.0)
    y = rows[box.lane] * LANE + (LANE - BOX) / 2
    label = html.escape(box.label)
    said = html.escape(f"{box.detail or box.label}: {_ms(box.stop - box.start)}, from {_ms(box.start)}")
    waits = text_of_waits(box.waits)
    said += f"; of these {waits}" if waits else ""
    text = f'<text x="{x + 3:.1f}" y="{y + 15:.1f}">{label}</text>' if width > 7 * len(box.label) + 6 else ""
    return (
        f'<g tabindex="0" class="box" data-said="{said}"><title>{said}</title><rect class="{color_class(box)}" '
        f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX}"/>{_waits(box, y, scale)}{text}</g>'
    )


def _waits(box: Box, y: float, scale: float) -> str:
    """The parts of a box in which it waited for other ranks: its lower third."""
    top, height = y + 2 * BOX / 3, BOX / 3
    return "".join(
        f'<rect class="wait" x="{LEFT + wait.start * scale:.1f}" y="{top:.1f}" '
        f'width="{(wait.stop - wait.start) * scale:.1f}" height="{height:.1f}"/>'
        for wait in box.waits
        if (wait.stop - wait.start) * scale >= LEAST_WIDTH
    )


def text_of_waits(waits: Iterable[WaitForRank]) -> str:
    """``2.1 ms for other ranks, 1.9 ms of them for rank 3``, the one that was waited for longest; "" for none."""
    by_rank = defaultdict[int | None, float](float)
    for wait in waits:
        by_rank[wait.rank] += wait.stop - wait.start
    total = sum(by_rank.values())
    if round(total) == 0:
        return ""
    rank = max(by_rank, key=lambda rank: by_rank[rank])
    whom = "" if rank is None else f", {_ms(by_rank[rank])} of them for rank {rank}"
    return f"{_ms(total)} for other ranks{whom}"


def _arrow(arrow: Arrow, rows: dict[str, int], scale: float) -> str:
    x1, y1 = LEFT + arrow.start * scale, rows[arrow.source] * LANE + LANE / 2
    x2, y2 = LEFT + arrow.stop * scale, rows[arrow.target] * LANE + LANE / 2
    kind = "delayed" if arrow.delayed else "wait"
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">'
        f"<title>{html.escape(arrow.event)}</title></line>"
    )


def _band(timeline: Timeline, scale: float, top: int) -> str:
    """The bytes of gathered weights over the step; the top is what weight_nbytes allows."""
    high, cap = top + 8, timeline.weight_cap
    bottom = high + BAND
    heights = [bottom - nbytes / cap * BAND for _, nbytes in timeline.gathered]
    xs = [LEFT + time * scale for time, _ in timeline.gathered] + [LEFT + timeline.stop * scale]
    steps = " ".join(f"V{y:.1f} H{x:.1f}" for y, x in zip(heights, xs[1:], strict=True))
    most = max(nbytes for _, nbytes in timeline.gathered)
    said = f"gathered weights: at most {megabytes(most)}; the line is weight_nbytes, {megabytes(cap)}"
    return (
        f'<g><title>{said}</title><path class="gathered" d="M{xs[0]:.1f},{bottom} {steps} V{bottom} Z"/></g>'
        f'<line class="cap" x1="{LEFT}" x2="{WIDTH}" y1="{high}" y2="{high}"/>'
        f'<text x="4" y="{high + 14}">gathered</text><text class="dim" x="4" y="{high + 28}">{megabytes(most)}</text>'
        f'<text class="dim" x="{LEFT}" y="{bottom + 14}">{said}</text>'
    )


def _memory(timeline: Timeline, scale: float, top: int) -> str:
    """The process's memory over the step, above its minimum."""
    least, most = (f(n for _, n in timeline.memory) for f in (min, max))
    bottom = top + MEMORY
    points = [(LEFT + t * scale, bottom - (n - least) / (most - least) * (MEMORY - 8)) for t, n in timeline.memory]
    line = " ".join(f"L{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<path class="memory" d="M{points[0][0]:.1f},{bottom} {line} L{points[-1][0]:.1f},{bottom} Z"/>'
        f'<text x="4" y="{top + 14}">memory</text>'
        f'<text class="dim" x="4" y="{top + 28}">+{(most - least) / 1e6:,.1f} MB</text>'
        f'<text class="dim" x="{LEFT}" y="{bottom + 14}">from {least / 1e6:,.1f} to {most / 1e6:,.1f} MB of this '
        "process: resident, on a GPU allocated</text>"
    )


def legend(timeline: Timeline) -> str:
    """What the colors mean that the timeline has."""
    used = {color_class(box) for box in timeline.boxes} | ({"wait"} if timeline.waits else set())
    entries = (f'<span class="key {name}"></span>{COLORS[name][0]}' for name in COLORS if name in used)
    return f'<p class="legend">{" ".join(f"<span>{entry}</span>" for entry in entries)}</p>'


_PAGE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1240px; padding: 1.2em; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4em; margin: 0; } h2 { font-size: 1.1em; margin: 2em 0 .5em; } p { margin: .4em 0; }
.lead { font-size: 1.05em; } .dim { color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: .8em; margin: 1.2em 0; }
.card { border: 1px solid var(--rule); border-left: 5px solid var(--reduction); border-radius: 6px; padding: .6em; }
.card.look { border-left-color: var(--hot); } .card b { display: block; font-size: 1.5em; }
.chart { overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; }
.chart svg { display: block; width: 100%; min-width: 900px; height: auto; }
.box:focus { outline: none; } .box:focus rect, .box:hover rect { stroke: var(--ink); stroke-width: 2; }
.said { min-height: 3em; margin: .4em 0; } .legend > span { margin-right: 1.2em; white-space: nowrap; }
.key { display: inline-block; width: 14px; height: 12px; margin-right: .4em; border: 1px solid var(--dim); }
""" + " ".join(f".key.{name} {{ background: var(--{name}); }}" for name in COLORS) + """
.bar { display: inline-block; height: 12px; vertical-align: middle; border: 1px solid var(--dim); margin-right: 8px;
  max-width: 25vw; }
.bar.compiled { background: var(--reduction); } .bar.hooks { background: var(--write); }
details { border-top: 1px solid var(--rule); padding: .35em 0; } summary { cursor: pointer; }
pre { overflow-x: auto; font-size: 12px; border: 1px solid var(--rule); border-radius: 6px; padding: .7em 1em; }
.buckets summary { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
@media print { .zoom, .said { display: none; } details > * { display: block; } .card, .chart { break-inside: avoid; } }
"""  # fmt: skip

_SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const said = chart.nextElementSibling, svg = chart.querySelector('svg');
  const boxes = [...chart.querySelectorAll('.box')];
  const zoom = chart.previousElementSibling && chart.previousElementSibling.querySelector('input');
  boxes.forEach((box, k) => {
    box.setAttribute('tabindex', k ? -1 : 0);
    for (const what of ['focus', 'mouseenter']) box.addEventListener(what, () => said.textContent = box.dataset.said);
    box.addEventListener('keydown', event => {
      const step = {ArrowRight: 1, ArrowLeft: -1, Home: -k, End: boxes.length - 1 - k}[event.key];
      if (step === undefined || !boxes[k + step]) return;
      event.preventDefault(); boxes[k + step].focus();
      boxes[k + step].scrollIntoView({block: 'nearest', inline: 'nearest'});
    });
  });
  if (zoom) zoom.addEventListener('input', () => svg.style.width = zoom.value + '%');
}
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(item => item.open = true));
"""


@dataclass(frozen=True)
class BucketBar:
    """``state``: how the last step filled the bucket: "compiled", "hooks" or "empty"."""

    index: int
    nbytes: int
    state: str
    said: str
    params: Sequence[str]


def page(
    *,
    title: str,
    summary: Summary,
    step: Timeline | None,
    buckets: Sequence[BucketBar],
    notes: Sequence[str],
    sections: Mapping[str, str],
) -> str:
    """The whole page. ``step``: the clocked step, if there is one."""
    # without an icon of its own a browser asks the server for one
    icon = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
    title = html.escape(title)
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        f'<style>{STYLE}{_PAGE}</style><link rel="icon" href="data:image/svg+xml;base64,{icon}">'
    )
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    body = [
        f'<h1>{title}</h1>\n<p class="lead">{html.escape(str(summary))}</p>',
        _cards(summary, step),
        f'<h2>Notes</h2>\n<ul class="notes">{items}</ul>' if notes else "",
        _step(step),
        _buckets(buckets),
        "<h2>The full report as text</h2>",
        *(_section(name, text) for name, text in sections.items()),
        f"<script>{_SCRIPT}</script>",
    ]
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{chr(10).join(body)}\n</body></html>\n'


def _card(label: str, value: str, said: str, look: bool = False) -> str:
    return f'<div class="card{" look" * look}">{label}<b>{value}</b><span class="dim">{said}</span></div>'


def _cards(summary: Summary, step: Timeline | None) -> str:
    share = summary.nbytes / summary.ddp_nbytes if summary.ddp_nbytes else 0.0
    of_ddp = f"{share:.2f} of the {megabytes(summary.ddp_nbytes)} that DDP takes in fp32"
    cards = [_card("memory of this rank", megabytes(summary.nbytes), of_ddp, look=share > 1)]
    if step is not None and step.memory:
        least, most = (f(n for _, n in step.memory) for f in (min, max))
        added = f"+{megabytes(most - least)}" if most - least >= LEAST_NBYTES else "below 1 MB"
        cards.append(_card("peak of the step", added, f"to {megabytes(most)} of this process"))
    if step is not None:
        exposed = step.exposed() / step.stop if step.stop else 0.0
        said = f"of the step below, {step.stop / 1e3:,.1f} ms, is communication that no computation hides"
        cards.append(_card("exposed communication", f"{exposed:.0%}", said))
    proved = summary.num_schedules - summary.num_unproved
    said = "schedules are proved free of races" if not summary.num_unproved else "the others run without their proof"
    cards.append(_card("proof", f"{proved} of {summary.num_schedules}", said, look=summary.num_unproved > 0))
    fallbacks = summary.fallbacks
    said = ", ".join(fallbacks) or "no graph breaks, unproved schedules or notes"
    cards.append(_card("to look at", str(len(fallbacks) or "nothing"), said, look=bool(fallbacks)))
    return f'<div class="cards">{"".join(cards)}</div>'


def _step(step: Timeline | None) -> str:
    if step is None:
        return (
            "<h2>The step</h2>\n<p>No step was clocked yet: zc clocks the third one after the last compilation.</p>"
        )
    return f"<h2>The step as it ran</h2>\n{legend(step)}{_chart(step)}"


def _chart(timeline: Timeline) -> str:
    zoom = '<p class="zoom"><label>zoom <input type="range" min="100" max="2000" step="50" value="100"></label></p>'
    hint = "Point at a box, or focus the picture and use the arrow keys, to see what it is."
    return f'{zoom}<div class="chart">{draw(timeline)}</div><p class="said dim" aria-live="polite">{hint}</p>'


def _buckets(buckets: Sequence[BucketBar]) -> str:
    largest = max((bar.nbytes for bar in buckets), default=1)
    rows = []
    for bar in buckets:
        width = max(2, round(300 * bar.nbytes / largest))
        params = html.escape("\n".join(bar.params))
        rows.append(
            f'<details><summary><span class="bar {bar.state}" style="width:{width}px"></span>bucket {bar.index}, '
            f"{megabytes(bar.nbytes)}: {html.escape(bar.said)}</summary><pre>{params}</pre></details>"
        )
    keys = (("compiled", "filled by a compiled backward"), ("hooks", "filled through hooks"), ("empty", "empty"))
    colors = " ".join(
        f'<span><span class="bar {state}" style="width:14px"></span>{what}</span>' for state, what in keys
    )
    said = f'<p class="legend">In the last step: {colors}</p>'
    title = "<h2>Buckets: parameters whose gradients travel together</h2>"
    return f'{title}\n{said}<div class="buckets">{"".join(rows)}</div>'


def _section(name: str, text: str) -> str:
    return f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"


# --- the timeline of a clocked step (`zc.engine.ledger`): a lane per stream, a box per operation, an arrow per wait ---

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
            said = detail(node, program)
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


def detail(node: fx.Node, program: Program) -> str:
    """The text for a box under the pointer."""
    op, plan, words = op_of(node), program.plan, f"{program.name}, {stream_of(node)}: {kind_of(node)}"
    if isinstance(op, Segment):
        names = gradients_of(node, plan)
        grads = f"; computes the gradients of {some(names, 3)}" if names else ""
        return f"{words} {op.key}{grads}"
    if isinstance(op, BucketOp):
        bucket = plan.bucket(op.bucket)
        nbytes = bucket.numel * bucket.grad_dtype.itemsize
        return f"{words}, bucket {op.bucket} ({nbytes / 1e6:,.1f} MB): {some([s.name for s in bucket.slots], 3)}"
    return words
