"""Stage 3 with frozen parameters: in shards, gathered like the others, in their own dtype, and free to train later."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import seeded
from oracle import relative
from tiers import FULL, full_cases
from torch import Tensor, nn

import zc
from zc import torch_private
from zc.registry import sharded

DIM, LAYERS, RANK, UPDATES = 32, 5, 2, 4


class Adapted(nn.Module):
    """A frozen bf16 matrix, and two narrow fp32 ones that train (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, RANK, bias=False), nn.Linear(RANK, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.up(self.down(x))
        return x + torch.tanh(self.base(x.to(self.base.weight.dtype)).float() + low)


class Net(nn.Module):
    """``has_blocks``: its layers are blocks, each compiled on its own. Embedding and head are frozen."""

    def __init__(self, has_blocks: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIM, DIM).requires_grad_(False)
        layers = [Adapted() for _ in range(LAYERS if has_blocks else 3)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for layer in self.layers:
            y = layer(y)
        logits: Tensor = self.head(y)
        return logits


def made(has_blocks: bool) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(has_blocks)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)  # the frozen ones are in it, too


def train(net: Net, optimizer: torch.optim.Optimizer, rank: int, updates: range, *, averages: bool) -> list[float]:
    losses = []
    for update in updates:
        for microbatch in range(2):
            x = torch.randint(0, DIM, (2, 6), generator=seeded(rank, 2 * update + microbatch))
            loss = net(x).square().mean()
            loss.backward()
        for param in (p for p in net.parameters() if p.requires_grad) if averages else ():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), net(x).sum().item()]
    return losses


def differences(got: dict[str, Tensor], wanted: dict[str, Tensor], *, at_most: float) -> list[str]:
    assert got.keys() == wanted.keys()
    errors = {key: relative(got[key], value) for key, value in wanted.items()}
    return [f"{key} differs by {error:.1e}" for key, error in errors.items() if not error <= at_most]


def stages(rank: int, world_size: int, has_blocks: bool, backend: str) -> list[str]:
    """Job: what differs between stage 2, where frozen parameters are whole, and stage 3 with two caps. By default
    one is compiled: test_sharded_weights.py has graphs for every cap."""
    net, optimizer = made(has_blocks)
    zc.compile(net, optimizer, stage=2, backend=backend, bucket_nbytes=4096)
    values = train(net, optimizer, rank, range(UPDATES), averages=False)
    wanted, wrong = {key: value.clone() for key, value in net.state_dict().items()}, []
    zc.close(net)
    for cap in (8192, None) if FULL or backend == "eager" else (8192,):
        net, optimizer = made(has_blocks)
        zc.compile(net, optimizer, stage=3, backend=backend, bucket_nbytes=4096, weight_nbytes=cap)
        got = train(net, optimizer, rank, range(UPDATES), averages=False)
        if (got != values) if not has_blocks else not torch.allclose(torch.tensor(got), torch.tensor(values), 1e-4):
            wrong.append(f"cap {cap}: {got} for {values}")
        with torch_private.without_torch_function():
            assert all(param.untyped_storage().nbytes() == 0 for param in net.parameters())
        state = zc.full_state_dict(net)
        assert bool(state) == (rank == 0)
        wrong += differences(state, wanted, at_most=1e-5 if has_blocks else 0.0) if state else []
        with zc.whole_parameters(net):
            net.head.weight.data.mul_(2.0)
        zc.close(net)
        wanted_now = {**wanted, "head.weight": 2 * wanted["head.weight"]}
        wrong += differences(net.state_dict(), wanted_now, at_most=1e-5 if has_blocks else 0.0)
    return wrong


# Inductor's segments meet frozen shards in test_shard_frozen.py, and stage 3 in test_sharded_weights.py
@pytest.mark.parametrize(
    ("world_size", "has_blocks", "backend"),
    [(2, True, "aot_eager"), (3, False, "eager"), *([(2, False, "inductor")] if FULL else [])],
)
@full_cases("2-True-aot_eager")
def test_the_weights_of_stage_2(world_size: int, has_blocks: bool, backend: str) -> None:
    assert run_ranks(stages, world_size, has_blocks, backend, timeout=300.0) == [[]] * world_size


def bytes_of(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Job: what a rank holds, before a forward and after an update."""
    net, optimizer = made(True)
    zc.compile(net, optimizer, stage=3, backend="aot_eager", bucket_nbytes=4096)
    before = sharded(net).runtime.buffers.nbytes()
    train(net, optimizer, rank, range(1), averages=False)
    after = sharded(net).runtime.buffers.nbytes()
    zc.close(net)
    return before, after


def test_a_rank_holds_two_bytes_by_ranks_of_a_frozen_parameter() -> None:
    """Five bf16 layers of 32 x 32 and 32, an fp32 embedding of 32 x 32, an fp32 head of 32 x 32 and 32; adapters of
    2 x 32 each way. On two ranks a bf16 layer takes 2,112 bytes, of which a rank has 1,056, padded to 128 bytes."""
    for before, after in run_ranks(bytes_of, 2, timeout=120.0):
        assert before["frozen"] == after["frozen"] == 5 * 1152 + (4096 + 4096 + 128) // 2 + 64
        assert before["weight"] == after["weight"] == 5 * 512 // 2
        assert before["flat_param"] == 0


def unfrozen(rank: int, world_size: int, backend: str, has_blocks: bool) -> list[str]:
    """Job: freezes and unfreezes on the way, with zc and with an all-reduce; what differs."""
    results = []
    for is_compiled in (False, True):
        net, optimizer = made(has_blocks)
        net.layers.float()  # an oracle without masters trains no bf16
        if is_compiled:
            zc.compile(net, optimizer, stage=3, backend=backend, bucket_nbytes=4096)
        for number, names in enumerate(((), ("tokens.weight", "layers.1.base.weight"), ("head.bias", "head.weight"))):
            for name in names:
                net.get_parameter(name).requires_grad_(True)
            if number == 2:
                net.get_parameter("tokens.weight").requires_grad_(False)  # it stays where it is
            if is_compiled and names:
                zc.recompile(net)
            train(net, optimizer, rank, range(2 * number, 2 * number + 2), averages=not is_compiled)
        if is_compiled:
            zc.close(net)
        results.append({key: value.clone() for key, value in net.state_dict().items()})
    return differences(results[1], results[0], at_most=1e-5)


# test_sharded_weights.py unfreezes in one compiled graph
@pytest.mark.parametrize(
    ("backend", "has_blocks"), [("eager", False), *([("aot_eager", True), ("aot_eager", False)] if FULL else [])]
)
def test_what_unfreezes_trains(backend: str, has_blocks: bool) -> None:
    assert run_ranks(unfrozen, 2, backend, has_blocks, timeout=200.0) == [[], []]
