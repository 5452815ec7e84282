"""The proof over offload: copies, staging buffers and updates in host memory, intact and broken in every way."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from dataclasses import replace

import adversary
import mutants
import pytest
import simulation
from oracles import Enumeration
from schedules import make, offloaded, part_of, schedule, step_of, surrounded
from simulation import Case, is_wrong, plan_of, replaced
from tiers import FULL, full_cases
from torch import fx

from zc.passes.base import copy_graph
from zc.passes.verify import examine, verify
from zc.schedule.buffer import HOST, MAIN, Buffer
from zc.schedule.nodes import accesses, change, op_of, ops, put, steps, stream_of
from zc.schedule.spec import (
    CopyToDevice,
    CopyToHost,
    Finish,
    Op,
    Publish,
    Spread,
    StageShard,
    Update,
    WaitEvent,
    renamed,
)

EVERY = list(offloaded())
ALL = EVERY if FULL else EVERY[::3]
IN_STAGE_3 = [case for case in EVERY if case.plan.placement.shards_weights]
SAMPLE = 1 if FULL else 6  # one mutant of so many is looked at
NUM_ORDERS = 200 if FULL else 2


def orders(case: Case) -> Iterator[adversary.Chooser]:
    yield from adversary.worst(simulation.lanes(case))
    for buffer in simulation._carried(case):  # one past later than all others
        yield adversary._first_and_last(HOST, f"past.{buffer}")
    yield from (adversary.seeded(seed) for seed in range(NUM_ORDERS))


@pytest.mark.parametrize("mode", ["cpu", "device"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@full_cases("2-cpu", "2-device")
def test_every_intact_schedule_is_accepted(mode: str, stage: int) -> None:
    """Whole graphs and graphs with a part of a bucket, inside and outside of no_sync, however many slots and ranks."""
    for world_size, ring, slots, in_place in itertools.product((1, 2), (1, 2), (1, 2), (False, True)):
        plan = make(3, stage=stage, ring=ring, world_size=world_size, offload=mode, slots=slots)
        for each in (plan, plan.microbatch()):
            graphs = [schedule("tied", each, in_place=in_place), part_of(each, (0, 1), (2,))]
            for graph in graphs:
                verify(graph, each)  # raises RaceError


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_intact_schedules_are_proved_and_have_one_result(case: Case) -> None:
    for graph in dict.fromkeys(case.graphs):
        verdict = verify(graph, plan_of(graph))
        assert verdict.races == 0 and verdict.redundant == 0
    reference = simulation.run(case, adversary.in_order)
    assert simulation.same(reference, reference), "the program order itself gives NaN"
    for choose in list(orders(case))[:: 1 if FULL else 5]:
        assert simulation.same(reference, simulation.run(case, choose))


def test_verify_rejects_every_mutant_and_an_order_shows_it() -> None:
    """A copy's wait deleted, its record before what it copies, the staging ring shortened: all rejected, and wrong or
    NaN under some order."""
    rejected: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    run = caught = spare = 0
    missed: list[str] = []
    for case in ALL:
        for graph in dict.fromkeys(case.graphs):
            around = surrounded(case, graph)
            reference = simulation.run(around, adversary.in_order)
            for number, (kind, name, mutant) in enumerate([*mutants.of(graph, SAMPLE), *shorter_staging(graph)]):
                if kind == "ring shortened" and not case.plan.overlap:
                    continue  # one stream reduces one bucket after the other: one buffer would do
                faults = examine(mutant, plan_of(graph))
                if not (faults.races or faults.faults):  # the end of main comes after that use: a record nobody needs
                    assert kind == "record before producer", f"{case.name}: {name} is accepted"
                    assert not is_wrong(replaced(around, graph, mutant), reference, orders(case)), name
                    spare += 1
                    continue
                total[kind] += 1
                rejected[kind] += 1
                if number % (1 if FULL else 4) == 0:
                    run += 1
                    if is_wrong(replaced(around, graph, mutant), reference, orders(case)):
                        caught += 1
                    else:
                        missed.append(f"{case.name}: {name}")
    text = ", ".join(f"{kind} {rejected[kind]}/{total[kind]}" for kind in total)
    print(f"\noffload, rejected by verify: {text}; wrong under some order: {caught}/{run}", *missed, sep="\n  ")
    assert spare <= sum(total.values()) // 20
    assert rejected == total and sum(total.values()) > (500 if FULL else 40)
    assert run > (80 if FULL else 10) and caught == run
    assert "staging shortened" in total


def shorter_staging(graph: fx.Graph) -> Iterator[tuple[str, str, fx.Graph]]:
    for name, edit in mutants.shorter_ring(graph, "staging"):
        yield "staging shortened", name, mutants.edited(graph, edit)


def edited(graph: fx.Graph, kind: type[Op], how: str, plan: object) -> list[str]:
    """What verify says after one node of this kind was dropped, doubled or given another bucket's number."""
    new = copy_graph(graph)
    node = next(n for n in steps(new) if isinstance(op_of(n), kind))
    if how == "drop":
        new.erase_node(node)
    elif how == "double":
        with new.inserting_after(node):
            put(new, op_of(node), stream=stream_of(node))
    else:
        change(node, replace(op_of(node), bucket=2))
    return list(examine(new, plan).faults)


