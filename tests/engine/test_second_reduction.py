"""A mesh of two dimensions in one process, one thread per rank: all replicas get the same bits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_streams import Inline
from torch import Tensor

from zc.config import Config
from zc.engine.buffers import Accumulators, Buffers
from zc.engine.deposits import Deposits
from zc.passes.pipeline import pipeline
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Level, flat
from zc.ranks.routes import Routes

SHAPES = {"weight": (9, 7), "bias": (13,)}
DONE: Any = SimpleNamespace(wait=lambda: None)


class Exchanges:
    """The ranks of one group, as threads: each leaves what it sends, and takes what is for it."""

    def __init__(self, world_size: int) -> None:
        self.sent: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.sent[rank] = tensor.clone()
        self.barrier.wait(60)
        everyone = list(self.sent)
        self.barrier.wait(60)
        return everyone


class FakeGroup:
    def __init__(self, exchanges: Exchanges, rank: int) -> None:
        self.exchanges, self.rank, self.world_size = exchanges, rank, len(exchanges.sent)

    def of_level(self, level: Level) -> FakeGroup:
        return self

    def all_to_all(self, out: Tensor, rows: Tensor, bucket: int) -> Any:
        everyone = self.exchanges.swap(self.rank, rows)
        out.copy_(torch.cat([each.view(self.world_size, -1)[self.rank] for each in everyone]))
        return DONE

    def all_gather(self, out: Tensor, shard: Tensor, what: str, bucket: int) -> Any:
        out.copy_(torch.cat(self.exchanges.swap(self.rank, shard)))
        return DONE


@pytest.mark.parametrize(("num_replicas", "world_size"), [(2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize(("stage", "reduce_dtype"), [(1, None), (2, None), (2, torch.bfloat16)])
def test_every_replica_has_the_mean_in_one_order(
    stage: int, reduce_dtype: torch.dtype | None, num_replicas: int, world_size: int
) -> None:
    specs = [ParamSpec(name, shape, torch.float32, torch.device("cpu")) for name, shape in SHAPES.items()]
    config = Config(stage=stage, reduce_dtype=reduce_dtype, num_buffers=1, overlap=False)
    plan = make_plan(specs, config, flat(world_size), num_replicas=num_replicas)
    (bucket,) = plan.buckets
    torch.manual_seed(0)
    num_ranks = num_replicas * world_size
    updates = [[[torch.randn(slot.shape) for slot in bucket.slots] for _ in range(num_ranks)] for _ in range(2)]
    shards = [Exchanges(world_size) for _ in range(num_replicas)]
    replicas = [Exchanges(num_replicas) for _ in range(world_size)]
    results: dict[int, Tensor] = {}

    def train(rank: int) -> None:
        replica, index = divmod(rank, world_size)
        group = SimpleNamespace(
            shard=FakeGroup(shards[replica], index), replicas=FakeGroup(replicas[index], replica), rank=rank
        )
        buffers = Buffers(plan, index)
        buffers.add(bucket)
        accs = Accumulators(buffers, group, Routes(plan, group, buffers.tables))  # type: ignore[arg-type]
        deposits = Deposits(Inline(), pipeline(in_place=False), accs)  # type: ignore[arg-type]
        for grads in updates[: 2 if stage == 2 else 1]:
            for slot, grad in enumerate(grads[rank]):
                deposits.add(bucket, slot, grad)
            deposits.flush(plan, 0, is_boundary=True, may_reduce=None)
        results[rank] = buffers.acc_shard(bucket).clone()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == num_ranks, "a rank raised"
    wire = bucket.grad_dtype
    for index in range(world_size):
        wanted = torch.zeros(bucket.layout.numel_shard)
        for grads in updates[: 2 if stage == 2 else 1]:
            wanted += mean_of(grads, bucket, slice(*bucket.layout.shard_range(index)), world_size, wire)
        for replica in range(num_replicas):
            assert torch.equal(results[replica * world_size + index], wanted), (replica, index)


def mean_of(grads: Any, bucket: Any, shard: slice, world_size: int, wire: torch.dtype) -> Tensor:
    """By hand: sums in rank order inside each replica, rounded to what travels, then over the replicas in order."""
    rows = []
    for own in grads:
        flat = torch.zeros(bucket.numel)
        for slot, grad in zip(bucket.slots, own, strict=True):
            flat[slot.offset : slot.stop] = grad.flatten()
        rows.append(flat.to(wire).float()[shard])
    sums = []
    for first in range(0, len(rows), world_size):
        total = rows[first].clone()
        for row in rows[first + 1 : first + world_size]:
            total += row
        sums.append(total.to(bucket.net_dtype).float() if world_size > 1 else total)
    whole = sums[0].clone()
    for total in sums[1:]:
        whole += total
    return whole * (1.0 / len(rows))
