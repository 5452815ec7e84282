"""zc/planning/ownership.py: who updates which whole parameter; and what a Llama of 1.3 B costs with it, by W."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.models import GPTConfig, make_model
from zc.config import Config
from zc.planning.allocations import resident, sent
from zc.planning.layout import Rule
from zc.planning.ownership import COSTS, ROOM, assign, assign_owners, elements, newton_schulz
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat

pytestmark = pytest.mark.check

BF16, CUDA = torch.bfloat16, torch.device("cuda")
WORLDS = (2, 3, 4, 8, 16, 20, 64, 256, 1024, 4096)
MUON = Rule(whole=True, cost="newton_schulz")


def llama(by_kind: bool) -> list[ParamSpec]:
    """Of the benchmark, on the meta device. ``by_kind``: matrices inside blocks are the first optimizer's."""
    with torch.device("meta"):
        named = dict(make_model("llama-1.3b", GPTConfig(vocab=32768, seq=2048), 0, "meta").named_parameters())
    rest = {n for n, p in named.items() if p.dim() != 2 or n in ("tokens.weight", "head.weight")}
    return [ParamSpec(n, tuple(p.shape), BF16, CUDA, int(by_kind and n in rest)) for n, p in named.items()]


ALL, MATRICES = llama(by_kind=False), llama(by_kind=True)


def planned(specs: list[ParamSpec], rules: list[Rule], world_size: int, stage: int = 2) -> Plan:
    owners = assign_owners(specs, rules, world_size)
    return make_plan(specs, Config(stage=stage), flat(world_size), rules=rules, owners=owners)


def owned(plan: Plan) -> dict[int, int]:
    """By rank, elements without alignment, of the optimizer that reads whole parameters."""
    numel_by_rank = dict.fromkeys(range(plan.world_size), 0)
    for bucket in plan.buckets:
        for slot, rank in zip(bucket.slots, bucket.layout.owners or (), strict=False):
            numel_by_rank[rank] += slot.numel
    return numel_by_rank


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("what", ["all by one", "Muon and AdamW"])
def test_a_llama_pads_nothing_at_any_number_of_ranks(what: str, world_size: int) -> None:
    """Runs of the longest one's length took 65 GB a rank at 64 ranks for a model of 2.5 GB."""
    specs, rules = (ALL, [Rule(whole=True)]) if what == "all by one" else (MATRICES, [MUON, Rule()])
    plan = planned(specs, rules, world_size)
    numel = sum(math.prod(spec.shape) for spec in specs)
    assert sum(b.numel for b in plan.buckets) <= 1.01 * numel
    # elements on the wire: a reduction, and what goes on to its owner; a gather, and what came from there
    reduced = sum(b.layout.numel_shard * (world_size - 1) for b in plan.buckets)
    to_owners = (sent(plan, 1)["gradients"] - 2 * reduced) // 4
    from_owners = (sent(plan, 1)["parameters"] - 2 * reduced) // 2
    assert reduced + to_owners <= 1.01 * numel
    largest = max(owned(plan).values())
    align = 64 * len(specs)
    assert from_owners <= largest + align, "an owner sends what it owns, once"
    assert reduced + from_owners <= max(1.01 * numel, reduced + largest + align)
    device, _, _ = resident(plan, [1, 2][: len(rules)])
    assert device["flat_param"] <= 1.01 * 2 * numel


@pytest.mark.parametrize("world_size", [w for w in WORLDS if w <= 20])
def test_a_ranks_state_is_its_share(world_size: int) -> None:
    """Where the mean is above the largest parameter (the embedding, a twentieth), a rank has at most 1.1 of it."""
    for rules in ([Rule(whole=True)], [MUON]):
        shares = owned(planned(ALL, rules, world_size))
        mean = sum(shares.values()) / world_size
        largest = max(math.prod(spec.shape) for spec in ALL)
        assert max(shares.values()) <= max(largest, ROOM * mean), max(shares.values()) / mean


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16, 32])
def test_muons_flops_are_shared_out(world_size: int) -> None:
    """The slowest rank's Newton-Schulz within a tenth of the mean, its state too: neither alone would give both."""
    plan = planned(MATRICES, [MUON, Rule()], world_size)
    loads = dict.fromkeys(range(world_size), 0.0)
    for bucket in plan.buckets:
        for slot, rank in zip(bucket.slots, bucket.layout.owners or (), strict=False):
            loads[rank] += newton_schulz(slot.shape)
    mean, state = sum(loads.values()) / world_size, owned(plan)
    assert max(loads.values()) <= 1.1 * mean, max(loads.values()) / mean
    assert max(state.values()) <= 1.1 * sum(state.values()) / world_size


