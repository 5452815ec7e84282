"""Ranks that read each other's memory: intact schedules give one result in every order of 2 and 3 ranks, and a signal
or a wait that is dropped, doubled or moved is rejected by verify exactly where some order shows it wrong."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import adversary
import many_ranks
import mutants
import pytest
from schedules import forward, make, placed, schedule, step_of, surrounded
from simulation import Case, plan_of, replaced, same
from tiers import FULL
from torch import fx

from zc.engine.overlap_gather import gather_graph
from zc.passes.base import copy_node
from zc.passes.verify import examine, verify
from zc.schedule.nodes import kind_of, op_of, put, steps, stream_of
from zc.schedule.spec import AwaitFree, ReduceRows, Signal, SignalFull

pytestmark = pytest.mark.check


def cases(world_size: int) -> Iterator[Case]:
    for shape, num_buckets, ring, stage, overlap in (
        ("mlp", 1, 1, 2, True), ("mlp", 3, 2, 2, True), ("heads", 3, 1, 2, True), ("mlp", 2, 2, 1, True),
        ("tied", 3, 2, 1, True), ("mlp", 2, 1, 2, False),
    ):  # fmt: skip
        plan = make(num_buckets, stage=stage, ring=ring, overlap=overlap, world_size=world_size, reads=True)
        graph = schedule(shape, plan)
        yield Case(f"{shape} b{num_buckets} r{ring} s{stage} {'' if overlap else 'no overlap'}", plan, (graph, graph))
    for num_buckets, ring, stage in ((1, 1, 2), (3, 1, 2), (1, 2, 1)):
        plan = make(num_buckets, stage=stage, ring=ring, world_size=2 * world_size, reads=True, num_hosts=2)
        graph = schedule("mlp", plan)
        yield Case(f"two hosts b{num_buckets} r{ring} s{stage}", plan, (graph, graph))
    for num_buckets, ring, stage in ((1, 1, 2), (3, 1, 2), (1, 2, 1)):
        plan = make(num_buckets, stage=stage, ring=ring, world_size=world_size, reads=True, num_replicas=2)
        graph = schedule("mlp", plan)
        yield Case(f"two replicas b{num_buckets} r{ring} s{stage}", plan, (graph, graph))
    plan = make(1, world_size=2 * world_size, reads=True, num_hosts=2)
    gathers = placed(plan, gather_graph(plan, range(1)))
    yield Case("two hosts weights", plan, (gathers, gathers))
    # of several buckets the signals of the first gather order the others' too, and verify does not count that
    plan = make(1, world_size=world_size, reads=True)
    gathers = placed(plan, gather_graph(plan, range(1)))
    yield Case("weights", plan, (gathers, gathers))
    plan = make(1, world_size=world_size, overlap_gather=True, reads=True)
    gathers, ahead = placed(plan, gather_graph(plan, range(1))), forward(plan)
    yield Case("overlap_gather", plan, (gathers, ahead, schedule("mlp", plan)) * 2 + (gathers, ahead))
    plan = make(1, world_size=world_size, offload="cpu", reads=True)
    yield Case("offload", plan, (schedule("mlp", plan), step_of(plan)) * 2)


def orders(case: Case, world_size: int, num_seeds: int) -> list[adversary.Chooser]:
    result = adversary.worst(many_ranks.all_lanes(case, world_size))
    return [*result, *(adversary.seeded(seed) for seed in range(num_seeds))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_intact_schedules_have_one_result(world_size: int) -> None:
    for case in cases(world_size):
        for graph in case.graphs:
            verify(graph, plan_of(graph))
        reference = many_ranks.run(case, adversary.in_order, world_size)
        chosen = orders(case, world_size, 10)
        for choose in chosen if FULL else chosen[:: 4 if world_size == 2 else 14]:
            assert same(reference, many_ranks.run(case, choose, world_size)), case.name


Mutant = tuple[str, str, mutants.Edit]


def dropped_or_doubled(graph: fx.Graph) -> Iterator[Mutant]:
    for node in steps(graph):
        if isinstance(op_of(node), Signal):
            yield "dropped", node.name, lambda g, where, n=node: g.erase_node(where[n])
            yield "doubled", node.name, lambda g, where, n=node: _double(g, where[n])


def _double(graph: fx.Graph, node: fx.Node) -> None:
    op = op_of(node)
    assert op is not None
    with graph.inserting_after(node):
        put(graph, op, stream=stream_of(node))


def moved(graph: fx.Graph) -> Iterator[Mutant]:
    """Each signal and wait one place earlier and one later on its stream."""
    lanes: dict[str, list[fx.Node]] = {}
    for node in steps(graph):
        lanes.setdefault(stream_of(node), []).append(node)
    for lane in lanes.values():
        for k, node in enumerate(lane):
            if not isinstance(op_of(node), Signal):
                continue
            if k:
                to = lane[k - 1]
                edit: mutants.Edit = lambda g, where, n=node, t=to: where[t].prepend(where[n])  # noqa: E731
                yield "moved", f"{node.name} before {to.name}", edit
            if k + 1 < len(lane):
                to = lane[k + 1]
                edit = lambda g, where, n=node, t=to: where[t].append(where[n])  # noqa: E731
                yield "moved", f"{node.name} after {to.name}", edit


@pytest.mark.parametrize("world_size", [2, 3])
def test_verify_and_every_order_agree(world_size: int) -> None:
    rejected: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for number, case in enumerate(cases(world_size)):
        chosen = orders(case, world_size, 20)
        for graph in dict.fromkeys(case.graphs):
            twice = surrounded(case, graph)
            reference = many_ranks.run(twice, adversary.in_order, world_size)
            for k, (kind, name, edit) in enumerate((*dropped_or_doubled(graph), *moved(graph))):
                if not FULL and (k + number) % (7 if world_size == 2 else 11):
                    continue
                mutant = mutants.edited(graph, edit)
                broken = replaced(twice, graph, mutant)
                is_rejected = bool(examine(mutant, plan_of(graph)))
                runs = (many_ranks.outcome(broken, choose, world_size) for choose in chosen)
                is_wrong = any(result is None or not same(reference, result) for result in runs)
                total[kind] += 1
                rejected[kind] += is_rejected
                wrong[kind] += is_wrong
                assert is_rejected or not is_wrong, f"{case.name}: {name} {kind} is accepted, and wrong in some order"
                assert is_wrong or not is_rejected, f"{case.name}: {name} {kind} is rejected, and right in every order"
                assert is_rejected or kind == "moved", f"{case.name}: {name} {kind} is accepted"
    shown_of = ", ".join(f"{kind} {rejected[kind]} and {wrong[kind]} of {total[kind]}" for kind in total)
    print(f"\n{world_size} ranks, signals, rejected by verify and wrong under some order: {shown_of}")
    assert min(total.values()) > 5 and set(total) == {"dropped", "doubled", "moved"}


def test_what_is_wrong_is_named() -> None:
    plan = make(1, ring=1, reads=True)
    graph = schedule("mlp", plan)

    def without(kind: type[Signal]) -> str:
        node = next(n for n in steps(graph) if type(op_of(n)) is kind)
        faults = examine(mutants.edited(graph, lambda g, where: g.erase_node(where[node])), plan)
        return "\n".join((*faults.races, *faults.faults))

    assert "flat_grad[0] is signalled 0 times and waited for 1 times: await_full" in without(SignalFull)
    assert "flat_grad[0] is signalled 1 times and waited for 0 times: signal_free" in without(AwaitFree)
    bare = fx.Graph()
    where: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if not isinstance(op_of(node), Signal):
            copy_node(node, bare, where)
    races = "\n".join(examine(bare, plan).races)
    read = next(n for n in steps(graph) if isinstance(op_of(n), ReduceRows))
    assert f"read by {kind_of(read)} ({read.name}) of other ranks, and no signal orders them" in races
