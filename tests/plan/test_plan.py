"""zc/planning/plan.py: which parameters are reduced together, and in which dtypes; decided by data, the same on every
rank."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from zc.config import Config
from zc.planning.layout import Rule
from zc.planning.ownership import assign_owners
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import PLACEMENTS, Plan, Topology, flat

pytestmark = pytest.mark.check

CPU = torch.device("cpu")
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def plan_of(
    specs: list[ParamSpec],
    *,
    world_size: int = 2,
    topology: Topology | None = None,
    rules: list[Rule] | None = None,
    bucket_nbytes: int | None = 1024,
    **options: Any,
) -> Plan:
    config = Config(bucket_nbytes=bucket_nbytes, **options)
    topology, rules = topology or flat(world_size), rules or [Rule()]
    owners = assign_owners(specs, rules, topology.world_size)
    return make_plan(specs, config, topology, rules=rules, owners=owners)


specs_of = st.lists(
    st.tuples(st.lists(st.integers(0, 20), max_size=2).map(tuple), st.sampled_from([F32, BF16, F64])),
    min_size=1,
    max_size=12,
).map(lambda pairs: [ParamSpec(f"p{k}", shape, dtype, CPU) for k, (shape, dtype) in enumerate(pairs)])


@given(
    specs=specs_of,
    world_size=st.sampled_from([1, 2, 3, 8, 4096]),
    bucket_nbytes=st.integers(1, 5000),
    stage=st.sampled_from([1, 2]),
    reduce_dtype=st.sampled_from([None, F32, BF16]),
    rule=st.sampled_from([Rule(), Rule(block=256), Rule(whole=True)]),
)
@settings(max_examples=150, deadline=None)
def test_every_parameter_is_in_one_bucket_of_its_kind(
    specs: list[ParamSpec],
    world_size: int,
    bucket_nbytes: int,
    stage: int,
    reduce_dtype: torch.dtype | None,
    rule: Rule,
) -> None:
    """A parameter in no bucket never updates (deepspeed#5639), one in two is counted twice."""
    plan = plan_of(
        specs, world_size=world_size, bucket_nbytes=bucket_nbytes, stage=stage,
        reduce_dtype=reduce_dtype, rules=[rule],
    )  # fmt: skip
    by_name = {spec.name: spec for spec in specs}
    assert sorted(slot.name for b in plan.buckets for slot in b.slots) == sorted(by_name)
    assert [b.index for b in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        members = [by_name[slot.name] for slot in bucket.slots]
        assert {(m.dtype, m.device) for m in members} == {(bucket.param_dtype, bucket.device)}
        assert all(slot.shape == by_name[slot.name].shape for slot in bucket.slots)
        nbytes = sum(math.prod(m.shape) * m.dtype.itemsize for m in members)
        assert nbytes <= bucket_nbytes or sum(1 for m in members if math.prod(m.shape)) == 1
        assert bucket.numel == bucket.layout.numel_padded and bucket.layout.world_size == world_size
        # fp32 or wider in the accumulator, whatever came first
        assert bucket.acc_dtype == (F64 if bucket.param_dtype == F64 else F32)
        assert bucket.has_master == (bucket.param_dtype == BF16)
        for start in (slot.offset for slot in bucket.slots):
            for dtype in (bucket.param_dtype, bucket.grad_dtype):
                assert start * dtype.itemsize % 128 == 0, "every slot starts a memory transaction, in both dtypes"


@given(specs=specs_of)
@settings(max_examples=50, deadline=None)
def test_buckets_follow_the_reverse_order_of_registration(specs: list[ParamSpec]) -> None:
    """The last layer's gradients come first: a bucket of early and late layers would be ready at the very end."""
    for dtype in (F32, BF16, F64):
        expected = [spec.name for spec in reversed(specs) if spec.dtype == dtype]
        plan = plan_of(specs)
        assert [s.name for b in plan.buckets if b.param_dtype == dtype for s in b.slots] == expected


def test_a_plan_written_out() -> None:
    """Literal buckets and offsets of a small model with an fp32 norm inside bf16, stage 2, two ranks."""
    specs = [
        ParamSpec("a.weight", (8, 16), BF16, CPU),  # 256 bytes
        ParamSpec("norm.weight", (8,), F32, CPU),
        ParamSpec("b.weight", (16, 16), BF16, CPU),  # 512 bytes
        ParamSpec("b.bias", (16,), BF16, CPU),  # 32 bytes
    ]
    plan = plan_of(specs, bucket_nbytes=600)
    offsets = [[(s.name, s.offset) for s in b.slots] for b in plan.buckets]
    # bf16: 128 bytes are 64 elements; 32 + 512 bytes fit in 600, 256 more do not
    assert offsets == [[("b.bias", 0), ("b.weight", 64)], [("a.weight", 0)], [("norm.weight", 0)]]
    assert [b.numel for b in plan.buckets] == [384, 128, 64]  # 64 + 256 -> a multiple of 2 * 64; fp32: 2 * 32
    assert [(b.param_dtype, b.grad_dtype, b.acc_dtype) for b in plan.buckets] == [
        (BF16, BF16, F32),
        (BF16, BF16, F32),
        (F32, F32, F32),
    ]


def _transformer(num_layers: int, width: int, vocab: int) -> list[ParamSpec]:
    """The parameters of a Llama: embedding and head of their own, 12 widths squared a layer."""
    layer = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    names = {f"{k}.{name}": shape for k in range(num_layers) for name, shape in {**layer, "norm": (width,)}.items()}
    shapes = {"embedding": (vocab, width), **names, "head": (vocab, width)}
    return [ParamSpec(name, shape, BF16, CPU) for name, shape in shapes.items()]


def _ring(plan: Plan) -> int:
    return max(b.numel * b.grad_dtype.itemsize for b in plan.buckets)


@pytest.mark.parametrize("rule", [Rule(), Rule(whole=True)])
def test_the_default_bucket_of_a_large_model_costs_launches_not_memory(rule: Rule) -> None:
    """1.3 B parameters in 25 MiB are 99 buckets (qkv, out, up, down and the norms make 4 a layer), each of
    which costs the host time in every backward. The ring is as large as the embedding in any case."""
    specs = _transformer(24, 2048, 32768)
    usual = plan_of(specs, bucket_nbytes=25 * 2**20, rules=[rule])
    default = plan_of(specs, bucket_nbytes=None, rules=[rule])
    assert len(usual.buckets) == 99 and len(default.buckets) == 38
    assert _ring(default) == _ring(usual)
    total = sum(math.prod(spec.shape) * 2 for spec in specs)
    filled = [sum(slot.numel * 2 for slot in b.slots) for b in default.buckets]
    assert max(nbytes for nbytes, b in zip(filled, default.buckets, strict=True) if len(b.slots) > 1) <= total / 32


def test_between_hosts_of_cpus_a_bucket_is_8_mib() -> None:
    """On a slow link the last bucket and every gather are waited for."""
    specs = _transformer(8, 512, 8192)
    far = Topology(num_hosts=2)
    assert plan_of(specs, bucket_nbytes=None, topology=far) == plan_of(specs, bucket_nbytes=8 * 2**20, topology=far)


def test_the_default_bucket_of_a_small_model_is_25_mib() -> None:
    """Some 32 buckets of less would overlap no better; and one of more would make a ring that no parameter asks for."""
    small = _transformer(8, 512, 8192)  # 67 MB
    no_large_one = [ParamSpec(f"w{k}", (2048, 2048), BF16, CPU) for k in range(200)]  # 1.7 GB in 8 MB each
    near = Topology(ranks_per_host=2, reads_memory=True)
    for specs in (small, no_large_one):
        plan = plan_of(specs, bucket_nbytes=None, topology=near)
        assert plan == plan_of(specs, bucket_nbytes=25 * 2**20, topology=near)


def test_what_travels_is_the_sum_in_stage_1_and_single_gradients_in_stage_2() -> None:
    """deepspeed#7985: stage 1 sends an fp32 sum of microbatches; rounding it loses what was kept."""
    specs = [ParamSpec("w", (4, 4), BF16, CPU)]
    assert plan_of(specs, stage=1).buckets[0].grad_dtype == F32
    assert plan_of(specs, stage=2).buckets[0].grad_dtype == BF16
    assert plan_of(specs, stage=2, reduce_dtype=F32).buckets[0].grad_dtype == F32


def test_the_stage_table() -> None:
    """ZeRO's definition (arXiv:1910.02054, 5.1 to 5.3) as data. deepspeed#7366 reduced on every microstep without
    need."""
    assert [p.shards_gradients for p in PLACEMENTS.values()] == [False, True, True]
    assert [p.shards_weights for p in PLACEMENTS.values()] == [False, False, True]
    specs = [ParamSpec("w", (4, 4), F32, CPU)]
    for stage, reduces in ((1, False), (2, True), (3, True)):
        inside = plan_of(specs, stage=stage).microbatch()
        assert inside.reduces is reduces and inside.is_boundary is False
        assert dataclasses.replace(inside, is_boundary=True) == plan_of(specs, stage=stage)


def test_a_plan_is_frozen_and_hashable() -> None:
    """It is the key that passes and caches trust."""
    specs = [ParamSpec("w", (4, 4), F32, CPU), ParamSpec("v", (300,), F32, CPU)]
    plan = plan_of(specs)
    assert plan == plan_of(specs) and hash(plan) == hash(plan_of(specs)) and plan != plan_of(specs, world_size=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.buckets = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.buckets[0].index = 3  # type: ignore[misc]


def printed_plans(rank: int, world_size: int) -> tuple[int, list[str]]:
    """Job: a hash of text in this process, and plans."""
    os.environ.update(RANK=str(7 * rank), LOCAL_RANK=str(7 * rank))
    specs = [ParamSpec(f"layer{k}.weight", (k % 5, 7), (F32, torch.bfloat16)[k % 2], CPU) for k in range(40)]
    texts = []
    for rule in (Rule(), Rule(whole=True)):
        owners = assign_owners(specs, [rule], 3)
        plan = make_plan(specs, Config(bucket_nbytes=300), flat(3), rules=[rule], owners=owners)
        texts += [repr(plan)]
    return hash("layer0.weight"), texts


def test_the_plan_is_the_same_in_every_process() -> None:
    """deepspeed#2343, megatron-lm#950: ranks that disagree about a bucket send each other's bytes to the wrong place.

    A set or a dict keyed by objects somewhere in the planning would order buckets by hash, which differs by process.
    """
    (seed, plans), (other_seed, others) = run_ranks(printed_plans, 2)
    assert seed != other_seed, "ranks are of two templates, each with a seed of its own"
    assert plans == others and "layer39.weight" in plans[0]