@pytest.mark.parametrize("how", ["drop", "double", "relabel"])
@pytest.mark.parametrize("kind", [CopyToHost, Finish, Update, CopyToDevice], ids=lambda k: k.__name__)
@pytest.mark.parametrize("mode", ["cpu", "device"])
def test_ds7981_ds6550_each_microbatch_lands_once(mode: str, kind: type[Op], how: str) -> None:
    """deepspeed#7981 (offload kept only the last microbatch), deepspeed#6550, deepspeed#7967 (gradients dropped),
    deepspeed#7985: a copy or a sum that is missing, done twice or of another bucket is a fault, whatever the streams
    do."""
    plan = make(3, offload=mode)
    graph = step_of(plan) if kind is Update or (kind, mode) == (CopyToDevice, "device") else schedule("mlp", plan)
    if kind is CopyToDevice and mode == "cpu" and how == "double":
        return  # a sum fetched twice is the same sum
    assert not examine(graph, plan)
    assert edited(graph, kind, how, plan), (mode, kind, how)


def test_a_sum_is_not_taken_before_it_is_reduced() -> None:
    """deepspeed#7985's order of things, on the way to host memory: the snapshot before the accumulation."""
    plan = make(2, offload="device")
    graph = copy_graph(schedule("mlp", plan))
    total = next(n for n in steps(graph) if isinstance(op_of(n), Finish))
    total.prepend(next(n for n in steps(graph) if isinstance(op_of(n), StageShard)))
    assert any("acc[0] holds the landed total of bucket 0" in fault for fault in examine(graph, plan).faults)


def mutants_of_shards(graph: fx.Graph) -> Iterator[tuple[str, fx.Graph]]:
    """Each node that brings an update to a shard of the weights: dropped, doubled, of another bucket, before the node
    before it, and with another buffer in place of the shard or of the staging buffer."""
    for node, op in ops(graph):
        if not isinstance(op, CopyToDevice | Spread | Publish) or op.bucket > 2:
            continue
        others = [Buffer("weight", (op.bucket + 1) % 3), Buffer("flat_param", op.bucket), Buffer("staging", 0)]
        changes = {"relabel": replace(op, bucket=(op.bucket + 1) % 3)}
        for name, old in op.buffers.items():
            changes.update({f"{name} is {new}": renamed(op, old, new) for new in others if new.kind != "staging"
                            or old.kind == "weight"})  # fmt: skip
        edits: dict[str, mutants.Edit] = {
            "drop": lambda g, where, n=node: g.erase_node(where[n]),
            "double": lambda g, where, n=node, op=op: _put_after(g, where[n], op),
        }
        for how, new in changes.items():
            if new != op:
                edits[how] = lambda g, where, n=node, op=new: change(where[n], op)
        for how, edit in edits.items():
            yield f"{node.name}: {how}", mutants.edited(graph, edit)


def _written(graph: fx.Graph) -> set[object]:
    return {access.buffer for node in steps(graph) for access in accesses(node)[1]}


def _put_after(graph: fx.Graph, node: fx.Node, op: Op) -> None:
    with graph.inserting_after(node):
        put(graph, op, stream=stream_of(node))


@pytest.mark.parametrize("case", IN_STAGE_3, ids=lambda c: c.name)
def test_stage_3_an_update_reaches_its_shard_once(case: Case) -> None:
    """Not dropped, not twice, not into another bucket's shard or the weights of stage 2, and main comes after it."""
    num, run = 0, 0
    for graph in (g for g in dict.fromkeys(case.graphs) if {Buffer("weight", 0)} & _written(g)):
        has_update = any(isinstance(op, Update) for _, op in ops(graph))  # else the shards may have the values already
        around = surrounded(case, graph)
        reference = simulation.run(around, adversary.in_order)
        for number, (name, mutant) in enumerate(mutants_of_shards(graph)):
            num += 1
            faults = examine(mutant, plan_of(graph))
            assert faults.races or faults.faults, f"{case.name}: {name} is accepted"
            # a copy done twice gives the same, and what publish does knows no bucket
            is_seen = has_update and "double" not in name and not name.startswith("publish")
            if is_seen and number % (4 if FULL else 24) == 0:
                run += 1
                assert is_wrong(replaced(around, graph, mutant), reference, orders(case)), f"{name} changes nothing"
    assert num >= 20 and run


@pytest.mark.parametrize(("kind", "stream"), [(Update, MAIN), (CopyToHost, MAIN), (Finish, HOST)])
def test_the_processor_runs_its_own_nodes_alone(kind: type[Op], stream: str) -> None:
    """Its past is taken as done: that holds for host memory, and for what the device does with it on side streams."""
    plan = make(2, offload="cpu")
    graph = copy_graph(step_of(plan) if kind is Update else schedule("mlp", plan))
    next(n for n in steps(graph) if isinstance(op_of(n), kind)).meta["stream"] = stream
    assert any("can't be on" in fault for fault in examine(graph, plan).faults)


def test_the_bus_works_one_bucket_ahead() -> None:
    """With two staging buffers the next sum is on its way while this bucket is reduced."""
    order = [(type(op_of(n)), n.args[0]) for n in steps(schedule("mlp", make(3, ring=2, offload="cpu")))]
    for bucket in (1, 2):
        assert order.index((CopyToDevice, bucket)) < order.index((CopyToHost, bucket - 1))


def test_all_orders_of_a_small_step() -> None:
    plan = make(1, slots=1, offload="cpu")
    case = Case("step", plan, (schedule("mlp", plan), step_of(plan)))
    reference = simulation.run(case, adversary.in_order, contract=False)
    results = list(adversary.every_order(lambda choose: simulation.run(case, choose, contract=False)))
    assert len(results) > 1 and all(simulation.same(reference, result) for result in results)
    assert not Enumeration(case.graphs[1], plan).finds_a_race()


def test_the_edges_are_there() -> None:
    """What the other tests delete must exist: a schedule without waits would pass them all."""
    for case in ALL:
        waits = [sum(isinstance(op_of(n), WaitEvent) for n in steps(graph)) for graph in case.graphs]
        assert max(waits) >= 2 and waits[2] > 0 if len(waits) > 3 else min(waits) > 0, case.name
