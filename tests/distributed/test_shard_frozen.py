"""shard_frozen=True in stages 1 and 2: frozen parameters lie in shards, and what trains stays as it is, bit by bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness import run_ranks
from live_memory import nbytes_since, storages
from test_frozen_shards import DIM, UPDATES, Net, differences, made, train
from tiers import COMPILED, FULL, full_cases
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_runs import environment

import zc
from zc import torch_private
from zc.registry import sharded

OPTIONS: dict[str, Any] = {"bucket_nbytes": 4096, "shard_frozen": True}


def run(rank: int, net: Net, optimizer: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some updates, and the weights after them, with these options; without any under DDP."""
    if options:
        zc.compile(net, optimizer, **options)
    called: Any = net if options else DistributedDataParallel(net)
    losses = train(called, optimizer, rank, range(UPDATES), averages=False)
    if options:
        zc.close(net)
    return losses, {key: value.clone() for key, value in net.state_dict().items()}


def compared(rank: int, world_size: int, has_blocks: bool, backend: str, stage: int) -> list[str]:
    """Job: what differs from DDP, and from the same stage with whole frozen parameters, at two caps. By default
    compiled models have one: caps change the order of gathers, which no compiled segment sees."""
    options = {"backend": backend, "stage": stage}
    _, by_ddp = run(rank, *made(has_blocks))
    losses, wanted = run(rank, *made(has_blocks), **options, bucket_nbytes=4096)
    wrong = differences(wanted, by_ddp, at_most=1e-5)
    for cap in (8192, None) if FULL or backend == "eager" else (8192,):
        got, weights = run(rank, *made(has_blocks), **options, **OPTIONS, weight_nbytes=cap)
        wrong += [f"cap {cap}: losses {got} for {losses}"] * (got != losses)
        wrong += differences(weights, wanted, at_most=0.0)
    return wrong


CELLS = [  # by default not by Inductor, whose segments meet weights in shards in test_sharded_weights.py
    (2, True, "aot_eager", 1), (3, False, "eager", 2), (1, False, "inductor", 2), (1, True, "aot_eager", 2),
    (3, True, "aot_eager", 2), (2, False, "aot_eager", 2), (3, False, "eager", 1), (2, True, "eager", 2),
    (3, True, "inductor", 2), (2, False, "inductor", 2),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "has_blocks", "backend", "stage"), CELLS if FULL else CELLS[:2])
@full_cases("2-True-aot_eager-1")
def test_the_bits_of_whole_frozen_parameters(world_size: int, has_blocks: bool, backend: str, stage: int) -> None:
    assert run_ranks(compared, world_size, has_blocks, backend, stage, timeout=300.0) == [[]] * world_size


# --- bytes ---

WIDE, LOW = 256, 2


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDE, LOW, bias=False), nn.Linear(LOW, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.bfloat16()).float() + self.up(self.down(x))


