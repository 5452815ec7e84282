"""Exactly once, from both sides: what a schedule owes arrives, and no edit that loses a gradient is accepted. Schedules
by hand, and those of real models under several plans."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import adversary
import compiled
import gradient_mutants
import mutants
import pytest
import simulation
import torch
import torch.distributed as dist
from schedules import by_messages, cases, make, offloaded, placed, schedule
from simulation import Case, Plain, is_wrong, plan_of, replaced
from tiers import FULL

from zc.engine import deposits
from zc.engine.weights import gather_graph
from zc.passes.base import Debt, copy_graph, run_passes
from zc.passes.pipeline import pipeline
from zc.passes.verify import examine, verify
from zc.planning.plan import Into
from zc.planning.wire import Wire
from zc.schedule.buffer import MAIN
from zc.schedule.nodes import change, op_of, put, steps
from zc.schedule.spec import AccumulateCast, Deposit, FlattenCast

NUM_ORDERS = 200 if FULL else 3


@pytest.fixture(scope="module", autouse=True)
def _alone_in_a_group() -> Iterator[None]:
    """For the model with a collective of its own, captured and run here."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@functools.cache
def of_models() -> tuple[Case, ...]:
    return tuple(compiled.cases())


def by_hand() -> list[Case]:
    every = [*cases(), *offloaded()]
    return every if FULL else [c for k, c in enumerate(every) if k % 4 == 0 and len(c.plan.buckets) < 64]


@pytest.mark.parametrize("name", list(compiled.MODELS))
def test_models_give_what_their_names_say(name: str) -> None:
    """What the other tests rely on is there: else they would show less than they say."""
    captured = compiled.capture(name)
    assert captured.num_owed + len(captured.hooks) >= len(captured.expected) > 0, "each is owed, or came by a hook"
    assert len(captured.graphs) > 1 or name not in ("graph break", "eager part")
    assert bool(captured.hooks) == (name == "eager part")
    nodes = [n for graph, _ in captured.graphs for n in graph.nodes]
    if name == "dynamic":
        assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in nodes if n.op == "placeholder")
    if name == "donated":
        assert any(n.meta.get("donated") for n in nodes)
    if name == "collective":
        assert any("_c10d_functional" in str(n.target) for n in nodes)
    if name == "views":
        outputs = [n for graph, _ in captured.graphs for n in graph.output_node().all_input_nodes]
        storages = [n.meta.get("storage") for n in outputs]
        assert len(set(storages)) < len(storages), "two outputs share their storage"


def test_schedules_of_models_leave_autograd_s_gradients() -> None:
    """Each accumulator holds exactly what a plain copy of the model has in param.grad, padding 0."""
    for case in of_models():
        name = next(n for n in sorted(compiled.MODELS, key=len, reverse=True) if case.name.startswith(n))
        expected = compiled.capture(name).expected
        result = simulation.run(case, adversary.in_order, contract=False, kind=Plain)
        for bucket in case.plan.buckets:
            buffer = "acc" if case.plan.offload is None else "host"
            flat = result[f"{buffer}[{bucket.index}]"].clone()
            for slot in bucket.slots:
                wanted = expected[slot.name].double().reshape(-1)
                assert torch.allclose(flat[slot.offset : slot.stop], wanted, rtol=1e-4, atol=1e-6), (case.name, slot)
                flat[slot.offset : slot.stop] = 0
            assert not flat.any(), (case.name, bucket.index)


def test_schedules_of_models_are_proved_and_have_one_result_under_all_orders() -> None:
    for case in of_models():
        for graph in case.graphs:
            assert isinstance(graph.output_node().meta["debt"], Debt)
            verify(graph, plan_of(graph))
        reference = simulation.run(case, adversary.in_order)
        assert simulation.same(reference, reference), f"{case.name}: the program order itself gives NaN"
        worst = list(adversary.worst(simulation.lanes(case)))[:: 1 if FULL else 4]
        for choose in (*worst, *(adversary.seeded(seed) for seed in range(NUM_ORDERS))):
            assert simulation.same(reference, simulation.run(case, choose)), case.name


def test_no_schedule_of_a_model_can_lose_a_wait() -> None:
    total = 0
    for case in of_models():
        for graph in case.graphs:
            for _, name, mutant in mutants.of(graph, 1 if FULL else 7):
                faults = examine(mutant, plan_of(graph))
                total += 1
                assert faults.races or faults.faults, f"{case.name}: {name} is accepted"
    print(f"\nof models, broken orders rejected by verify: all of {total}")
    assert total > 50


