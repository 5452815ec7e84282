"""Gradients in 8 bits and weights as differences, between ranks that stand for hosts (torchrun's GROUP_RANK): what
arrives, that bits depend on nothing but the topology, and that state survives writes, skipped steps and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import weights, worst
from tiers import FULL, full_cases
from torch import Tensor, nn
from training_runs import environment

import zc
from zc.registry import sharded

INT8: dict[str, Any] = {"reduce_dtype": torch.int8, "gather_dtype": torch.int8}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 8))


def model_of(options: dict[str, Any], world_size: int, rank: int, per_host: int) -> tuple[nn.Module, Any]:
    with environment(GROUP_RANK=str(rank // per_host)):
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return zc.compile(model, optimizer, **{"backend": "eager", **options})


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 * step + rank)
        with zc.no_sync(model):
            model(torch.randn(4, 64)).square().mean().backward()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(rank: int, world_size: int, per_host: int, every: list[dict[str, Any]]) -> list[Any]:
    """Job: weights after six updates with each of the options, and the bytes of the last one."""
    runs = []
    for options in every:
        model, optimizer = model_of(options, world_size, rank, per_host)
        train(model, optimizer, rank, range(6))
        runs.append((weights(model), dict(sharded(model).runtime.ledger.last.nbytes_sent), str(zc.explain(model))))
    return runs


@pytest.mark.parametrize(
    ("world_size", "per_host", "stages"), [(2, 1, (1, 2)), (4, 2, (1, 2) if FULL else (2,))]
)
@full_cases("2-1-stages0")
def test_bits_depend_on_the_topology_alone(world_size: int, per_host: int, stages: tuple[int, ...]) -> None:
    """Two bucket sizes, overlap, both stages' ways to reduce, and again; all ranks have the same."""
    small = {"bucket_nbytes": 3000}
    variants = [{}, small, {"overlap_gather": True}, {"overlap": False, **small}, {}]
    for stage in stages:
        options = [{"stage": stage}, *({"stage": stage, **INT8, **more} for more in variants)]
        results = run_ranks(run, world_size, per_host, options)
        exact, first = results[0][0][0], results[0][1][0]
        difference = worst(first, exact)[0]
        assert 0.0 < difference < 0.02, "six updates of 0.001 each, some of the other sign"
        for of_rank in results:
            for (trained, _, _), which in zip(of_rank[1:], variants, strict=True):
                assert all(torch.equal(trained[name], first[name]) for name in first), which


def in_stage_3(rank: int, world_size: int, per_host: int, first: dict[str, Any], backend: str) -> bool:
    """Job: whether stage 3 gives the weights of ``first``, for three caps and bucket sizes; by default compiled for two
    of them."""
    states = []
    ways = (first, {}, {"weight_nbytes": 10**7}, {"bucket_nbytes": 3000, "overlap": False})
    for more in ways if FULL or backend == "eager" else ways[2:]:
        encoded = {} if first else {"gather_dtype": torch.int8}
        options = {"stage": 3, "reduce_dtype": torch.int8, "backend": backend, **encoded, **more}
        model, optimizer = model_of(options, world_size, rank, per_host)
        train(model, optimizer, rank, range(6 if FULL else 3))
        states.append(zc.full_state_dict(model))
        assert "gradients in 8 bits" in str(zc.explain(model))
    return all(torch.equal(state[name], value) for state in states for name, value in states[0].items())


@pytest.mark.parametrize(("world_size", "per_host"), [(2, 1), (4, 2)])
@full_cases("4-2")
def test_gradients_in_8_bits_give_stage_3_the_bits_of_stage_2(world_size: int, per_host: int) -> None:
    assert all(run_ranks(in_stage_3, world_size, per_host, {"stage": 2}, "eager"))


@pytest.mark.parametrize(("world_size", "per_host", "backend"), [(2, 1, "aot_eager"), (4, 2, "eager")])
@full_cases("2-1-aot_eager")
def test_weights_in_8_bits_have_the_same_bits_for_every_cap(world_size: int, per_host: int, backend: str) -> None:
    assert all(run_ranks(in_stage_3, world_size, per_host, {}, backend))


def test_inside_a_host_nothing_is_encoded() -> None:
    (plain, asked), *_ = run_ranks(run, 2, 2, [{}, INT8])
    assert all(torch.equal(plain[0][name], asked[0][name]) for name in plain[0])
    assert plain[1] == asked[1] and "8 bits" not in asked[2]


def test_what_leaves_a_host_is_what_was_planned_and_a_quarter() -> None:
    def wide(**options: Any) -> dict[str, int]:
        layers = nn.Sequential(nn.Linear(512, 1024), nn.LayerNorm(1024), nn.Linear(1024, 512))
        return dict(zc.plan(layers, world_size=4, ranks_per_host=2, **options).host_wire)

    for name, number in wide(**INT8).items():
        assert number / wide()[name] == pytest.approx(0.25, rel=0.03)
    results = run_ranks(run, 4, 2, [INT8])
    planned = zc.plan(
        nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 8)),
        world_size=4, ranks_per_host=2, microbatches=2, **INT8,
    ).host_wire  # fmt: skip
    for kind, name in (("reduce, between hosts", "gradients"), ("gather weights, between hosts", "parameters")):
        sent = [sum(results[rank][0][1][kind] for rank in host) for host in ((0, 1), (2, 3))]
        assert sum(sent) == 2 * planned[name], "rows differ in length, so of both hosts together"
    assert "between hosts gradients in 8 bits and weights as differences of 8 bits" in results[0][0][2]


