"""Exactly once: what schedules of real models owe arrives, under several plans. test_certificate.py has the other side,
edits that lose a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import adversary
import compiled
import pytest
import simulation
import torch
import torch.distributed as dist
from schedules import make, part_of, placed, schedule
from simulation import Case, Plain, plan_of
from tiers import FULL
from torch import fx

from zc.engine import deposits
from zc.engine.weights import gather_graph
from zc.passes.base import Debt, copy_graph, run_passes
from zc.passes.pipeline import pipeline
from zc.passes.verify import examine, verify
from zc.planning.plan import Plan
from zc.planning.wire import Wire
from zc.schedule.buffer import MAIN
from zc.schedule.nodes import change, op_of, put, steps
from zc.schedule.spec import AccumulateCast, Deposit, FlattenCast, Write

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


@pytest.mark.parametrize("overlap_gather", [False, True])
def test_an_exact_gather_is_of_another_plan_than_an_encoded_one(overlap_gather: bool) -> None:
    """Two levels: weights are read inside a host after their difference is added, but as they are after a load."""
    plan = make(3, world_size=4, reads=True, num_hosts=2, in_8_bits=True, overlap_gather=overlap_gather)
    assert (plan.reduce_encoding, plan.gather_encoding) == (Wire(8), Wire(4)) and plan.topology.has_levels
    of_load = plan.exact_gathers()
    exact = placed(of_load, gather_graph(of_load, range(3)))
    assert not examine(exact, of_load) and examine(exact, plan).faults


def edited(graph: fx.Graph, *edits: Callable[[Write], Write], without: tuple[int, int] | None = None) -> fx.Graph:
    """The k-th write as the k-th edit has it, and one gradient less in the debt."""
    new = copy_graph(graph)
    for node, edit in zip([n for n in steps(new) if isinstance(op_of(n), Write)], edits, strict=False):
        change(node, edit(op_of(node)))
    debt: Debt = new.output_node().meta["debt"]
    new.output_node().meta["debt"] = replace(debt, gradients=debt.gradients - {without})
    return new


def broken() -> Iterator[tuple[str, fx.Graph, Plan]]:
    """The one rule that a schedule breaks, as it says so."""
    plan, by_memory, offloaded = make(1), make(1, reads=True), make(1, offload="device")
    intact = schedule("mlp", plan)
    yield "reduce can't be hop 0, which goes by messages", schedule("mlp", by_memory), plan
    cut = edited(intact, lambda op: replace(op, spans=((0, 1), (1, 64))))
    yield "flatten_cast writes [0, 1), [1, 64) of bucket 0; slot 0 is [0, 2)", cut, plan
    wide = edited(
        schedule("heads", plan, in_place=True),
        lambda op: replace(op, spans=((3, 32), *op.spans[1:])), lambda op: replace(op, stop=3),
    )  # fmt: skip
    yield "wgrad_into writes [0, 3) of bucket 0; slot 0 is [0, 2)", wide, plan
    more = edited(intact, lambda op: replace(op, slots=(0, 2)))
    del more.output_node().meta["debt"]
    yield "flatten_cast brings slot 2 of bucket 0, which has 2", more, plan
    part = edited(part_of(make(2), (0,), (1,)), without=(1, 0))
    yield "deposit writes bucket 1, slot 0: the graph has no such gradient", part, make(2)
    half = edited(intact, lambda op: replace(op, slots=(0,), grads=op.grads[:1]), without=(0, 1))
    yield "bucket 0 is reduced, and not owed whole", half, plan
    of_boundary, within = schedule("mlp", offloaded), schedule("mlp", offloaded.microbatch())
    yield "bucket 0 is copied to host memory, and not owed whole", of_boundary, offloaded.microbatch()
    yield "bucket 0 is owed whole, and never copied to host memory", within, offloaded


def test_a_rule_that_alone_is_broken_refuses() -> None:
    """What record_mutants breaks by one edit breaks another rule as well."""
    for fault, graph, plan in broken():
        findings = examine(graph, plan)
        assert findings.faults == (fault,) and not findings.races


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
