"""Schedules of a mesh of two dimensions: proved, and no edit that loses the sum of a replica, or that over replicas, is
accepted or right. tests/proof/test_across_ranks.py has those whose ranks read each other's memory, together."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import adversary
import gradient_mutants
import mutants
import pytest
import simulation
from schedules import make, schedule
from simulation import Case, is_wrong, plan_of, replaced
from tiers import FULL
from torch import fx

from zc.engine.flushes import _reduction_only
from zc.passes.verify import examine, verify
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import change, op_of, ops, put, stream_of
from zc.schedule.spec import Accumulate, LaunchReduce, ReduceReplicas, SumReceived, WaitReduce

pytestmark = pytest.mark.check


def cases() -> Iterator[Case]:
    """Messages in `shard`, and no `shard` to speak of; microbatches that reduce, or wait for the boundary."""
    for world_size in (2, 1):
        for shape, num_buckets, ring, stage, overlap in (
            ("mlp", 1, 1, 2, True), ("mlp", 4, 2, 2, True), ("heads", 3, 1, 2, True), ("tied", 3, 2, 1, True),
            ("mlp", 2, 1, 2, False), ("mlp", 2, 1, 1, False),
        ):  # fmt: skip
            plan = make(
                num_buckets, stage=stage, ring=ring, overlap=overlap, world_size=world_size, num_replicas=2
            )
            inside, outside = schedule(shape, plan.microbatch()), schedule(shape, plan)
            shown = f"{shape} b{num_buckets} r{ring} s{stage} {'' if overlap else 'no overlap'}"
            yield Case(f"2 replicas of {world_size}, {shown}", plan, (inside, outside, outside))


def _of(graph: fx.Graph, kind: Any) -> list[tuple[fx.Node, Any]]:
    return [(node, op) for node, op in ops(graph) if isinstance(op, kind)]


def broken(graph: fx.Graph) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the schedule)."""
    chains = zip(*(_of(graph, kind) for kind in (LaunchReduce, WaitReduce, SumReceived, ReduceReplicas)), strict=False)
    chain_of = {chain[-1][0]: [node for node, _ in chain] for chain in chains}
    for node, op in _of(graph, ReduceReplicas):
        chain = chain_of.get(node, [node])
        yield "dropped", node.name, mutants.edited(graph, gradient_mutants._erased(node)[1])
        yield "all dropped", node.name, mutants.edited(graph, gradient_mutants._erased(*chain)[1])
        yield "doubled", node.name, mutants.edited(graph, gradient_mutants._doubled(node)[1])

        def alone(g: fx.Graph, where: dict[fx.Node, fx.Node], chain: list[fx.Node] = chain, op: Any = op) -> None:
            """This replica's own sum is all that is accumulated."""
            rows = op.via if len(chain) > 1 else op.src
            with g.inserting_after(where[chain[-1]]):
                put(g, Accumulate(op.bucket, op.dst, rows), stream=stream_of(chain[-1]))
            for gone in chain[-2:][::-1]:
                g.erase_node(where[gone])

        yield "this replica alone", node.name, mutants.edited(graph, alone)
        if len(chain) > 1:
            sent = op_of(chain[0]).src  # type: ignore[union-attr]

            def unsummed(g: fx.Graph, where: dict[fx.Node, fx.Node], chain: list[fx.Node] = chain,
                         op: Any = op, sent: Buffer = sent) -> None:  # fmt: skip
                """What this rank has goes to the replicas, without the sum of `shard`."""
                change(where[chain[-1]], replace(op, src=sent))
                for gone in chain[-2::-1]:
                    g.erase_node(where[gone])

            yield "shard left out", node.name, mutants.edited(graph, unsummed)
            yield "not summed", node.name, mutants.edited(graph, gradient_mutants._erased(chain[2])[1])
    for make_mutant in (gradient_mutants.slot_dropped, gradient_mutants.write_deleted):
        for name, edit in make_mutant(graph):
            yield make_mutant.__name__, name, mutants.edited(graph, edit)
    for kind, name, mutant in mutants.of(graph, 1 if FULL else 3):
        yield kind, name, mutant


def test_intact_schedules_are_proved_and_have_one_result() -> None:
    for case in cases():
        for graph in case.graphs:
            verify(graph, plan_of(graph))
        reference = simulation.run(case, adversary.in_order)
        assert simulation.same(reference, reference), f"{case.name}: the program order itself gives NaN"
        for choose in (*adversary.worst(simulation.lanes(case)), *(adversary.seeded(seed) for seed in range(5))):
            assert simulation.same(reference, simulation.run(case, choose)), case.name


def test_every_edit_is_rejected_and_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    rejected: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    ran = wrong = 0
    for case in cases():
        reference = simulation.run(case, adversary.in_order)
        orders = [*adversary.worst(simulation.lanes(case)), *(adversary.seeded(seed) for seed in range(5))]
        for graph in dict.fromkeys(case.graphs):
            for kind, name, mutant in broken(graph):
                found = examine(mutant, plan_of(graph))
                total[kind] += 1
                rejected[kind] += bool(found.races or found.faults)
                assert found.races or found.faults, f"{case.name}: {kind}: {name} is accepted"
                if FULL or sum(total.values()) % 3 == 0:
                    ran += 1
                    wrong += is_wrong(replaced(case, graph, mutant), reference, orders)
    with capsys.disabled():
        print("\nreplicas, rejected:", ", ".join(f"{kind} {rejected[kind]}/{total[kind]}" for kind in total))
        print(f"wrong in value or under some order: {wrong}/{ran}")
    assert rejected == total and wrong >= 0.95 * ran > 20


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("world_size", "reads"), [(2, True), (2, False), (1, False)])
def test_the_mean_over_replicas_is_owed(world_size: int, reads: bool, stage: int) -> None:
    plan = make(1, stage=stage, world_size=world_size, reads=reads, num_replicas=2)
    graph = schedule("mlp", plan)
    (node,) = [n for n, _ in _of(graph, ReduceReplicas)]
    faults = examine(mutants.edited(graph, gradient_mutants._erased(node)[1]), plan).faults
    assert any("is owed whole, and never reduced" in fault for fault in faults)
    if world_size > 1:
        assert any("part[0] holds the sum of some ranks of bucket 0 at the end" in fault for fault in faults)
    kinds = [op for _, op in ops(_reduction_only(plan, 0))] if stage == 1 else []
    assert stage == 2 or isinstance(kinds[-1], ReduceReplicas)
