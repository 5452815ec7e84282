"""Hosts of several GPUs: gradients are summed inside a host first, weights gathered between hosts first. Which bytes
leave a host, for up to 32 ranks as threads of one process; and the order of both communicators' kernels."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clocks import Lists, compare, recorded
from harness import run_ranks
from inline_streams import Inline
from tiers import FULL
from torch import Tensor, nn
from training_runs import environment

import zc
from zc.config import Config
from zc.engine.buffers import Accumulators, Buffers
from zc.engine.deposits import Deposits
from zc.engine.operations import Operations
from zc.engine.program import build
from zc.engine.weights import gather_graph
from zc.passes import insert_events, scheduling, verify
from zc.passes.pipeline import pipeline
from zc.planning.allocations import sent_between_hosts, shared
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, Topology
from zc.ranks import exchanges, group
from zc.ranks.group import Group
from zc.ranks.routes import Routes

SHAPE = (1024, 256)
NUMEL = 1024 * 256
Members = tuple[int, ...]


class Wires:
    """torch.distributed between threads, each a rank: collectives of the groups that their members name. ``left``: by
    rank, the bytes for ranks of other hosts; ``order``: by rank, the collectives, each with its members."""

    def __init__(self, hosts: Topology) -> None:
        self.hosts = hosts
        self.left: Counter[int] = Counter()
        self.order: dict[int, list[tuple[str, Members, int]]] = defaultdict(list)
        self._barriers: dict[Members, threading.Barrier] = {}
        self._sent: dict[tuple[Members, int], list[Tensor]] = {}
        self._lock = threading.Lock()
        self._rank = threading.local()

    def begin(self, rank: int) -> None:
        self._rank.number = rank

    def _swap(self, kind: str, members: Members, pieces: list[Tensor]) -> list[Tensor]:
        """What all members have for this one; ``pieces``: what this one has for each of them."""
        rank = self._rank.number
        self.order[rank].append((kind, members, sum(piece.nbytes for piece in pieces)))
        for other, piece in zip(members, pieces, strict=True):
            if self.hosts.host_of(other) != self.hosts.host_of(rank):
                self.left[rank] += piece.nbytes
        with self._lock:
            barrier = self._barriers.setdefault(members, threading.Barrier(len(members)))
        self._sent[members, rank] = [piece.clone() for piece in pieces]
        barrier.wait(120)
        received = [self._sent[members, other][members.index(rank)] for other in members]
        barrier.wait(120)
        return received

    def all_to_all_single(
        self, out: Tensor, rows: Tensor, out_splits: Any = None, splits: Any = None, *, group: Any, async_op: bool
    ) -> Done:
        received = self._swap("all_to_all", group, list(rows.split(splits or len(rows) // len(group))))
        out.copy_(torch.cat(received))
        assert not out_splits or [len(piece) for piece in received] == out_splits
        return Done()

    def all_gather_single(self, out: Tensor, shard: Tensor, *, group: Any, async_op: bool) -> Done:
        out.copy_(torch.cat(self._swap("all_gather", group, [shard] * len(group))))
        return Done()

    def all_gather(self, rows: list[Tensor], own: Tensor, *, group: Any, async_op: bool) -> Done:
        for row, received in zip(rows, self._swap("all_gather", group, [own] * len(group)), strict=True):
            row.copy_(received)
        return Done()


class Done:
    """A collective that is over when it starts."""

    def wait(self, *limit: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def group_of(number: int, ranks: Members, hosts: Topology) -> Group:
    """As `Group.open_data` leaves it where a backend other than gloo carries tensors."""
    group = object.__new__(Group)
    exchanges.Exchanges.__init__(group, number, len(ranks), None)
    group.topology, group.data = hosts, ranks  # type: ignore[assignment]
    group._shard = group.replicas = group.levels = group._neighbours = None
    group._by_memory, group._waits_on_stream = False, True
    group._new_data = lambda members: tuple(ranks[k] for k in members)
    return group


def plan_of(hosts: Topology, stage: int, dtype: torch.dtype, num_replicas: int = 1, **options: Any) -> Plan:
    specs = [ParamSpec("weight", SHAPE, dtype, torch.device("cpu"))]
    config = Config(stage=stage, num_buffers=1, overlap=False, **options)
    return make_plan(specs, config, hosts, num_replicas=num_replicas)


def run_threads(hosts: Topology, plan: Plan, grads: list[Tensor]) -> tuple[Wires, list[Tensor], list[Tensor]]:
    """What is sent; by rank the mean gradient of its shard, and the weights after each rank has changed its shard."""
    wires, means, weights = Wires(hosts), dict[int, Tensor](), dict[int, Tensor]()
    bucket, passes = plan.buckets[0], [scheduling.PASS, insert_events.PASS, verify.PASS]

    def train(rank: int) -> None:
        wires.begin(rank)
        row, number = divmod(rank, hosts.world_size)
        group = group_of(number, tuple(range(row * hosts.world_size, (row + 1) * hosts.world_size)), hosts)
        replicas = tuple(range(number, plan.num_ranks, hosts.world_size))
        buffers = Buffers(plan, number)
        group.open_levels()
        buffers.add(bucket)
        buffers.add_staging()
        buffers.flat_param[0].fill_(1.0)
        columns = group_of(row, replicas, Topology(len(replicas), 1)) if len(replicas) > 1 else None
        ranks = SimpleNamespace(shard=group, replicas=columns, rank=rank)
        accs = Accumulators(buffers, ranks, Routes(plan, ranks, buffers.tables))  # type: ignore[arg-type]
        deposits = Deposits(Inline(), pipeline(in_place=False), accs)  # type: ignore[arg-type]
        deposits.add(bucket, 0, grads[rank].to(bucket.param_dtype))
        deposits.flush(plan, 0, is_boundary=True, may_reduce=None)
        means[rank] = buffers.acc_shard(bucket).clone()
        own = buffers.master_shard[0] if plan.gather_encoding else buffers.shard(buffers.flat_param[0], bucket)
        own.fill_(number + 2.0)
        gather = [each._replace(requires=frozenset()) for each in passes]
        build(gather_graph(plan, [0]), plan, gather, Operations(accs), name="gather")([], Inline())  # type: ignore[arg-type]
        weights[rank] = buffers.flat_param[0].clone()

    with pytest.MonkeyPatch.context() as patch:
        for module in (exchanges, group):
            patch.setattr(module, "dist", wires)
        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(plan.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ranks = range(plan.num_ranks)
    return wires, [means[rank] for rank in ranks], [weights[rank] for rank in ranks]


SHAPES = {(2, 2): 1 / 2, (2, 4): 1 / 2, (2, 8): 1 / 2, (4, 8): 3 / 4}  # H, L -> (H - 1) / H
EVERY = [(*shape, stage) for shape in SHAPES for stage in (1, 2)]
SAMPLE = [(2, 2, 1), (2, 2, 2), (2, 8, 2), (4, 8, 2)]  # each rank makes and proves its schedules


@pytest.mark.parametrize(("num_hosts", "per_host", "stage"), EVERY if FULL else SAMPLE)
def test_what_leaves_a_host_and_in_which_order(num_hosts: int, per_host: int, stage: int) -> None:
    """(H - 1) / H of the model for the gradients and as much for the weights, whatever L is."""
    hosts = Topology(num_hosts, per_host)
    torch.manual_seed(0)
    grads = [torch.randn(SHAPE) for _ in range(hosts.world_size)]
    plan = plan_of(hosts, stage, torch.float32)
    wires, means, weights = run_threads(hosts, plan, grads)

    sums = [sum(grads[h * per_host + 1 : (h + 1) * per_host], grads[h * per_host]) for h in range(num_hosts)]
    mean = sum(sums[1:], sums[0]).flatten() * (1 / hosts.world_size)
    size = NUMEL // hosts.world_size
    for rank in range(hosts.world_size):
        start = (rank % per_host * num_hosts + rank // per_host) * size
        assert torch.equal(means[rank], mean[start : start + size]), "in rank order in a host, then over hosts"
        for shard, other in enumerate(weights[rank].view(hosts.world_size, -1)):
            assert (other == 2.0 + shard % num_hosts * per_host + shard // num_hosts).all()

    of_host = sum(wires.left[rank] for rank in range(per_host))
    assert of_host == 2 * SHAPES[num_hosts, per_host] * NUMEL * 4
    assert of_host == sum(sent_between_hosts(plan, 1, per_host).values())
    check_order(wires, hosts)

    wires, means, _ = run_threads(hosts, plan_of(hosts, stage, torch.float32, reduce_dtype=torch.int8,
                                                 gather_dtype=torch.int8), grads)  # fmt: skip
    encoded = sum(wires.left[rank] for rank in range(per_host))
    assert encoded / of_host == pytest.approx(0.25, rel=0.03)
    for rank in range(hosts.world_size):
        start = (rank % per_host * num_hosts + rank // per_host) * size
        error = (means[rank] - mean[start : start + size]).abs().max()
        assert 0.0 < error < max(each.abs().max() for each in sums) / 127 * num_hosts / 2 / hosts.world_size * 1.01
    check_order(wires, hosts)


def check_order(wires: Wires, hosts: Topology) -> None:
    """All ranks issue the same kernels in the same order, inside their host and between hosts, one after another."""

    def in_words(rank: int) -> list[tuple[str, str]]:
        levels = {hosts.of_host(rank): "host", hosts.across(rank): "net"}
        return [(kind, levels[members]) for kind, members, _ in wires.order[rank]]

    expected = [("all_to_all", "host"), ("all_to_all", "net"), ("all_gather", "net"), ("all_gather", "host")]
    assert all(in_words(rank) == expected for rank in range(hosts.world_size)), wires.order


def in_ring(plan: Plan) -> dict[str, int]:
    """Bytes of one buffer of each kind."""
    return {room.kind: room.nbytes for room in shared(plan, 0)}


def test_bf16_gradients_are_summed_in_fp32_inside_a_host() -> None:
    """No buffer is larger than with one level: the sum of a host, in fp32, lies where the bf16 gradients were."""
    hosts = Topology(2, 2)
    torch.manual_seed(0)
    grads = [torch.randn(SHAPE).bfloat16().float() for _ in range(4)]
    plan, one_level = plan_of(hosts, 2, torch.bfloat16), plan_of(Topology(4, 1), 2, torch.bfloat16)
    _, means, _ = run_threads(hosts, plan, grads)
    mean = ((grads[0] + grads[1]) + (grads[2] + grads[3])).flatten() * 0.25
    assert torch.equal(torch.cat([means[rank] for rank in (0, 2, 1, 3)]), mean)
    assert in_ring(plan) == in_ring(one_level)
    for stage in (1, 2):
        levels, flat = (plan_of(each, stage, torch.float32) for each in (hosts, Topology(4, 1)))
        assert in_ring(levels) == in_ring(flat)


@pytest.mark.parametrize("stage", [1, 2])
def test_replicas_on_several_hosts_each(stage: int) -> None:
    """A mesh of (2, 4) on 4 hosts of 2: inside a host, between the hosts of a replica, between replicas."""
    hosts = Topology(2, 2)
    torch.manual_seed(0)
    grads = [torch.randn(SHAPE) for _ in range(8)]
    plan = plan_of(hosts, stage, torch.float32, num_replicas=2)
    wires, means, weights = run_threads(hosts, plan, grads)
    first, second = ((grads[k] + grads[k + 1]) + (grads[k + 2] + grads[k + 3]) for k in (0, 4))
    mean = (first + second).flatten() * 0.125
    for row in (0, 4):
        assert torch.equal(torch.cat([means[row + rank] for rank in (0, 2, 1, 3)]), mean)
        expected = torch.tensor([2.0, 4.0, 3.0, 5.0])  # shards in the order of the layout
        assert all(torch.equal(weights[row + k].view(4, -1)[:, 0], expected) for k in range(4))
    planned = sent_between_hosts(plan, 1, 2)
    assert [wires.left[k] + wires.left[k + 1] for k in (0, 2, 4, 6)] == [sum(planned.values())] * 4
    # a half of gradients inside a replica, two quarters of each rank's shard between replicas; a half of weights
    assert planned == {"gradients": NUMEL * 2 + NUMEL * 2, "parameters": NUMEL * 2}


def _steps(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Lists, list[str], list[str], list[Tensor]]:
    """Job: 2 hosts of 2 GPUs."""
    with recorded() as (gpu, _), environment(GROUP_RANK=str(rank // 2)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zc.compile(model, optimizer, backend="eager", bucket_nbytes=5000, **options)
        for step in range(2):
            with zc.no_sync(model):
                model(torch.full((2, 32), float(rank + step))).square().sum().backward()
            model(torch.full((2, 32), float(rank - step))).square().sum().backward()
            zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        zc.synchronize(model)
        return gpu.collectives, gpu.errors, gpu.order, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 2, "overlap_gather": True}, {"stage": 2, "reduce_dtype": torch.int8}],
    ids=str,
)
def test_both_communicators_have_one_order_on_all_ranks(options: dict[str, Any]) -> None:
    """On the streams of a GPU: no rank's kernel inside a host waits for one that another rank issues after a kernel
    between hosts, or the other way round. And no stream reads what another one has not finished."""
    lists, errors, orders, weights = zip(*run_ranks(_steps, 4, options), strict=True)
    assert not compare(lists) and not any(errors), (compare(lists), errors)
    assert all(order == orders[0] for order in orders)
    kinds = {entry.split(" of ")[0] for entry in orders[0]}
    assert kinds >= {f"{level}: {kind}" for level in ("host", "net") for kind in ("alltoall_base_", "_allgather_base_")}
    assert "all: alltoall_base_" not in kinds
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))
