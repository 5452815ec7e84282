"""Hosts of several ranks: sums inside of each by memory, between hosts by messages. Ranks of this machine stand for
hosts by torchrun's GROUP_RANK; bench.hosts has them in network namespaces, with the bytes that leave one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from oracle import weights, worst
from tiers import FULL, full_cases, full_only
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import Run, ddp_reference, environment, message_of, zc_weights

import zc
from zc.planning.layout import flat_layout
from zc.ranks.journal import GATHER, REDUCE
from zc.ranks.routes import Memory
from zc.registry import sharded

TOLERANCE = 2e-5  # of weights after six updates: the order of summation is the topology's, and DDP's another


def on_hosts(rank: int, world_size: int, per_host: int, run: Run) -> dict[str, Tensor]:
    """Job: rank r is number r % ``per_host`` of host r // ``per_host``."""
    with environment(GROUP_RANK=str(rank // per_host)):
        return zc_weights(rank, world_size, run)


SHAPES = [(stage, *shape) for stage in (1, 2) for shape in ((4, 2), (3, 1), (4, 4), (4, 1))]


@pytest.mark.parametrize(("stage", "world_size", "per_host"), SHAPES if FULL else [(1, 4, 2), (2, 4, 2), (2, 3, 1)])
def test_ddp_s_weights_and_one_result_for_every_bucket_size(world_size: int, per_host: int, stage: int) -> None:
    backend = "aot_eager" if FULL else "eager"  # how gradients are sent is no part of a graph
    every: list[dict[str, Any]] = [{"bucket_nbytes": 2048}, {"bucket_nbytes": 10**7}, {"overlap_gather": True}]
    every += every[:1] if FULL else []  # that the first gives the same twice is in test_bitwise.py
    runs = [(per_host, Run("mlp", stage=stage, backend=backend, updates=6, options=options)) for options in every]
    wanted = ddp_reference(world_size, "mlp", 1, 6, runs[0][1].make_optimizer, None)
    (_, (first, *_)), *_ = trained = run_cases(on_hosts, world_size, runs, timeout=300.0)
    assert worst(first, wanted)[0] < TOLERANCE
    for (_, run), ranks in trained:
        for result in ranks:
            assert all(torch.equal(result[name], first[name]) for name in wanted), run.options


LARGE = 40000.0  # the sum of two of it is no float16


def large_gradients(rank: int, world_size: int, per_host: int, shape: tuple[int, ...], memory: str) -> list[float]:
    """Job: the mean of four gradients of `LARGE`, by float16."""
    model = nn.Linear(8, 8, bias=False)
    with environment(GROUP_RANK=str(rank // per_host), ZC_HOST_MEMORY=memory):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        zc.compile(model, optimizer, backend="eager", reduce_dtype=torch.float16, mesh=mesh)
    (model.weight * LARGE).sum().backward()
    gradient = zc.full_grad(model)["weight"]
    assert gradient is not None
    return gradient.flatten().tolist()


def test_the_sum_of_a_host_does_not_overflow_in_float16() -> None:
    """It was sent to the other hosts, or replicas, as a sum: infinite where DDP's mean is not."""
    hosts = [(2, (), "1"), (2, (), "0"), (4, (2, 2), "1"), (4, (2, 2), "0")]
    for case, ranks in run_cases(large_gradients, 4, hosts):
        assert all(set(values) == {LARGE} for values in ranks), (case, ranks)


def test_a_rank_s_shard_and_segment() -> None:
    """By hand: 2 hosts of 3, 12 elements, 2 a shard; the l-th ranks of the hosts have the l-th third between them."""
    layout = flat_layout([("w", (12,))], 6, 1, num_hosts=2)
    assert [layout.shard_range(rank) for rank in range(6)] == [(0, 2), (4, 6), (8, 10), (2, 4), (6, 8), (10, 12)]
    assert [layout.net_range(rank) for rank in range(6)] == [(0, 4), (4, 8), (8, 12)] * 2
    assert [layout.rank_of(layout.shard_of(rank)) for rank in range(6)] == list(range(6))


def loop(
    rank: int, world_size: int, per_host: int, folder: str, saves: bool, stage: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Job: two updates of two microbatches and a save, or a load and two more."""
    with environment(GROUP_RANK=str(rank // per_host)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=4000, **options)
    if not saves:
        zc.load(folder, model, optimizer)
    for step in (0, 1) if saves else (2, 3):
        with zc.no_sync(model):
            model(torch.full((2, 40), 0.1 * step)).square().sum().backward()
        model(torch.full((2, 40), 0.1 * step + 0.05)).square().sum().backward()
        zc.clip_grad_norm_(model, 1.0)
        gradient = zc.full_grad(model)
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        zc.save(folder, model, optimizer)
    sent = sharded(model).runtime.ledger.last.nbytes_sent
    return {"weights": weights(model), "gradient": gradient, "explained": str(zc.explain(model)), "sent": sent}


@pytest.mark.parametrize("stage", [1, 2])
@full_cases("1")
def test_a_checkpoint_of_one_topology_loads_in_another(tmp_path: Path, stage: int) -> None:
    """2 hosts of 2, then 1 of 2, then 3 of 1; inputs are the same on all ranks, so all have one result."""
    folder = str(tmp_path / "saved")
    saved = run_ranks(loop, 4, 2, folder, True, stage, {})
    assert all("2 hosts of 2, which read each other's memory" in each["explained"] for each in saved)
    resumed = [run_ranks(loop, *shape, folder, False, stage, {})[0] for shape in ((2, 2), (3, 1), (4, 2))]
    for other in resumed[1:]:
        assert worst(other["weights"], resumed[0]["weights"])[0] < TOLERANCE
        assert worst(other["gradient"], resumed[0]["gradient"])[0] < TOLERANCE


def _own_state(rank: int, world_size: int, per_host: int, state: list[Any] | None) -> Any:
    """Job: this rank's optimizer.state_dict() after an update, or what loading the one given to it says."""
    with environment(GROUP_RANK=str(rank // per_host)):
        torch.manual_seed(0)
        model = nn.Linear(40, 40)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zc.compile(model, optimizer, backend="eager")
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    return optimizer.state_dict() if state is None else message_of(lambda: optimizer.load_state_dict(state[rank]))


@pytest.mark.filterwarnings("ignore:zc")
def test_a_rank_s_part_is_of_one_topology() -> None:
    """4 hosts of 1 and 2 of 2: parts are equally long, and ranks 1 and 2 have each other's."""
    states = run_ranks(_own_state, 4, 1, None)
    for kind, text in run_ranks(_own_state, 4, 2, states):
        assert kind == "CheckpointError" and "another plan" in text
    assert run_ranks(_own_state, 4, 1, states) == [("", "")] * 4


@pytest.mark.parametrize("options", [{"offload": "cpu"}, {"offload": "cpu", "offload_accumulate": "device"}], ids=str)
@full_only
def test_with_offload(tmp_path: Path, options: dict[str, Any]) -> None:
    for stage in (1, 2):
        plain, offloaded = (
            run_ranks(loop, 4, 2, str(tmp_path / f"{stage}{name}"), True, stage, given)
            for name, given in (("a", {}), ("b", options))
        )
        for a, b in zip(plain, offloaded, strict=True):
            assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])


def test_what_leaves_a_host_is_what_was_planned(tmp_path: Path) -> None:
    """2 hosts of 2: half of the padded bytes for a reduction and half for the gather leave each host, whatever its
    ranks; two microbatches of stage 2 reduce twice."""
    results = run_ranks(loop, 4, 2, str(tmp_path / "saved"), True, 2, {})
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    planned = zc.plan(model, world_size=4, ranks_per_host=2, bucket_nbytes=4000, microbatches=2)
    for host in (results[:2], results[2:]):
        kinds = "reduce, between hosts", "gather weights, between hosts"  # `zc.full_grad` gathers as well
        sent = sum(each["sent"][kind] for each in host for kind in kinds)
        assert sent == planned.host_wire["gradients"] + planned.host_wire["parameters"] > 0


INT8: dict[str, Any] = {"reduce_dtype": torch.int8, "gather_dtype": torch.int8}
SIZES: list[dict[str, Any]] = [{"bucket_nbytes": 3000}, {"bucket_nbytes": 9000}, {"overlap_gather": True}]


def _trained(rank: int, world_size: int, memory: str, every: list[dict[str, Any]]) -> list[Any]:
    """Job: 2 hosts. Weights, the last gradient and the bytes of the last update, with each of the options."""
    results = []
    for options in every:
        with environment(GROUP_RANK=str(rank // (world_size // 2)), ZC_HOST_MEMORY=memory):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 40))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            zc.compile(model, optimizer, backend="eager", **options)
        for step in range(2):
            with zc.no_sync(model):
                model(torch.full((2, 40), 0.1 * (step + rank))).square().sum().backward()
            model(torch.full((2, 40), 0.1 * step - rank)).square().sum().backward()
            gradient = {name: grad for name, grad in zc.full_grad(model).items() if grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        sent, explained = dict(sharded(model).runtime.ledger.last.nbytes_sent), str(zc.explain(model))
        with zc.whole_parameters(model) if options.get("stage") == 3 else contextlib.nullcontext():
            trained = weights(model)
        results.append((trained | {f"gradient of {name}": grad for name, grad in gradient.items()}, sent, explained))
        zc.close(model)
    return results


@pytest.mark.filterwarnings("ignore:zc. ranks of this host")
def test_levels_by_messages_give_the_bits_of_levels_by_memory() -> None:
    """The order of a sum is the topology's alone: for three bucket sizes, overlap, all stages, and what is encoded."""
    by_memory = [{"stage": 1}, {"stage": 2}, {"stage": 2, **INT8}]
    expected, *_ = run_ranks(_trained, 4, "1", by_memory)
    of_options = {str(options): bits for options, (bits, _, _) in zip(by_memory, expected, strict=True)}
    every = [{**options, **more} for options in by_memory for more in ({}, *SIZES)]
    every = [*(every if FULL else (every[k] for k in (1, 4, 6, 7, 8, 9))), {"stage": 3}]
    results = run_ranks(_trained, 4, "0", every)
    for of_rank in results:
        for options, (bits, _, explained) in zip(every, of_rank, strict=True):
            key = str({name: options[name] for name in ("stage", *INT8) if name in options})
            wanted = of_options[key.replace("3", "2")]
            assert all(torch.equal(bits[name], wanted[name]) for name in wanted), options
            assert "2 hosts of 2" in explained and "read from" not in explained
    layers = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 40))
    planned = zc.plan(layers, world_size=4, ranks_per_host=2, microbatches=2).host_wire
    sent = [results[rank][every.index({"stage": 2})][1] for rank in (0, 1)]
    between = {kind: sum(each[kind] for each in sent) for kind in sent[0] if "between hosts" in kind}
    assert between == {
        "reduce, between hosts": planned["gradients"], "gather weights, between hosts": planned["parameters"],
        "gather gradient, between hosts": planned["parameters"],
    }  # fmt: skip


def _in_other_orders(rank: int, world_size: int) -> Tensor:
    """Job: 2 hosts whose ranks read memory, in stage 3. On one a gather starts before a reduction, on the other after
    it, as two streams have it. Returns the weights after a step."""
    with environment(GROUP_RANK=str(rank // 2), ZC_HOST_MEMORY="1"):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zc.compile(model, optimizer, backend="eager", stage=3)
    group = sharded(model).runtime.group.shard
    mine = torch.full((4,), float(rank))

    def gather() -> None:
        assert group.levels is not None
        group.levels.host.all_gather(torch.empty(8), mine, GATHER, 0).wait()

    def reduce() -> None:
        Memory(group).read_each_other(REDUCE, 0, mine, lambda places: None)

    for exchange in (gather, reduce) if rank < 2 else (reduce, gather):
        exchange()
    model(torch.full((2, 8), rank + 1.0)).sum().backward()
    optimizer.step()
    with zc.whole_parameters(model):
        return model.weight.detach().clone()


def test_gathers_and_reductions_have_no_order_between_them() -> None:
    """They run on two streams, so which of two starts first is no difference between ranks."""
    first, *others = run_ranks(_in_other_orders, 4)
    assert all(torch.equal(first, other) for other in others)


def _with_a_row(rank: int, world_size: int) -> Tensor:
    """Job: the weight after a step with the ranks of one row of a mesh of (2, 2)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))["data"]
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager", mesh=mesh)
    model(torch.full((2, 8), rank + 1.0)).sum().backward()
    optimizer.step()
    return model.weight.detach().clone()


def test_a_mesh_of_some_ranks() -> None:
    """By hand: a weight's gradient is the mean of 2 and 4 in one row, of 6 and 8 in the other."""
    torch.manual_seed(0)
    first = nn.Linear(8, 8).weight.detach()
    for weight, gradient in zip(run_ranks(_with_a_row, 4), (3.0, 3.0, 7.0, 7.0), strict=True):
        torch.testing.assert_close(weight, first - 0.1 * gradient)