def test_planning_takes_as_long_for_4096_ranks() -> None:
    def seconds(world_size: int) -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            planned(MATRICES, [MUON, Rule()], world_size)
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(4096) < 3 * seconds(2) + 0.02


def test_newton_schulz_by_hand() -> None:
    """2 x 3: the Gram matrix 2*2*2*3, its square 2*2*2*2, the product 2*2*2*3; a tall one is turned."""
    assert newton_schulz((2, 3)) == 24 + 16 + 24 == newton_schulz((3, 2))
    assert newton_schulz((2, 3, 1)) == newton_schulz((2, 3)) and newton_schulz((7,)) == 7 and newton_schulz((0, 3)) == 0
    assert elements((2, 3)) == 6 and set(COSTS) == {"elements", "newton_schulz"}


shapes_of = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12).map(
    lambda shapes: [(f"p{k}", shape) for k, shape in enumerate(shapes)]
)


@given(shapes=shapes_of, world_size=st.sampled_from([1, 2, 3, 5, 8, 4096]), cost=st.sampled_from(sorted(COSTS)))
@settings(max_examples=100, deadline=None)
def test_every_parameter_has_an_owner_and_no_rank_too_much(
    shapes: list[tuple[str, tuple[int, ...]]], world_size: int, cost: str
) -> None:
    owners = assign(shapes, COSTS[cost], world_size, {})
    assert owners.keys() == {name for name, _ in shapes} and all(0 <= rank < world_size for rank in owners.values())
    loads: dict[int, int] = {}
    for name, shape in shapes:
        loads[owners[name]] = loads.get(owners[name], 0) + math.prod(shape)
    numel = [math.prod(shape) for _, shape in shapes]
    assert max(loads.values()) <= max(ROOM * sum(numel) / world_size, max(numel)) + max(numel), "Graham's bound"
    if world_size >= len(shapes):
        assert max(loads.values()) <= max(numel), "each its own rank"


def test_what_ranks_have_already_counts() -> None:
    """zc.recompile adds parameters: those of before stay where they are."""
    shapes = [(f"p{k}", (10,)) for k in range(4)]
    assert assign(shapes, elements, 2, {}) == {"p0": 0, "p1": 1, "p2": 0, "p3": 1}
    assert assign(shapes, elements, 2, {0: (40.0, 40)}) == dict.fromkeys(("p0", "p1", "p2", "p3"), 1)
    assert set(assign(shapes[:2], elements, 3, {0: (1.0, 1)}).values()) == {1, 2}


def test_neighbours_of_one_shape_go_to_different_ranks() -> None:
    """Each rank's run is then about as long as its shard, and little of a bucket's gradients moves twice."""
    specs = [ParamSpec(f"layer{k}", (512, 512), torch.float32, torch.device("cpu")) for k in range(16)]
    owners = assign_owners(specs, [MUON], 2)
    plan = make_plan(specs, Config(bucket_nbytes=4 * 512 * 512 * 4), flat(2), rules=[MUON], owners=owners)
    for bucket in plan.buckets:
        assert bucket.layout.of_run(0) == [(0, *bucket.layout.shard_range(0))]


def test_two_optimizers_share_the_ranks() -> None:
    """The second one's parameters go where the first one's are not: state of both is memory of one rank."""
    cpu = torch.device("cpu")
    specs = [ParamSpec("w", (64, 64), torch.float32, cpu, 0), ParamSpec("v", (64, 64), torch.float32, cpu, 1)]
    plan = planned(specs, [MUON, Rule(whole=True)], 2)
    assert sorted(owned(plan).values()) == [64 * 64, 64 * 64]
