"""Break each schedule in every way: `verify` rejects all of them, and some legal order shows most of them wrong."""

from __future__ import annotations

import collections

import adversary
import mutants
import pytest
import simulation
from schedules import cases, surrounded
from simulation import Case, is_wrong, plan_of, replaced
from tiers import FULL

from zc.passes.verify import examine, verify

pytestmark = pytest.mark.check

ALL = cases()


def sample(case: Case, few: int, some: int, many: int) -> int:
    """Every how manieth mutant is taken by default; ``ZC_TESTS=full`` takes all."""
    num = len(case.plan.buckets)
    return 1 if FULL else few if num < 8 else some if num < 64 else many


def orders(case: Case, num_seeds: int = 10) -> list[adversary.Chooser]:
    return [*adversary.worst(simulation.lanes(case)), *(adversary.seeded(s) for s in range(num_seeds))]


def test_there_are_enough_schedules() -> None:
    assert len(ALL) >= 40 and {len(c.plan.buckets) for c in ALL} >= {1, 8, 64}
    assert {c.plan.num_buffers for c in ALL} == {1, 2, 3, 4} and {c.plan.placement.stage for c in ALL} == {1, 2}


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_intact_schedules_are_proved(case: Case) -> None:
    for graph in case.graphs:
        verdict = verify(graph, plan_of(graph))
        assert verdict.races == 0 and verdict.redundant == 0 and (verdict.waits > 0 or verdict.streams == 1)


def test_verify_rejects_every_mutant() -> None:
    total = collections.Counter[str]()
    for case in ALL:
        for graph in dict.fromkeys(case.graphs):
            for kind, name, mutant in mutants.of(graph, sample(case, 3, 3, 25)):
                faults = examine(mutant, plan_of(graph))
                total[kind] += 1
                assert faults.races or faults.faults, f"{case.name}: {name} is accepted"
    print("\nrejected by verify, all of", total)
    assert set(total) == set(mutants.KINDS) and total.total() > (1500 if FULL else 500)


def test_some_order_shows_what_verify_rejects() -> None:
    """95 % at least, of a sample that leaves out few kinds of place."""
    caught = total = 0
    missed: list[str] = []
    for case in ALL:
        step = sample(case, 9, 30, 300)
        for graph in dict.fromkeys(case.graphs):
            # what a broken wait let by is seen by a schedule that follows: all of a training step, in two orders
            around = [case, surrounded(case, graph)] if case.plan.overlap_gather else [case]
            references = [simulation.run(a, adversary.in_order) for a in around]
            for _, name, mutant in mutants.of(graph, step):
                total += 1
                pairs = zip(around, references, strict=True)
                if any(is_wrong(replaced(a, graph, mutant), reference, orders(a)) for a, reference in pairs):
                    caught += 1
                else:
                    missed.append(f"{case.name}: {name}")
    print(f"\nwrong under some order: {caught}/{total}", *missed)
    assert total > (400 if FULL else 130) and caught >= 0.95 * total
