"""One bitwise result under every legal order: many by chance, the worst by hand, and all of them where they are few."""

from __future__ import annotations

import adversary
import pytest
import simulation
from schedules import cases, make, schedule
from simulation import Case
from tiers import FULL

from zc.schedule.nodes import steps


def num_orders(case: Case) -> int:
    if FULL:
        return 1000
    return 6 if len(case.plan.buckets) < 8 else 3 if len(case.plan.buckets) < 64 else 1


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_one_result_under_all_orders(case: Case) -> None:
    reference = simulation.run(case, adversary.in_order)
    assert simulation.same(reference, reference), "the program order itself gives NaN"
    worst = list(adversary.worst(simulation.lanes(case)))
    if len(case.plan.buckets) == 64 and not FULL:
        worst = worst[:9]
    for choose in (*worst, *(adversary.seeded(seed) for seed in range(num_orders(case)))):
        assert simulation.same(reference, simulation.run(case, choose))


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_no_write_waits_for_a_read_that_nothing_records(case: Case) -> None:
    """Where comm.host alone reads a flat_grad, main waits for it at the schedule's end."""
    nodes = [(str(node.target.__name__), str(node.args[0])) for graph in case.graphs for node in steps(graph)]
    waits, records = ({e for kind, e in nodes if kind == name} for name in ("wait_event", "record_event"))
    assert {event for event in waits if event.startswith("done/flat_grad")} <= records


def test_all_orders_of_small_schedules() -> None:
    """Three buckets: some 12 operations of the schedule, every order of them."""
    for shape, stage, ring, at_least in (("mlp", 2, 1, 50), ("heads", 2, 2, 100), ("tied", 1, 1, 100)):
        plan = make(3, slots=1, stage=stage, ring=ring)
        case = Case(shape, plan, (schedule(shape, plan),))
        reference = simulation.run(case, adversary.in_order, contract=False)
        count = 0
        for result in adversary.every_order(lambda choose, c=case: simulation.run(c, choose, contract=False)):
            assert simulation.same(reference, result)
            count += 1
        assert count >= at_least, (shape, stage, ring, count)
        print(shape, stage, ring, count)


def test_all_orders_are_counted_right() -> None:
    """Two streams of two tasks, one of them after the other's first: 3 orders, not 6."""

    def run(choose: adversary.Chooser) -> tuple[str, ...]:
        streams, seen = adversary.AdversarialStreams(choose), []
        streams.run_on("compute", lambda: seen.append("a"))
        streams.record("e", "compute")
        streams.run_on("compute", lambda: seen.append("b"))
        streams.wait("e", "comm")
        streams.run_on("comm", lambda: seen.append("x"))
        streams.run_on("comm", lambda: seen.append("y"))
        streams.synchronize()
        return tuple(seen)

    assert sorted(adversary.every_order(run)) == [("a", "b", "x", "y"), ("a", "x", "b", "y"), ("a", "x", "y", "b")]


def test_values_that_are_not_there_are_nan() -> None:
    values = adversary.Values(x=1)
    assert values.pop("x") == 1 and values.pop("x").isnan() and values["never"].isnan()
