"""What stage 3 holds: 12 bytes per parameter over W ranks between steps, and never more gathered weights than the cap.

Counted, not planned: the storages of all live tensors, and every allocation that torch's profiler sees in a pass.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from harness import run_ranks
from live_memory import storages
from tiers import FULL, full_only
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zc
from bench.weight_turns import most_nbytes
from zc.offload.host_step import HostMemory
from zc.registry import sharded

DIM, LAYERS = 128, 5
LAYER_NBYTES = 4 * DIM * (DIM + 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def measured(rank: int, world_size: int, backend: str) -> list[tuple[int, int, int, int]]:
    """Job: (stage, cap, bytes held between steps, most bytes in a pass beside those)."""
    rows = []
    caps = [4 * LAYER_NBYTES, 2 * LAYER_NBYTES, LAYER_NBYTES + 256]
    if not FULL:  # caps change the order of gathers, which no compiled segment sees
        caps = caps[-1:]
    for stage, cap in ((2, 0), *((3, cap) for cap in caps)):
        torch._dynamo.reset()
        before = storages()
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        zc.compile(
            net, optimizer, stage=stage, weight_nbytes=cap or None, backend=backend, bucket_nbytes=LAYER_NBYTES
        )
        x = torch.randn(4, DIM)
        for _ in range(3):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        between = sum(nbytes for key, (nbytes, _) in storages().items() if key not in before) - 4 * x.numel()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            net(x).square().mean().backward()
        rows.append((stage, cap, between, most_nbytes(prof)))
        optimizer.step()
        zc.close(net)
    return rows


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=full_only)])
def test_bytes_between_steps_and_in_a_pass(backend: str) -> None:
    num_params = LAYERS * LAYER_NBYTES // 4
    for rows in run_ranks(measured, 2, backend, timeout=200.0):
        (_, _, _, in_stage_2), *in_stage_3 = rows
        for _, cap, between, most in in_stage_3:
            assert 12 * num_params / 2 <= between < 1.01 * 12 * num_params / 2
            assert most - in_stage_2 <= cap, "beside what stage 2 allocates: gathered weights alone"
            assert most - in_stage_2 > cap // 2, "the counter sees them"


class BreaksInTraining(Net):
    """Its forward is one graph, until it runs with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            torch._dynamo.graph_break()
            x = x + torch.compiler.disable(lambda: self.layers[1].weight.sum())()  # type: ignore[no-untyped-call]
        return super().forward(x)


def test_a_first_forward_without_gradients_frees_its_weights() -> None:
    """All weights are whole in it, since Dynamo may break its graph. They stayed whole until the next update. The next
    forward, which reads weights outside of graphs, trains as in plain PyTorch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = BreaksInTraining(), torch.randn(4, DIM)
    plain = copy.deepcopy(net)
    zc.compile(net, torch.optim.SGD(net.parameters()), stage=3, backend="aot_eager", bucket_nbytes=LAYER_NBYTES)
    before = storages()
    with torch.no_grad():
        net(x)
    added = sum(nbytes for key, (nbytes, _) in storages().items() if key not in before)
    assert added < LAYER_NBYTES, f"{added} bytes stay after an evaluation"
    net(x).square().mean().backward()
    plain(x).square().mean().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)  # type: ignore[attr-defined]
    zc.close(net)


def offloaded(rank: int, world_size: int, dtype: torch.dtype | None) -> tuple[int, int, int, bool]:
    """Job: bytes between steps: of the optimizer's state, of other host memory, of everything else, which a GPU would
    have; and whether masters are in host memory. On a CPU what `HostMemory` has made is host memory."""
    before, allocate, in_host = storages(), HostMemory.zeros, set[int]()

    def counted(self: HostMemory, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = allocate(self, numel, dtype)
        in_host.add(tensor.untyped_storage()._cdata)
        return tensor

    with mock.patch.object(HostMemory, "zeros", counted):
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        zc.compile(
            net, optimizer, stage=3, offload="cpu", backend="aot_eager" if FULL else "eager", param_dtype=dtype,
            bucket_nbytes=LAYER_NBYTES // (1 if dtype is None else 2),
        )  # fmt: skip
    x = torch.randn(4, DIM, dtype=dtype)
    for _ in range(3):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own_state = sharded(net).optimizers[0].local.state
    states = [item for state in own_state.values() for item in state.values() if item.dim()]
    in_states = {item.untyped_storage()._cdata for item in states}
    on_host = {key: nbytes for key, (nbytes, _) in storages().items() if key not in before}
    left = sum(on_host.values()) - sum(on_host[key] for key in in_states | (in_host & on_host.keys())) - x.nbytes
    masters = {item.untyped_storage()._cdata for item in sharded(net).runtime.buffers.master_shard}
    return sum(on_host[key] for key in in_states), sum(on_host[key] for key in in_host), left, masters <= in_host


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_with_offload_a_device_has_its_shard_of_the_weights(dtype: torch.dtype | None) -> None:
    """2 ranks, fp32: 4 / 2 bytes a parameter and two staging buffers of a layer's gradient stay; 16 / 2 are in host
    memory. In bf16 2 / 2 stay, and two buffers for a layer's cast masters are in host memory."""
    num_params, width = LAYERS * LAYER_NBYTES // 4, 4 if dtype is None else 2
    staging = 2 * LAYER_NBYTES // 2
    casts = 0 if dtype is None else staging // 2
    for states, others, left, are_in_host in run_ranks(offloaded, 2, dtype, timeout=100.0):
        assert are_in_host
        assert states == pytest.approx(8 * num_params / 2, rel=0.01)
        assert others == pytest.approx(8 * num_params / 2 + casts, rel=0.01)
        assert left == pytest.approx(width * num_params / 2 + staging, rel=0.01)
