"""`zc.explain(model, format="html")`: the report as one self-contained page, without network.

It begins with the main figures. Then come the clocked step, the buckets, and all sections of the text, folded.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zc.errors import megabytes
from zc.report.drawing import COLORS, LEAST_NBYTES, STYLE, draw, legend
from zc.report.summary import Summary
from zc.report.timeline import Timeline

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
    estimates: Mapping[str, Timeline],
) -> str:
    """The whole page. ``step``: the clocked step, if there is one. ``estimates``: of schedules, by the section's
    name."""
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
        *(_section(name, text, estimates.get(name)) for name, text in sections.items()),
        *(_section(name, "", line) for name, line in estimates.items() if name not in sections),
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
            "<h2>The step</h2>\n<p>No step was clocked yet: zc clocks the third one after the last compilation. "
            "The schedules below have pictures whose times are estimates.</p>"
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


def _section(name: str, text: str, estimate: Timeline | None) -> str:
    picture = legend(estimate) + _chart(estimate) if estimate is not None else ""
    body = f"<pre>{html.escape(text)}</pre>" if text else ""
    return f"<details><summary>{html.escape(name)}</summary>{picture}{body}</details>"
