"""The modelled network: its arithmetic, with an injected clock; and what zc and DDP compute on it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.network import NETWORKS, Network
from bench.network.paced import CpuLine, PacedGroup, PacedWork, init_paced

GB = Network("one GB/s", 1e9, latency_s=10e-6, hop_s=1e-6, peer_s=2e-6)


# --- time ---


@pytest.mark.parametrize(
    ("kind", "microseconds"),
    [
        ("all_reduce", 10 + 3 + 1750),  # latency, log2(8) levels, 2 * 7/8 of a megabyte
        ("all_gather", 10 + 3 + 875),
        ("reduce_scatter", 10 + 3 + 875),
        ("all_to_all", 10 + 7 * 2 + 875),
        ("broadcast", 10 + 3 + 1000),
        ("p2p", 10 + 1000),
        ("barrier", 10 + 3),
    ],
)
def test_seconds_of_a_collective(kind: str, microseconds: float) -> None:
    assert GB.seconds(kind, 10**6, 8) == pytest.approx(microseconds * 1e-6)
    assert GB.seconds(kind, 10**6, 1) == 0.0
    assert NETWORKS["zero"].seconds(kind, 10**6, 8) == 0.0


class Clock:
    """Time goes on where somebody sleeps, and by ``step`` at each look."""

    def __init__(self) -> None:
        self.time, self.slept = 100.0, 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept += seconds


def test_a_sequence_takes_what_the_model_says() -> None:
    clock = Clock()
    line = CpuLine(clock.now, clock.sleep)
    sizes = [10**6, 5 * 10**6, 10**3, 2 * 10**6]
    model = [GB.seconds("all_gather", n, 8) for n in sizes]
    for seconds in model:  # all issued at once; each moves for a third of its time
        line.one(100.0, seconds, lambda s=seconds: clock.sleep(s / 3), PacedWork([]))
    assert clock.time - 100.0 == pytest.approx(sum(model))
    assert line.num_late == 0
    clock.time += 1.0  # idle: what comes later starts when it is issued
    line.one(clock.time, model[0], lambda: None, PacedWork([]))
    assert clock.time - 101.0 == pytest.approx(sum(model) + model[0])


# --- values: the other ranks are copies of this one ---


def test_values() -> None:
    group = PacedGroup(0, 4, NETWORKS["zero"])
    summed, options = torch.full((8,), 3.0), dist.AllreduceOptions()
    group.allreduce([summed], options).wait()
    assert summed.tolist() == [12.0] * 8
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([summed], options).wait()
    assert summed.tolist() == [12.0] * 8
    gathered = torch.tensor([1.0, 2.0, *[math.nan] * 6])
    group.all_gather_single(gathered, gathered[:2]).wait()
    assert gathered.tolist() == [1.0, 2.0] * 4
    out = torch.empty(2)
    group.reduce_scatter_single(out, torch.arange(8.0)).wait()
    assert out.tolist() == [0.0, 4.0]
    received = torch.empty(8)
    group.all_to_all_single(received, torch.arange(8.0), [], []).wait()
    assert received.tolist() == [0.0, 1.0] * 4


@pytest.fixture
def paced() -> Iterator[None]:
    init_paced("zero", 4)
    yield
    dist.destroy_process_group()


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(4, 16)


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize("reduce", ["exact", "native"])
def test_zc_updates_its_shard_as_a_plain_optimizer_does(reduce: str) -> None:
    import zc

    plain, batch = model_and_batch()
    model, _ = model_and_batch()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    zc.compile(model, ours, backend="eager", reduce=reduce, bucket_nbytes=1 << 20)
    for network, optimizer in ((plain, theirs), (model, ours)):
        network(batch).square().mean().backward()
        optimizer.step()
    # one bucket, in reverse order of registration: rank 0 owns the first quarter, the last layer's part
    expected, trained = (torch.cat([m[2].bias.detach(), m[2].weight.detach().view(-1)]) for m in (plain, model))
    owned = 16 + 4 * 64
    torch.testing.assert_close(trained[:owned], expected[:owned])
    flat = torch.cat([trained, model[0].bias.detach(), model[0].weight.detach().view(-1)])
    assert not torch.equal(flat[-64:], plain[0].weight.detach().view(-1)[-64:])  # another rank's, made up


@pytest.mark.usefixtures("paced")
@pytest.mark.parametrize(("device", "is_watched"), [("cpu", True), ("cuda:0", False)])
def test_nobody_waits_with_a_timeout_for_what_a_stream_waits_for(
    device: str, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's wait blocks the host where it is given one."""
    from unittest import mock

    from zc.ranks.group import Group

    group = Group(None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)  # there is no GPU
    group.open_data(torch.device(device))
    group.journal = mock.Mock()
    rows, shard = torch.ones(4), torch.ones(1)
    works = [
        group.all_to_all(torch.empty(4), rows, 0),
        group.reduce_scatter(torch.empty(1), rows, 0),
        group.all_gather(torch.empty(4), shard, "gather weights", 0),
    ]
    assert [work.journal is not None for work in works] == [is_watched] * 3


def test_the_clock_is_read_again_in_each_turn_of_the_gpu_kernel() -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bench.network.paced_cuda import mark_kernel, spin_kernel

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled")
    target = GPUTarget("cuda", 90, 32)
    mark = triton.compile(ASTSource(fn=mark_kernel, signature={"start_ptr": "*i64"}), target=target)
    assert mark.asm["ptx"].count("%globaltimer") == 1
    types = {"start_ptr": "*i64", "nanoseconds": "i64"}
    text = triton.compile(ASTSource(fn=spin_kernel, signature=types), target=target).asm["ptx"]
    assert re.search(r"(\$L__BB\w+):.*%globaltimer.*bra\s+\1;", text, re.DOTALL), text