@pytest.mark.parametrize("source", ["by hand", "of models"])
def test_no_gradient_can_be_lost(source: str) -> None:
    """Every edit is rejected by verify, as a fault and not by the luck of a race; and the values show that each of them
    is wrong, or runs into an error, under some order."""
    total = collections.Counter[str]()
    ran = 0
    for number, case in enumerate(by_hand() if source == "by hand" else of_models()):
        reference = simulation.run(case, adversary.in_order)
        orders = [*adversary.worst(simulation.lanes(case)), *(adversary.seeded(seed) for seed in range(10))]
        for graph in dict.fromkeys(case.graphs):
            assert not examine(graph, plan_of(graph)), case.name
            every = 1 if FULL and len(case.plan.buckets) < 64 else 5
            for kind, name, mutant in gradient_mutants.of(graph, every, first=number):
                if kind == "difference lost" and case.plan.world_size == 1:
                    continue  # one rank's gather loses nothing where it is left out: a wait is too many
                total[kind] += 1
                assert examine(mutant, plan_of(graph)).faults, f"{case.name}: {kind}: {name} is accepted"
                if FULL or total.total() % 5 == 0:
                    ran += 1
                    broken = replaced(case, graph, mutant)
                    assert is_wrong(broken, reference, orders), f"{case.name}: {kind}: {name} is right in every order"
    print(f"\n{source}, rejected, all of {total}; wrong in value or under some order: all of {ran}")
    assert ran > 20
    only_by_hand = {"hop lost", "difference lost"}
    assert set(total) >= gradient_mutants.KINDS.keys() - {"landing changed", "deposit deleted"} - only_by_hand
    assert set(total) >= only_by_hand or source == "of models"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap_gather", [False, True])
def test_between_hosts_nothing_encoded_can_be_lost(stage: int, overlap_gather: bool) -> None:
    """Two levels: what a host has summed is encoded, and weights are read inside a host after their difference is
    added."""
    plan = make(3, stage=stage, world_size=4, reads=True, num_hosts=2, in_8_bits=True, overlap_gather=overlap_gather)
    assert (plan.reduce_encoding, plan.gather_encoding) == (Wire(8), Wire(4)) and plan.topology.has_levels
    total = 0
    for graph in (schedule("mlp", plan), placed(plan, gather_graph(plan, range(3)))):
        assert not examine(graph, plan), examine(graph, plan)
        for kind in ("taken wrongly", "difference lost"):
            for name, edit in gradient_mutants.KINDS[kind](graph):
                total += 1
                assert examine(mutants.edited(graph, edit), plan).faults, name
    assert total == 3 * 2 + 3 * (2 if overlap_gather else 3)
    of_load = plan.exact_gathers()
    exact = placed(of_load, gather_graph(of_load, range(3)))
    assert not examine(exact, of_load) and examine(exact, plan).faults, "an exact gather is of another plan"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_replicas": 2}, {"in_8_bits": True}, {"overlap_gather": True}], ids=str)
def test_of_two_levels_by_messages_nothing_can_be_lost(stage: int, options: dict[str, Any]) -> None:
    """Neither level, in no bucket: the sum of a host is not the mean, and a rank's own gradient no sum of a host."""
    plan = by_messages(2, stage=stage, **options)
    assert plan.hops[0].into is Into.SENT
    total = collections.Counter[str]()
    for graph in (schedule("mlp", plan), placed(plan, gather_graph(plan, range(2)))):
        assert not examine(graph, plan), examine(graph, plan)
        for kind, name, mutant in gradient_mutants.of(graph):
            if kind in ("hop lost", "hop changed", "accumulate deleted", "reduction bypassed"):
                total[kind] += 1
                assert examine(mutant, plan).faults, f"{kind}: {name}"
    hops = 3 if "num_replicas" in options else 2
    assert total["hop changed"] == 2 * 2 * (2 * hops - 1), "both nodes of each hop of both buckets; none is hop -1"
    assert total["hop lost"] == 2 * 2 * (hops - 1)
    assert total["accumulate deleted"] == 2 * hops


def test_without_a_debt_only_what_is_there_is_shown() -> None:
    """The public call on a schedule by hand: a slot that nobody writes is no fault, one written twice is."""
    plan = make(2)
    graph = copy_graph(schedule("mlp", plan))
    write = next(n for n in steps(graph) if isinstance(op_of(n), FlattenCast))
    op = op_of(write)
    change(write, replace(op, slots=op.slots[:1], grads=op.grads[:1]))
    assert "slot 1) is owed, and nobody writes it" in examine(graph, plan).faults[0]
    del graph.output_node().meta["debt"]
    assert not examine(graph, plan).faults
    change(write, replace(op, slots=(0, 0), grads=op.grads[:1] * 2))
    assert any("slot 0 is written by" in fault for fault in examine(graph, plan).faults)


def test_a_flush_owes_all_that_was_deposited() -> None:
    """A deposit's debt is not paid by another deposit."""
    plan = make(1, stage=1).microbatch()
    passes = [p._replace(requires=frozenset()) for p in pipeline(in_place=True) if p.name != "outline_segments"]
    graph, _ = run_passes(deposits.GRAPHS["flush"](plan, 0), plan, passes)
    assert graph.output_node().meta["debt"] == Debt(frozenset({(0, 0), (0, 1)}))
    (write,) = [n for n in steps(graph) if isinstance(op_of(n), AccumulateCast)]
    with graph.inserting_before(write):
        for slot, grad in zip(op_of(write).slots, op_of(write).grads, strict=True):
            put(graph, Deposit(0, slot, grad), stream=MAIN)
    graph.erase_node(write)
    assert any("leaves slot 0 to a flush; all of bucket 0 is owed here" in f for f in examine(graph, plan).faults)
