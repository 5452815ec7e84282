"""`verify` against an oracle that knows nothing of its clocks: all orders tried."""

from __future__ import annotations

import mutants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import Enumeration
from random_schedules import offloaded_schedules, schedules
from schedules import make, schedule
from tiers import FULL
from torch import fx

from zc.passes import insert_events
from zc.passes.base import copy_graph
from zc.passes.pipeline import examine
from zc.planning.plan import Plan
from zc.schedule.nodes import op_of, steps, text
from zc.schedule.spec import RecordEvent, Sync, WaitEvent

relaxed = settings(
    max_examples=20_000 if FULL else 600, deadline=None, derandomize=not FULL,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@relaxed
@given(st.one_of(schedules(), offloaded_schedules()))
def test_verify_agrees_with_all_orders_tried(schedule: tuple[fx.Graph, Plan]) -> None:
    """A race where and only where some legal order has one, and a wait is redundant where and only where no order
    has one without it."""
    graph, plan = schedule
    faults = examine(graph, plan)
    unknown = any("no node before records" in fault for fault in faults.faults)
    assert bool(faults.races) == Enumeration(graph, plan).finds_a_race(), f"{faults}\n{text(graph)}"
    if faults.races or unknown:
        return
    redundant = 0
    for node in [n for n in steps(graph) if isinstance(op_of(n), WaitEvent)]:
        new = copy_graph(graph)
        where = dict(zip(graph.nodes, new.nodes, strict=True))
        new.erase_node(where[node])
        redundant += not Enumeration(new, plan).finds_a_race()
    assert redundant == len(faults.redundant), f"{faults.redundant}\n{text(graph)}"


@relaxed
@given(st.one_of(schedules(), offloaded_schedules()))
def test_inserted_events_are_needed_and_enough(schedule: tuple[fx.Graph, Plan]) -> None:
    """Whatever the streams and the operations are."""
    graph, plan = schedule
    bare = copy_graph(graph)
    where = dict(zip(graph.nodes, bare.nodes, strict=True))
    for node in list(steps(graph)):
        if isinstance(op_of(node), Sync):
            bare.erase_node(where[node])
    placed = insert_events.run(bare, plan)
    faults = examine(placed, plan)
    assert not faults.races and not faults.redundant, f"{faults}\n{text(placed)}"
    assert not Enumeration(placed, plan).finds_a_race()


def test_the_oracle_can_fail() -> None:
    """It finds the race that a deleted wait makes; one that never does would agree with anything correct."""
    plan = make(2)
    graph = schedule("mlp", plan)
    assert not Enumeration(graph, plan).finds_a_race()
    _, _, broken = next(mutants.of(graph))
    assert Enumeration(broken, plan).finds_a_race()


def test_an_event_that_nobody_records_is_named() -> None:
    plan = make(1)
    graph = schedule("mlp", plan)
    record = next(n for n in steps(graph) if isinstance(op_of(n), RecordEvent))
    new = copy_graph(graph)
    where = dict(zip(graph.nodes, new.nodes, strict=True))
    new.erase_node(where[record])
    assert any(f"waits for {record.args[0]}" in fault for fault in examine(new, plan).faults)

