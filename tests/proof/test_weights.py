"""Stage 3: `verify` and machines that know nothing of it agree on what is right of a pass's gathers."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import weights_machine
import weights_mutants
from tiers import FULL
from torch import fx
from weights_machine import Setting

from zc.config import Config
from zc.passes.base import run_passes
from zc.passes.pipeline import examine, verify
from zc.passes.scheduling import scheduling
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, Topology, flat, reads_shards
from zc.planning.residency import plan_residency, smallest_cap
from zc.schedule.codegen import load
from zc.schedule.nodes import ops
from zc.schedule.spec import Gather
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


def case(seed: int) -> tuple[fx.Graph, Plan, Setting]:
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
    machines = world_size if reads_shards(plan) else 1
    return graph, plan, Setting(tuple(uses), nbytes, plan.weight_cap, machines, reads_shards(plan))


@pytest.mark.parametrize("seed", range(3 * NUM_CASES))
def test_intact_passes_are_proved_and_right(seed: int) -> None:
    graph, plan, setting = case(seed)
    verdict = verify(graph, plan)
    assert verdict.redundant == 0 and len(load(graph)) == len(setting.uses) + 1
    assert weights_machine.fault_of(graph, setting, 200 if FULL else 5, every_cut=FULL) is None
    encodes = {op.scratch is not None for _, op in ops(graph) if isinstance(op, Gather)}
    assert encodes <= {plan.gather_encoding is not None}


def test_some_passes_gather_encoded_weights() -> None:
    gathers = (op for seed in range(3 * NUM_CASES) for _, op in ops(case(seed)[0]) if isinstance(op, Gather))
    assert any(op.scratch is not None for op in gathers)


def broken(seeds: range, every: int) -> Iterator[tuple[str, str, fx.Graph, Plan, Setting]]:
    for seed in seeds:
        graph, plan, setting = case(seed)
        if not any(setting.uses):
            continue
        for k, (kind, name, mutant) in enumerate(weights_mutants.of(graph, len(plan.buckets))):
            if (k + seed) % every == 0:
                yield kind, f"{seed} {name}", mutant, plan, setting
        stop = max(op.extent[1] for _, op in ops(graph) if isinstance(op, Gather))
        if stop > 128:  # the same schedule, where less is allowed
            smaller = replace(plan, weight_nbytes=stop - 1)
            yield "cap passed", f"{seed}", graph, smaller, replace(setting, cap=stop - 1)


def test_verify_and_the_machines_agree_on_every_mutant() -> None:
    total: collections.Counter[str] = collections.Counter()
    rejected: collections.Counter[str] = collections.Counter()
    for kind, name, mutant, plan, setting in broken(range(100, 100 + 4 * NUM_CASES), 1 if FULL else 7):
        findings = examine(mutant, plan)
        is_rejected = bool(findings.races or findings.faults)
        fault = weights_machine.fault_of(mutant, setting)
        if fault is None and is_rejected:
            fault = weights_machine.fault_of(mutant, setting, 40, every_cut=True)
            assert fault is not None, f"{kind}: {name}: {findings}, and right in every order"
        total[kind] += 1
        rejected[kind] += is_rejected
        assert is_rejected or fault is None, f"{kind}: {name}: accepted, and {fault}"
    text = ", ".join(f"{kind} {rejected[kind]}/{total[kind]}" for kind in sorted(total))
    print(f"\npasses of stage 3, rejected and wrong: {sum(rejected.values())} of {sum(total.values())}: {text}")
    assert len(+rejected) >= (35 if FULL else 25) and sum(rejected.values()) > (4000 if FULL else 200)


def test_rejected_passes_read_wrong_values() -> None:
    """Without an allocator that counts extents, so that only what a use reads tells."""
    kinds = ("no wait", "gather forgotten", "second gather forgotten", "gather shifted",
             "gather too short", "gather from another shard", "gather moved down", "read moved up", "read shifted",
             "free moved up", "wait too late", "free on comm")  # fmt: skip
    wrong: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for kind, _, mutant, plan, setting in broken(range(500, 500 + NUM_CASES), 1 if FULL else 3):
        findings = examine(mutant, plan)
        if kind in kinds and (findings.races or findings.faults):
            total[kind] += 1
            wrong[kind] += weights_machine.fault_of(mutant, setting, ledger=False, every_cut=True) is not None
    text = ", ".join(f"{kind} {wrong[kind]}/{total[kind]}" for kind in sorted(total))
    print(f"\npasses of stage 3 that are rejected, and a use reads something else: {text}")
    assert sum(wrong.values()) >= 0.9 * sum(total.values()) and len(total) > 10
