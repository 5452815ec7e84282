"""zc.iter_weights: whole weights one after the other, on all ranks or some, also where ranks leave the loop early."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import seeded
from torch import nn

import zc
from zc.engine.buffers import Buffers
from zc.planning.layout import ALIGN_NBYTES


class Net(nn.Module):
    """A tied weight, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.head = nn.Linear(16, 32)
        self.head.weight = self.tokens.weight
        self.layers[2].requires_grad_(False)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        loss: torch.Tensor = self.head(y).square().mean() * self.scale
        return loss


def trained(rank: int, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    zc.compile(net, optimizer, backend="eager", bucket_nbytes=1200, **options)
    for update in range(2):
        net(torch.randint(0, 32, (3, 8), generator=seeded(rank, update))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def update_between(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in zc.iter_weights(net):
        optimizer.step()


def loops(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    """Job: what is wrong in loops over the weights. The oracle is the plain module that zc.close leaves."""
    wrong = []
    net, optimizer = trained(rank, options)
    everywhere = dict(zc.iter_weights(net))
    on_last = dict(zc.iter_weights(net, ranks=[world_size - 1]))
    some = []
    for name, value in zc.iter_weights(net):
        some.append((name, value))
        if rank == 0 and len(some) == 2:
            break  # the others go on
    if rank == 0:
        assert len(some) == 2
    else:
        wrong += [] if {n for n, _ in some} == set(everywhere) else ["a rank that stayed lost some"]
    first = next(iter(zc.iter_weights(net)))  # all leave at once
    if options.get("stage") == 3:
        with pytest.raises(zc.ZcError, match="between two whole weights"):
            update_between(net, optimizer)
    full = zc.full_state_dict(net)
    for ranks in ([world_size], 0, "all"):
        with pytest.raises(zc.PlanError, match="ranks 0 to 1, as in"):
            zc.iter_weights(net, ranks=ranks)
    with pytest.raises(zc.PlanError, match="this NoneType was not compiled"):
        zc.iter_weights(None)
    zc.close(net)
    wanted = {key: value.clone() for key, value in net.state_dict().items()}
    for what, got, keys in (
        ("all ranks", everywhere, set(wanted)),
        ("the last rank", on_last, set(wanted) if rank == world_size - 1 else set()),
        ("full_state_dict", full, set(wanted) if rank == 0 else set()),
        ("some", dict(some), {name for name, _ in some}),
        ("the first", dict([first]), {first[0]}),
    ):
        wrong += [f"{what}: {set(got) ^ keys}"] if set(got) != keys else []
        wrong += [f"{what}: {name}" for name in keys if not torch.equal(got[name], wanted[name])]
    return wrong


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2},
        {"stage": 2, "overlap_gather": True},
        {"stage": 2, "shard_frozen": True},
        {"stage": 3},
        {"stage": 3, "gather_dtype": torch.int8},
    ],
    ids=str,
)
def test_the_weights_of_a_closed_model(options: dict[str, Any]) -> None:
    assert run_ranks(loops, 2, options) == [[]] * 2


def room(rank: int, world_size: int) -> tuple[int, int]:
    """Job: the bytes of the arena that the loop has allocated, and those of two units."""
    net, _ = trained(rank, {"stage": 3})
    seen: list[int] = []
    make = Buffers.make_arena

    def noting(self: Buffers, nbytes: int) -> None:
        seen.append(nbytes)
        make(self, nbytes)

    Buffers.make_arena = noting  # type: ignore[method-assign]
    try:
        for _ in zc.iter_weights(net):
            pass
    finally:
        Buffers.make_arena = make  # type: ignore[method-assign]
    plan = zc.registry.sharded(net).runtime.plan
    largest = max(-(-bucket.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES for bucket in plan.sharded)
    assert len(plan.sharded) > 3
    return max(seen), 2 * largest


def test_at_most_two_units_are_whole() -> None:
    for most, two_units in run_ranks(room, 2):
        assert 0 < most <= two_units


# --- averages, as docs/recipes.md keeps them ---


def averaged(rank: int, world_size: int, options: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Job: rank 0's average of the weights of three updates; without ``options`` of plain PyTorch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if options is not None:
        zc.compile(net, optimizer, backend="eager", bucket_nbytes=40, **options)

    def weights() -> Iterable[tuple[str, torch.Tensor]]:
        if options is not None:
            return zc.iter_weights(net, ranks=[0])
        return [(name, value.clone()) for name, value in net.state_dict().items()] if rank == 0 else []

    average = dict(weights())
    for step in range(3):
        net(torch.linspace(-1, 1 + step, 12).view(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in weights():
            if weight.is_floating_point():
                average[name].lerp_(weight, 0.5)
    return average


@pytest.mark.parametrize("options", [{"stage": 2, "overlap_gather": True}, {"stage": 3}], ids=str)
def test_an_average_of_the_weights(options: dict[str, Any]) -> None:
    got, on_rank_1 = run_ranks(averaged, 2, options)
    wanted = averaged(0, 2, None)
    assert not on_rank_1 and got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value)


# --- the copies ---


def test_a_large_weight_is_a_copy_of_the_callers_own() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(1024, 512), nn.Conv2d(256, 512, 3).to(memory_format=torch.channels_last)
    net = nn.Sequential(first, nn.ReLU(), last).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=2, backend="eager")
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    for name, weight in zc.iter_weights(net):
        param = net.get_parameter(name)
        assert weight.equal(param) and weight.stride() == param.stride() and weight.dtype is torch.bfloat16
        assert weight.is_leaf and not weight.requires_grad and not weight._is_view()
        nn.Parameter(weight).sum().backward()
        weight.zero_()
    assert all(param.equal(before[name]) for name, param in net.named_parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loop_that_keeps_nothing_stays_small() -> None:
    """24 weights of 16 MiB. With a plain clone of each, and something small that is kept, glibc takes new memory for
    every second one: 200 MiB in the end."""

    def resident_mib() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) >> 10

    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=2, backend="eager")
    kept, before = [], resident_mib()
    for _, weight in zc.iter_weights(net):
        kept.append(torch.empty(100))
        assert weight.shape == (2048, 2048)
    assert resident_mib() - before < 64