def around(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Job: writes to parameters, a skipped step, a failed backward, NaN, and a save."""
    model, optimizer = model_of(INT8, world_size, rank, 1)
    train(model, optimizer, rank, range(3))
    runtime = sharded(model).runtime
    before = weights(model)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
    zc.clip_grad_norm_(model, 1.0)
    model.zero_grad()  # what a GradScaler's skipped step comes to
    assert all(torch.equal(before[name], value) for name, value in weights(model).items()), "no step, no change"
    masters = [master.clone() for master in runtime.buffers.master_shard]
    pairs = zip(masters, runtime.buffers.flat_param, runtime.plan.buckets, strict=True)
    behind = max(float((m - runtime.buffers.owned(f, b)).abs().max()) for m, f, b in pairs)
    other = zc.state_dict(model, optimizer)["model"]["0.weight"].local.clone()
    with torch.no_grad():
        model[3].weight.data.mul_(0.5)  # a write that autograd does not count
    state = zc.state_dict(model, optimizer)["model"]["3.weight"]
    own = model[3].weight.detach().reshape(-1)[state.start : state.start + len(state.local)]
    is_adopted = torch.equal(state.local, own)
    is_kept = torch.equal(zc.state_dict(model, optimizer)["model"]["0.weight"].local, other)
    is_kept &= other.numel() == 0 or not torch.equal(other, before["0.weight"].reshape(-1)[: len(other)])
    train(model, optimizer, rank, range(3, 4))
    zc.save(folder, model, optimizer)
    x = torch.randn(4, 64)
    x[0, 0] = torch.nan if rank == 1 else 0.0
    model(x).sum().backward()
    norm = float(zc.clip_grad_norm_(model, 1.0))
    return {"behind": behind, "adopted": is_adopted, "kept": is_kept, "norm": norm}


def loaded(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """Job: the weights that a checkpoint gives, and whether they are equal to the masters here."""
    model, optimizer = model_of(options, world_size, rank, 1)
    zc.load(folder, model, optimizer)
    given, buffers = weights(model), sharded(model).runtime.buffers
    pairs = zip(buffers.master_shard, buffers.flat_param, sharded(model).runtime.plan.buckets, strict=True)
    is_equal = all(torch.equal(master, buffers.owned(flat, bucket)) for master, flat, bucket in pairs)
    train(model, optimizer, rank, range(4, 5))
    return given, is_equal


def test_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for each in run_ranks(around, 2, folder):
        assert 0.0 < each["behind"] < 1e-4, "weights are behind their masters by less than a step of the code"
        assert each["adopted"], "a write replaces what was left in the master"
        assert each["kept"], "nothing else loses it"
        assert each["norm"] != each["norm"], "a NaN arrives"
    (exact, _), *_ = run_ranks(loaded, 1, folder, {})
    for world_size, options in ((2, INT8), (3, INT8), (2, {})):
        for given, is_equal in run_ranks(loaded, world_size, folder, options):
            assert is_equal and all(torch.equal(given[name], exact[name]) for name in exact), (world_size, options)


# --- stage 3: the weights themselves are encoded, for each gather ---


def rounded(value: Tensor, top: int) -> Tensor:
    """What 256 elements in a row become with one scale each row; small parameters and vectors stay as they are."""
    if value.dim() < 2 or value.numel() < 1024:
        return value
    rows = nn.functional.pad(value.flatten(), (0, -value.numel() % 256)).view(-1, 256)
    scales = rows.abs().amax(1, keepdim=True) / top
    return ((rows / scales).round() * scales).flatten()[: value.numel()].view(value.shape)


def reads_rounded_weights(rank: int, world_size: int, per_host: int, backend: str, top: int) -> list[str]:
    """Job: a forward reads rounded weights; what leaves zc by any other door is exact."""
    options = {"stage": 3, "gather_dtype": "int4" if top == 7 else torch.int8, "backend": backend}
    model, optimizer = model_of(options, world_size, rank, per_host)
    train(model, optimizer, rank, range(2))
    exact = {name: value.clone() for name, value in plain_state(model).items()}
    x, wrong = torch.linspace(-1, 1, 256).view(4, 64), list[str]()
    plain = layers()
    plain.load_state_dict({name: rounded(value, top) for name, value in exact.items()})
    if (model(x) - plain(x)).abs().max() > (0 if backend == "eager" else 1e-6):  # aot_eager decomposes
        wrong.append("forward")
    loss = model(x).square().mean()
    with zc.whole_parameters(model):  # between a forward and its backward
        wrong += [f"whole {name}" for name, param in model.named_parameters() if not param.equal(exact[name])]
    loss.backward()
    plain(x).square().mean().backward()
    grads = zc.full_grad(model)
    wrong += [f"gradient {name}" for name, p in plain.named_parameters() if (grads[name] - p.grad).abs().max() > 1e-6]
    optimizer.zero_grad()
    wrong += [f"after {name}" for name, value in plain_state(model).items() if not value.equal(exact[name])]
    model(x)
    zc.close(model)
    wrong += [f"closed {name}" for name, param in model.named_parameters() if not param.equal(exact[name])]
    return wrong


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights, on every rank."""
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("world_size", "per_host", "backend", "top"),
    [(2, 1, "eager", 127), (2, 1, "aot_eager", 7), (4, 2, "aot_eager" if FULL else "eager", 127)],
)
@full_cases("2-1-aot_eager-7")
def test_a_forward_of_stage_3_reads_rounded_weights_and_nothing_else_does(
    world_size: int, per_host: int, backend: str, top: int
) -> None:
    for wrong in run_ranks(reads_rounded_weights, world_size, per_host, backend, top):
        assert wrong == []
