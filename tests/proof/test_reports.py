"""The public failures that the proof was made for, rebuilt: verify names them, an order shows the damage."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import adversary
import pytest
import simulation
from schedules import make, schedule
from simulation import Case
from torch import fx

from zc.errors import RaceError
from zc.passes.base import copy_graph
from zc.passes.pipeline import examine, verify
from zc.schedule.buffer import COMM, MAIN
from zc.schedule.nodes import op_of, put, steps
from zc.schedule.spec import FlattenCast, RecordEvent, Segment, Take, WaitEvent


def reverse_wait(graph: fx.Graph) -> fx.Graph:
    """What the fix of deepspeed#8061 added: the compute of bucket 1 waits for the collective of bucket 0."""
    new = copy_graph(graph)
    done = next(n for n in steps(new) if isinstance(op_of(n), Take))
    with new.inserting_after(done):
        put(new, RecordEvent("stall"), stream=COMM)
    write = [n for n in steps(new) if isinstance(op_of(n), FlattenCast)][1]
    with new.inserting_before(write):
        put(new, WaitEvent("stall"), stream=MAIN)
    return new


def test_ds8364_a_wait_that_nothing_needs() -> None:
    """deepspeed#8364: compute of bucket N+1 stalled behind the collective of bucket N, though it writes another
    buffer."""
    plan = make(2, ring=2)
    graph = schedule("mlp", plan)
    stalled = reverse_wait(graph)
    faults = examine(stalled, plan)
    assert not faults.races and faults.redundant
    with pytest.raises(RaceError, match=r"redundant wait: compute waits for stall"):
        verify(stalled, plan)
    reference = simulation.run(Case("zc", plan, (graph,)), adversary.in_order)
    assert simulation.same(reference, simulation.run(Case("deepspeed#8364", plan, (stalled,)), adversary.last(COMM)))


def test_ds8364_with_one_buffer_the_same_wait_is_needed() -> None:
    """The case left alone: bucket 1 goes through the buffer that bucket 0 is still being sent from."""
    plan = make(2, ring=1)
    graph = schedule("mlp", plan)
    verify(graph, plan)
    first = next(n for n in steps(graph) if isinstance(op_of(n), Take))
    assert isinstance(op_of(first.next), RecordEvent), "recorded right after the exchange, before the accumulation"


def test_a_microbatch_waits_for_the_boundary_before_it() -> None:
    """Stage 1, a backward in no_sync after one that reduced: the accumulator may still be in use on comm."""
    plan = make(2, stage=1)
    inside = schedule("mlp", replace(plan, is_boundary=False))
    waits = [n.args[0] for n in steps(inside) if isinstance(op_of(n), WaitEvent)]
    assert waits == ["done/acc[0]", "done/acc[1]"]


def test_a_value_stays_on_its_stream() -> None:
    """deepspeed#8061 has several compute streams. An event orders this use; nothing keeps the value there for it."""
    graph = fx.Graph()
    made = put(graph, Segment("segment_0", (graph.placeholder("x"),)), stream=MAIN)
    value = graph.call_function(operator.getitem, (made, 0))
    put(graph, RecordEvent("e0"), stream=MAIN)
    put(graph, WaitEvent("e0"), stream=COMM)
    put(graph, Segment("segment_1", (value,)), stream=COMM)
    put(graph, RecordEvent("e1"), stream=COMM)
    put(graph, WaitEvent("e1"), stream=MAIN)
    graph.output(())
    faults = examine(graph, make(1))
    assert not faults.races and not faults.redundant
    assert faults.faults == ("%getitem of compute is used by segment (segment_1) on comm",)


def test_near_linear() -> None:
    """Twice the nodes take twice the lines of Python, which other work on the machine does not change."""

    def lines(num_buckets: int) -> tuple[int, int]:
        plan = make(num_buckets, ring=4)
        graph, count = schedule("encdec", plan), itertools.count()

        def in_frame(*_: object) -> Callable[..., Any]:
            next(count)
            return in_frame

        before = sys.gettrace()
        sys.settrace(lambda *_: in_frame)
        try:
            verdict = verify(graph, plan)
        finally:
            sys.settrace(before)
        return next(count), verdict.nodes

    small, num_small = lines(80)
    large, num_large = lines(320)
    assert num_large >= 2500, num_large
    print(f"verify: {num_large} nodes {large:,} lines, {num_small} nodes {small:,} lines")
    assert large < 600 * num_large
    assert large / small < 1.1 * num_large / num_small
