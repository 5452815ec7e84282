"""What zc.planning.allocations says is what Buffers has: the bytes of all its tensors, of each rank."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zc.checks import check_plan
from zc.config import Config
from zc.engine.buffers import Buffers
from zc.errors import PlanError
from zc.offload.host_step import HostMemory
from zc.planning.allocations import KINDS, most_nbytes, nbytes_of, resident
from zc.planning.layout import Rule
from zc.planning.ownership import assign_owners
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Into, Plan, Topology, Way, flat
from zc.ranks.routes import Messages, Replicas, Route, Sum

pytestmark = pytest.mark.check

CPU, WORLD, PIECE = torch.device("cpu"), 4, 256
SHAPES = {"a": (33, 8), "b": (8,), "c": (65, 8), "d": (7, 5), "e": (16, 16)}
# by the optimizer, or for a pass, an update or a sum alone
NOT_ALLOCATED = {"optimizer_state", "arena", "whole_grad", "sum"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "bf16": {"param_dtype": torch.bfloat16}, "8 bits": {"gather_dtype": torch.int8},
    "offload": {"offload": "cpu"}, "offload of bf16": {"offload": "cpu", "param_dtype": torch.bfloat16},
    "accumulates on the device": {"offload": "cpu", "offload_accumulate": "device"}, "a ring of 3": {"num_buffers": 3},
}  # fmt: skip


def plans() -> dict[str, Plan]:
    found: dict[str, Plan] = {}
    places = {"one host": flat(WORLD), "a host with memory": Topology(1, 4, True)}
    places["two hosts"] = Topology(2, 2)
    for way, stage, place, whole in itertools.product(WAYS, (1, 2, 3), places, (False, True)):
        config = Config(stage=stage, bucket_nbytes=1500, **WAYS[way])
        dtype = config.param_dtype or torch.float32
        specs = [ParamSpec(name, shape, dtype, CPU, int(whole and name == "b")) for name, shape in SHAPES.items()]
        rules = [Rule(whole=True), Rule()] if whole else [Rule()]
        try:
            owners = assign_owners(specs, rules, WORLD)
            plan = make_plan(specs, config, places[place], rules=rules, owners=owners)
            check_plan(plan)
        except PlanError:
            continue  # zc.compile refuses it
        found[f"{way}, stage {stage}, {place}, {'whole' if whole else 'slices'}"] = plan
    return found


PLANS = plans()


def allocated(plan: Plan, rank: int) -> int:
    """Bytes of all storages, each once, while there are gradients."""
    buffers = Buffers(plan, rank, HostMemory(CPU))
    for bucket in plan.with_weights:
        buffers.add(bucket)
    buffers.add_staging()
    for bucket in plan.buckets:
        buffers.allocate(bucket)
    storages = [tensor.untyped_storage() for tensors in buffers.all_tensors for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_each_way_is_planned() -> None:
    for word in (*WAYS, *(f"stage {k}" for k in (1, 2, 3)), "two hosts", "memory", "whole", "slices"):
        assert any(word in name for name in PLANS), word


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_has_what_the_table_says(name: str) -> None:
    plan, on_ranks = PLANS[name], []
    for rank in range(WORLD):
        said = nbytes_of(plan, rank)
        assert list(said) == [kind for kind in KINDS if kind in said], "in one order"
        assert allocated(plan, rank) == sum(n for kind, n in said.items() if kind not in NOT_ALLOCATED)
        on_ranks.append(said)
    device, host = most_nbytes(plan, on_host=False), most_nbytes(plan, on_host=True)
    for kind in {*device, *host} - {"optimizer_state"}:
        largest = max(said.get(kind, 0) for said in on_ranks)
        assert device.get(kind, 0) + host.get(kind, 0) == largest, f"{kind}: the most that any rank has"
    ours, theirs, _ = resident(plan, [2, 2])
    assert ours | {"optimizer_state": 0} == device | {"optimizer_state": 0}
    assert theirs.keys() - {"optimizer_state"} == host.keys()


def test_what_was_moved_aside_counts() -> None:
    plan = PLANS["plain, stage 1, one host, slices"]
    buffers = Buffers(plan, 0)
    for bucket in plan.buckets:
        buffers.add(bucket)
    assert "spill" not in buffers.nbytes()
    first = plan.buckets[0]
    buffers.allocate_spill(first, first.layout.numel_shard)
    assert buffers.nbytes()["spill"] == first.layout.numel_shard * 4


def test_only_what_sends_differences_has_published_weights() -> None:
    """In stage 3 gathers bring weights, not differences; an estimate counted `published` there, one shard too many."""
    kinds = {stage: nbytes_of(PLANS[f"8 bits, stage {stage}, two hosts, slices"], 0) for stage in (2, 3)}
    assert kinds[2]["published"] > 0 and "published" not in kinds[3] and kinds[3]["update"] > 0


class Made(TorchDispatchMode):
    """Counts the bytes of what is allocated inside, without the kernels' pieces, of `PIECE` elements here."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like)
        if is_new and result.numel() > PIECE:
            self.nbytes += result.nbytes
        return result


def reduce_by_messages(plan: Plan) -> int:
    """The most bytes that a hop by messages makes, without what it was given and without anybody to send to."""
    most, bucket = 0, max(plan.buckets, key=lambda bucket: bucket.numel)
    for hop in plan.hops:
        ranks: Any = SimpleNamespace(world_size=hop.num_ranks, all_to_all=_sent, all_gather=_sent)
        route: Route = Replicas(ranks) if hop.way is Way.REPLICAS else Messages(ranks, hop)
        is_last = hop.into is Into.ACCUMULATOR
        total = torch.zeros(hop.numel_sum(bucket), dtype=bucket.acc_dtype if is_last else bucket.net_dtype)
        sent = torch.ones(hop.numel_sent(bucket), dtype=hop.dtype(bucket))
        with Made() as made:
            route.take(bucket, sent, scratch := torch.zeros(hop.nbytes_scratch(plan, bucket), dtype=torch.uint8))
            route.finish(bucket, scratch, Sum(total, hop.scale))
        most = max(most, made.nbytes)
    return most


def _sent(*_: Any) -> Any:
    return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hosts", "replicas"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_what_a_route_makes_while_it_sums_is_planned(
    hosts: int, replicas: int, reduce_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in fp32 that travels on in bf16, and the piece that a replica sums for all: no list of memory had them."""
    monkeypatch.setattr("zc.kernels._common.CHUNK", PIECE)
    specs = [ParamSpec("a", (256, 256), torch.float32, CPU)]
    topology = flat(WORLD) if hosts == 1 else Topology(2, 2)
    plan = make_plan(specs, Config(reduce_dtype=reduce_dtype), topology, rules=[Rule()], num_replicas=replicas)
    expected = nbytes_of(plan, 0).get("sum", 0)
    assert reduce_by_messages(plan) == expected
    assert (expected > 0) == (replicas > 1 or (hosts > 1 and reduce_dtype == torch.bfloat16))