def held(rank: int, world_size: int, stage: int) -> tuple[int, int, int]:
    """Job: bytes of all live tensors between steps; by `zc.persistent_nbytes`, and by `zc.plan`, without gradients."""
    before = storages()
    net = nn.Sequential(*(Lora() for _ in range(8)))
    optimizer = torch.optim.Adam(param for param in net.parameters() if param.requires_grad)
    zc.compile(net, optimizer, stage=stage, shard_frozen=True, backend="aot_eager")
    for _ in range(2):
        net(torch.ones(1, WIDE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    live = nbytes_since(before)
    gone = ("acc", "flat_grad", "scratch", "arena")
    counted, planned = zc.persistent_nbytes(net), zc.plan(net, optimizer="Adam").device
    zc.close(net)
    return live, *(sum(n for kind, n in kinds.items() if kind not in gone) for kinds in (counted, planned))


def on_hosts(rank: int, world_size: int) -> list[str]:
    """Job: two hosts of two ranks. Each reads the memory of its host after an update, but no shards of frozen weights,
    of which it could read one of each host's."""
    with environment(GROUP_RANK=str(rank // 2)):
        return compared(rank, world_size, False, "eager", 2)


def test_two_hosts() -> None:
    assert run_ranks(on_hosts, 4, timeout=200.0) == [[]] * 4


@pytest.mark.parametrize("stage", [1, 2] if FULL else [2])
def test_a_rank_holds_two_bytes_by_ranks_of_the_backbone_and_its_adapters(stage: int) -> None:
    """fp32 adapters: 4 bytes per parameter whole on each rank, and Adam's 8 by W."""
    num_ranks, backbone, adapters = 2, 8 * WIDE * WIDE, 8 * 2 * LOW * WIDE
    wanted = 2 * backbone / num_ranks + (4 + 8 / num_ranks) * adapters
    for rank in run_ranks(held, num_ranks, stage, timeout=120.0):
        for nbytes in rank:
            assert wanted <= nbytes < 1.01 * wanted


# --- freezing, reading and writing ---


def used(rank: int, world_size: int, backend: str) -> list[str]:
    """Job: unfreezes a layer, reads and writes weights, and loads a state, as plain PyTorch does it; what differs."""
    results = []
    for is_compiled in (False, True):
        net, optimizer = made(True)
        net.layers.float()  # an oracle without masters trains no bf16
        state = {key: 1.5 * value for key, value in net.state_dict().items()}
        if is_compiled:
            zc.compile(net, optimizer, stage=2, backend=backend, **OPTIONS)
        train(net, optimizer, rank, range(2), averages=not is_compiled)
        net.layers[1].base.requires_grad_(True)
        if is_compiled:
            zc.recompile(net)
        train(net, optimizer, rank, range(2, 4), averages=not is_compiled)
        net.layers[1].base.requires_grad_(False)
        net.load_state_dict(state)
        train(net, optimizer, rank, range(4, 6), averages=not is_compiled)
        if is_compiled:
            with pytest.raises(zc.ZcError, match="with shard_frozen=True it has them only inside"):
                net.head.weight.sum()
            with torch_private.without_torch_function():
                empty = {name for name, param in net.named_parameters() if param.untyped_storage().nbytes() == 0}
            assert empty == {name for name in state if "base" in name and ".1." not in name} | {
                "tokens.weight", "head.weight", "head.bias",
            }  # fmt: skip
            with zc.whole_parameters(net), torch.no_grad():
                net.head.bias += 1.0
                net.layers[0].up.weight *= 2.0
        else:
            with torch.no_grad():
                net.head.bias += 1.0
                net.layers[0].up.weight *= 2.0
        train(net, optimizer, rank, range(6, 8), averages=not is_compiled)
        if is_compiled:
            full, state = zc.full_state_dict(net), net.state_dict()
            assert {name for name, value in state.items() if hasattr(value, "full_tensor")} == empty
            state = {name: getattr(value, "full_tensor", value.clone)() for name, value in state.items()}
            assert not full or differences(state, full, at_most=0.0) == []
            zc.close(net)
            results.append(full if rank == 0 else net.state_dict())
        results.append({key: value.clone() for key, value in net.state_dict().items()})
    plain, full, closed = results
    return differences(closed, plain, at_most=1e-5) + differences(full, closed, at_most=0.0)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"] if FULL else ["aot_eager"])
def test_weights_are_unfrozen_read_written_and_loaded(backend: str) -> None:
    assert run_ranks(used, 2, backend, timeout=200.0) == [[], []]


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x).requires_grad_()
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=self.reentrant)
        logits: Tensor = self.head(y)
        return logits


def narrow(_: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(DIM, DIM, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(DIM, DIM))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def combined(rank: int, world_size: int) -> list[str]:
    """Job: what differs between whole and sharded frozen parameters under other options and loops. Compiled in the full
    tier: the gathers of a graph are those of `compared`, and tests/compatibility has checkpointed blocks."""
    wrong = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (made, {"reduce": "native"}),
        (made, {"reduce_dtype": torch.int8, "gather_dtype": "int4"}),
        (narrow, {"param_dtype": torch.bfloat16}),
        (narrow, {"param_dtype": torch.bfloat16, "offload": "cpu", "offload_accumulate": "device"}),
        *([(made, {"offload": "cpu"}), (made, {"overlap": False, "write_in_place": True})] if FULL else []),
    ]
    for make, options in cases:
        with environment(ZC_HOST_MEMORY="0" if "gather_dtype" in options else "1"):  # messages, which are encoded
            two = [
                run(rank, *make(True), stage=2, backend=COMPILED, bucket_nbytes=4096, shard_frozen=flag, **options)
                for flag in (False, True)
            ]
        wrong += [f"{options}: losses {two[1][0]} for {two[0][0]}"] * (two[0][0] != two[1][0])
        wrong += [f"{options}: {each}" for each in differences(two[1][1], two[0][1], at_most=0.0)]
    for reentrant, backend in [(False, COMPILED), (True, "eager"), *([(True, "aot_eager")] if FULL else [])]:
        two = []
        for flag in (False, True):
            torch.manual_seed(0)
            net = Checkpointed(reentrant)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            two.append(run(rank, net, optimizer, stage=1, backend=backend, bucket_nbytes=4096, shard_frozen=flag))
        wrong += [f"{reentrant} {backend}: {each}" for each in differences(two[1][1], two[0][1], at_most=0.0)]
    return wrong


def test_with_other_options_and_checkpointing() -> None:
    assert run_ranks(combined, 2, timeout=300.0) == [[], []]


# --- options, in this process ---


def test_stage_3_takes_the_option_and_is_what_it_was() -> None:
    plans = []
    for options in ({}, {"shard_frozen": True}):
        net, optimizer = made(True)
        zc.compile(net, optimizer, stage=3, backend="eager", **options)
        plans.append(sharded(net).runtime.plan)
        zc.close(net)
    assert plans[0] == plans[1] and plans[0].frozen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_frozen": 1}, "shard_frozen must be True or False, got 1"),
        ({"shard_frozen": True, "overlap_gather": True}, "leave overlap_gather out"),
        ({"weight_nbytes": 4096}, "only stage=3 and shard_frozen=True gather weights"),
        ({"shard_frozen": True, "weight_nbytes": 1024}, r"the largest bucket \(head.weight, ...\) has 4096 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_changes(options: dict[str, Any], words: str) -> None:
    net, optimizer = made(False)
    before = {name: param.data_ptr() for name, param in net.named_parameters()}
    with pytest.raises(zc.PlanError, match=words):
        zc.compile(net, optimizer, stage=2, backend="eager", bucket_nbytes=4096, **options)
    assert before == {name: param.data_ptr() for name, param in net.named_parameters()}


def test_what_is_sharded_is_reported() -> None:
    net, optimizer = made(True)
    zc.compile(net, optimizer, stage=2, backend="aot_eager", **OPTIONS)
    train(net, optimizer, 0, range(1), averages=False)
    report = zc.explain(net)
    zc.close(net)
    assert report.sections["plan"].startswith("stage 2 with frozen parameters in shards, rank 0 of 1")
    assert "frozen: 2,176 bytes on this rank, gathered while they are read" in report.sections["buckets"]
    assert "weight_nbytes allows 8,192" in report.sections["residency of weights, pass 0"]
    assert "frozen: 19,200" in report.sections["persistent bytes"]


def test_a_model_that_trains_whole_is_told() -> None:
    net = nn.Linear(DIM, DIM)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        zc.compile(net, torch.optim.SGD(net.parameters()), backend="eager", shard_frozen=True)
    zc.close(net)
    assert any("shard_frozen=True: no parameter is frozen" in str(each.message) for each in said)
