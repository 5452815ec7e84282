"""`zc.explain(model, format="html")`: the report as one page that needs nothing beside it, no script and no network.

Each schedule has its picture, drawn as SVG from `zc.report.timeline.simulate`: one lane a stream, one box a node, an
arrow for each wait that an event satisfies (red where it held somebody up). Times are estimates; the order and the
waits are what was proved.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import Any

from torch import fx

from zc.planning.plan import Plan
from zc.report.timeline import Timeline, color, label, lanes, simulate

WIDTH, LANE, BOX, LEFT = 1160, 34, 22, 90  # pixels

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; margin: 1.6em 0 .4em; }
pre { background: #f6f6f4; padding: .7em 1em; overflow-x: auto; font-size: 12px; }
nav a { margin-right: 1em; } svg { width: 100%; height: auto; background: #fff; border: 1px solid #ddd; }
"""


def page(title: str, sections: Mapping[str, str], graphs: Mapping[str, tuple[fx.Graph, Plan | None]]) -> str:
    """The whole page. A section that has a graph of the same name gets its picture; other graphs get their own."""
    bodies = {name: f"<pre>{html.escape(body)}</pre>" for name, body in sections.items()}
    for name, (graph, plan) in graphs.items():
        bodies[name] = picture(simulate(graph, plan)) + bodies.get(name, "")
    links = " ".join(f'<a href="#s{k}">{html.escape(name)}</a>' for k, name in enumerate(bodies))
    blocks = "\n".join(
        f'<h2 id="s{k}">{html.escape(name)}</h2>\n{body}' for k, (name, body) in enumerate(bodies.items())
    )
    # without an icon of its own a browser asks the server for one
    icon = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
    head = (
        f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">'
    )
    body = f"<h1>{html.escape(title)}</h1>\n<nav>{links}</nav>\n{blocks}"
    return f"<!doctype html>\n<html><head>{head}</head>\n<body>{body}\n</body></html>\n"


def picture(timeline: Timeline) -> str:
    """The schedule as an SVG element."""
    rows = {lane: k for k, lane in enumerate(lanes(timeline))}
    scale = (WIDTH - LEFT - 10) / max(timeline.stop, 1e-9)
    height = LANE * len(rows) + 30
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" font-size="11">']
    for lane, k in rows.items():
        y = k * LANE + LANE / 2 + 4
        parts.append(f'<text x="4" y="{y:.0f}">{html.escape(lane)}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{(k + 1) * LANE}" y2="{(k + 1) * LANE}" stroke="#eee"/>')
    parts += [_box(box, rows, scale) for box in timeline.boxes]
    for source, start, target, stop, event in timeline.arrows:
        delayed = stop <= start  # whoever waited stood still until the event
        x1, y1 = LEFT + start * scale, rows[source] * LANE + LANE / 2
        x2, y2 = LEFT + stop * scale, rows[target] * LANE + LANE / 2
        stroke = "#cb181d" if delayed else "#999"
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}">'
            f"<title>{html.escape(event)}</title></line>"
        )
    caption = f"{timeline.stop:.0f} µs estimated, of communication {timeline.exposed():.0f} µs exposed; red: it held"
    parts.append(f'<text x="{LEFT}" y="{height - 8}" fill="#555">{caption}</text></svg>')
    return "\n".join(parts)


def _box(box: Any, rows: Mapping[str, int], scale: float) -> str:
    x, width = LEFT + box.start * scale, max((box.stop - box.start) * scale, 1.5)
    y = rows[box.lane] * LANE + (LANE - BOX) / 2
    name = html.escape(label(box.node))
    text = f'<text x="{x + 3:.1f}" y="{y + 15:.1f}" font-size="9">{name}</text>' if width > 7 * len(name) else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX}" fill="{color(box.node)}" stroke="#555" '
        f'stroke-width=".5"><title>{name} ({box.node.name}): {box.start:.1f} to {box.stop:.1f} µs</title></rect>{text}'
    )
