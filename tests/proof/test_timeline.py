"""The picture tells the story: where deepspeed#8364 stalls, and where it doesn't."""

from __future__ import annotations

import pytest
from schedules import make, schedule
from test_reports import reverse_wait
from torch import fx

from zc.report.timeline import simulate
from zc.schedule.nodes import op_of, ops
from zc.schedule.spec import FlattenCast, Op, Segment, Take


def fixed(graph: fx.Graph, exchange: float) -> dict[str, float]:
    """Compute 100 µs a segment, exchanges as given, the rest nothing."""
    took: dict[type[Op] | None, float] = {Segment: 100.0, Take: exchange}
    return {n.name: took.get(type(op), 0.0) for n, op in ops(graph)}


def test_the_stall_of_ds8364_and_its_absence() -> None:
    plan = make(3, ring=3)
    graph = schedule("mlp", plan)
    good = simulate(graph, plan, fixed(graph, 90.0))
    assert good.stop == pytest.approx(390.0) and good.exposed() == pytest.approx(90.0), "only the last is exposed"
    stalled = reverse_wait(graph)
    bad = simulate(stalled, plan, fixed(stalled, 90.0))
    # the second segment does not wait, the write of bucket 1 does not stand still either: it comes 10 µs later anyway
    assert bad.stop == pytest.approx(390.0)
    slow = simulate(stalled, plan, fixed(stalled, 150.0))
    write = [b for b in slow.boxes if isinstance(op_of(b.node), FlattenCast)][1]
    assert write.start == pytest.approx(250.0), "bucket 1 is written when bucket 0 has arrived, not when it is ready"
    free = [b for b in simulate(graph, plan, fixed(graph, 150.0)).boxes if isinstance(op_of(b.node), FlattenCast)][1]
    assert free.start == pytest.approx(200.0)
