"""A schedule that was proved for one block is the one that the passes make for another, and is proved for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiers import FULL, full_cases
from torch import fx

from zc.config import Config
from zc.errors import RaceError
from zc.passes.base import run_passes
from zc.passes.pipeline import pipeline
from zc.passes.verify import verify
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import BlockKind, Plan, Topology, flat
from zc.schedule.nodes import text
from zc.schedule.rebase import Shift, rebased, shifts

NUM_BLOCKS, PARAMS = 6, {"a": (4, 8), "b": (16,), "c": (8, 4)}
BLOCK_NBYTES = 4 * (32 + 16 + 32)
SIZES = {"parts": 160, "one": BLOCK_NBYTES + 64, "two": 2 * BLOCK_NBYTES + 64}


def plan_of(
    size: str, stage: int, world_size: int, how: str, ring: int = 2, offload: str | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> Plan:  # fmt: skip
    cpu = torch.device("cpu")
    specs = [ParamSpec("tokens", (64,), torch.bfloat16, cpu)]
    specs += [
        ParamSpec(f"blocks.{k}.{name}", shape, torch.float32, cpu)
        for k in range(num_blocks)
        for name, shape in PARAMS.items()
    ]
    hosts = 2 if how == "two levels" else 1
    reads = Topology(hosts, world_size // hosts, reads_memory=True)
    config = Config(
        stage=stage, reduce="native" if how == "native" else "exact", bucket_nbytes=SIZES[size], num_buffers=ring,
        offload=offload and "cpu", offload_accumulate=offload or "cpu",
    )  # fmt: skip
    topology = reads if how in ("memory", "two levels") else flat(world_size)
    kinds = (BlockKind("Block", tuple(f"blocks.{k}" for k in range(num_blocks))),)
    return make_plan(specs, config, topology, num_replicas=2 if how == "replicas" else 1, kinds=kinds)


def names(old: int, new: int) -> dict[str, str]:
    return {f"blocks.{old}.{name}": f"blocks.{new}.{name}" for name in PARAMS}


def built(plan: Plan, block: int, *, in_place: bool = False) -> fx.Graph:
    """The schedule of a block's backward, made by the passes: its gradients come one by one from compute. With
    ``in_place``, matmuls make those of matrices in their slots."""
    graph = fx.Graph()
    grads, value = [], graph.placeholder("tangents_1")
    value.meta["val"] = torch.empty(1, device="meta")
    for shape in PARAMS.values():
        if in_place and len(shape) == 2:
            grads.append(graph.call_function(torch.ops.aten.mm.default, (value, value)))
        else:
            grads.append(value := graph.call_function(torch.ops.aten.neg.default, (value,)))
        grads[-1].meta["val"] = torch.empty(shape, device="meta")
    graph.output((*grads, value)).meta["grad_of"] = (*names(block, block), None)
    scheduled, _ = run_passes(graph, plan, pipeline(in_place=in_place))
    return scheduled


WAYS = [
    *itertools.product(SIZES, (1, 2), (1, 2, 4), ("messages", "memory", "native")),
    *itertools.product(SIZES, (1, 2), (4,), ("two levels",)),
    *itertools.product(SIZES, (1, 2), (1, 2), ("replicas",)),
]


@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("is_boundary", [True, False])
@full_cases("True-1", "True-3", "False-1", "False-3")
def test_a_rebased_schedule_is_the_one_that_the_passes_make(ring: int, is_boundary: bool) -> None:
    """Compared with the passes' own for the other block; rings turned, it is proved anew."""
    count = 0
    ways = [(o, *way) for o in (None, "cpu", "device") for way in WAYS if o is None or way[3] != "replicas"]
    for offload, size, stage, world_size, how in ways if FULL else ways[ring + 3 * is_boundary :: 7]:
        plan = plan_of(size, stage, world_size, how, ring, offload)
        plan = plan if is_boundary else plan.microbatch()
        template = built(plan, 1)
        for block in (0, 2, 5):
            moves = shifts(plan, names(1, block))
            assert moves is not None
            assert text(rebased(template, plan, names(1, block), moves, 0)) == text(built(plan, block))
            for turn in (1, 2, -3):
                verify(rebased(template, plan, names(1, block), moves, turn), plan)
                count += 1
    assert count >= (1300 if FULL else 150)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rebased_schedule_that_writes_in_place_is_the_one_that_the_passes_make(size: str, stage: int) -> None:
    """In stage 1 a block writes its part of a bucket, and zeros into all of the rest."""
    plan = plan_of(size, stage, 2, "memory")
    template = built(plan, 1, in_place=True)
    assert "wgrad_into" in text(template) or (stage, size) == (2, "two")
    for block in (0, 2, 5):
        moves = shifts(plan, names(1, block))
        assert moves is not None
        assert text(rebased(template, plan, names(1, block), moves, 0)) == text(built(plan, block, in_place=True))


def test_a_wrong_move_is_refused() -> None:
    """The negative control: the proof sees a gradient that goes to another bucket than its schedule owes."""
    plan = plan_of("parts", 2, 2, "memory")
    template, right = built(plan, 1), shifts(plan, names(1, 3))
    assert right is not None and len(right) == 3
    (first, one), (second, other), *_ = sorted(right.items())
    swapped = {**right, first: other, second: one}
    with pytest.raises(RaceError):
        verify(rebased(template, plan, names(1, 3), swapped, 0), plan)
    with pytest.raises(RaceError):
        verify(rebased(template, plan, names(1, 3), {**right, first: Shift(NUM_BLOCKS * 3, 0)}, 0), plan)


def test_blocks_whose_places_differ_are_not_rebased() -> None:
    plan = plan_of("two", 2, 2, "memory")
    assert shifts(plan, names(1, 0)) == {2: Shift(2, 3, 96)}, "the next block of the same bucket"
    assert shifts(plan, names(1, 4)) == {2: Shift(0, 3, 96)}
    assert shifts(plan, {"blocks.1.a": "blocks.2.a", "blocks.1.b": "blocks.3.b"}) is None
    assert shifts(plan, {"blocks.1.a": "blocks.2.c"}) is None, "another shape"
    assert shifts(plan, {"blocks.1.a": "elsewhere"}) is None
    whole = plan_of("one", 2, 2, "memory")
    assert shifts(whole, names(1, 0)) == {4: Shift(5)}
    assert shifts(whole, {"blocks.1.a": "tokens"}) is None, "another dtype"
    last_alone = plan_of("two", 2, 2, "memory", num_blocks=3)
    assert len({last_alone.slot_of[f"blocks.{k}.a"][0] for k in (1, 2)}) == 1
    assert shifts(last_alone, names(0, 1)) is None, "a whole bucket's schedule for a part of one"
