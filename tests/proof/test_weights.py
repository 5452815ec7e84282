"""Stage 3: passes of gathers, intact and broken. test_certificate.py compares what `verify` says of each with a checker
that knows nothing of it."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import record_mutants
import torch
from tiers import FULL
from torch import fx

from zc.config import Config
from zc.passes.base import run_passes
from zc.passes.pipeline import verify
from zc.passes.scheduling import scheduling
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, Topology, flat
from zc.planning.residency import plan_residency, smallest_cap
from zc.schedule.buffer import Access, Buffer
from zc.schedule.codegen import load
from zc.schedule.nodes import accesses, ops, put
from zc.schedule.spec import FreeWeights, Gather, ReadWeights
from zc.weights.weight_uses import PREFIX, weights_graph

pytestmark = pytest.mark.check
NUM_CASES = 20 if FULL else 8


def make(
    numels: list[int], *, world_size: int, reads: bool, overlap: bool = True, num_replicas: int = 1, bits: int = 0
) -> Plan:
    """One bucket for each parameter. ``bits``: of its weights between hosts; 0: they travel as they are."""
    specs = [ParamSpec(f"p{k}", (numel,), torch.float32, torch.device("cpu")) for k, numel in enumerate(numels)]
    config = Config(stage=3, bucket_nbytes=4, overlap=overlap, gather_dtype="int4" if bits else None)
    topology = Topology(1, world_size, reads_memory=True) if reads else flat(world_size)
    return make_plan(specs, config, topology, num_replicas=num_replicas)


def case(seed: int) -> tuple[fx.Graph, Plan]:
    """A pass over a few buckets: forward and backward, or any order."""
    rng = random.Random(seed)
    num, world_size, reads = rng.randint(1, 4), rng.choice((1, 2, 2, 3)), rng.random() < 0.5
    numels = [32 * rng.randint(1, 4) for _ in range(num)]
    bits = 4 if seed % 3 == 0 else 0
    overlap = rng.random() < 0.85
    plan = make(numels, world_size=world_size, reads=reads and world_size > 1, overlap=overlap, bits=bits)
    if rng.random() < 0.5:
        order = list(range(num))
        uses = [(b,) for b in reversed(order)] + [()] + [(b,) for b in order] + rng.choice(([], [()]))
    else:
        uses = [tuple(rng.sample(range(num), rng.randint(0, min(2, num)))) for _ in range(rng.randint(1, 6))]
    nbytes = {b.index: b.nbytes for b in plan.buckets}
    cap = smallest_cap(uses, nbytes) + 128 * rng.randint(0, 8)
    plan = replace(plan, weight_nbytes=max(cap, 1))
    passes = scheduling(prove=False, prefix=PREFIX)
    graph, _ = run_passes(weights_graph(plan, plan_residency(uses, nbytes, cap)), plan, passes)
    return graph, plan


def test_intact_passes_are_proved() -> None:
    for seed in range(3 * NUM_CASES):
        graph, plan = case(seed)
        assert verify(graph, plan).redundant == 0 and len(load(graph)) == len(graph.output_node().meta["uses"]) + 1
        encodes = {op.scratch is not None for _, op in ops(graph) if isinstance(op, Gather)}
        assert encodes <= {plan.gather_encoding is not None}


def test_what_a_pass_touches() -> None:
    """The order of a gather after the last read of its bytes rests on it. No wait is too many, and none is missing, by
    records that say less."""
    arena, shard = Buffer("arena", 0), Buffer("weight", 1)
    there = (Access(arena, 0, 128),)
    for op, touched in (
        (Gather(1, arena, shard, (0, 128)), ((Access(shard),), there)),
        (ReadWeights(arena, 0, (1,), spans=((0, 128),)), (there, ())),
        (FreeWeights(1, arena, 0, 128), (there, ())),
    ):
        assert accesses(put(fx.Graph(), op)) == touched


def test_some_passes_gather_encoded_weights() -> None:
    gathers = (op for seed in range(3 * NUM_CASES) for _, op in ops(case(seed)[0]) if isinstance(op, Gather))
    assert any(op.scratch is not None for op in gathers)


def broken(seeds: range, every: int) -> Iterator[tuple[str, str, fx.Graph, Plan]]:
    seen = collections.Counter[str]()
    for seed in seeds:
        graph, plan = case(seed)
        if not any(graph.output_node().meta["uses"]):
            continue
        for kind, name, mutant in record_mutants.of(graph, every, seen):
            yield kind, f"{seed} {name}", mutant, plan
        stop = max(op.extent[1] for _, op in ops(graph) if isinstance(op, Gather))
        if stop > 128:  # the same schedule, where less is allowed
            smaller = replace(plan, weight_nbytes=stop - 1)
            yield "cap passed", f"{seed}", graph, smaller
