"""Offload on a GPU: device memory falls by the formula, to the byte, and the numbers stay those without offload.

Step times against `zc.plan`'s floor are `python -m bench.offload --device cuda`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zc

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its memory is counted")

FEATURES, LAYERS = 1024, 8  # no padding, no rounding by the allocator: every tensor is a multiple of 2 MiB
NUMEL = FEATURES * FEATURES * LAYERS


def run(steps: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model after some updates, its optimizer, and the device memory that is held then, gradients included."""
    for _ in range(2):  # the model before; then what Dynamo compiled for it, which its end has let go
        gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(FEATURES, FEATURES, bias=False), nn.GELU()]
    model: nn.Module = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zc.compile(model, optimizer, backend="aot_eager", bucket_nbytes=8 * 2**20, **options)
    generator = torch.Generator(device="cuda").manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):  # not declared
            x = torch.randn(64, FEATURES, device="cuda", generator=generator)
            (model(x) - x).square().mean().backward()
        optimizer.step()
    del x
    torch.cuda.synchronize()
    gc.collect()
    return model, optimizer, torch.cuda.memory_allocated() - start


@pytest.mark.parametrize("mode", ["cpu", "device"])
@pytest.mark.parametrize("stage", [1, 2])
def test_device_memory_falls_by_the_formula(stage: int, mode: str) -> None:
    """fp32, one rank: both moments and, with 'cpu', the accumulator leave: 12 or 8 bytes a parameter; staging comes."""
    run(steps=1)  # libraries take their workspaces
    model, _, plain = run(stage=stage)
    del model, _
    model, _, offloaded = run(stage=stage, offload="cpu", offload_accumulate=mode)
    staging = zc.persistent_nbytes(model)["staging"]
    assert plain - (offloaded - staging) == (12 if mode == "cpu" else 8) * NUMEL
    planned = zc.plan(model, world_size=1, stage=stage, bucket_nbytes=8 * 2**20, offload="cpu", offload_accumulate=mode)
    assert planned.device_nbytes == offloaded


@pytest.mark.parametrize("mode", ["cpu", "device"])
def test_the_weights_are_those_without_offload(mode: str) -> None:
    """Only AdamW runs somewhere else, in another order of its operations."""
    runs: list[dict[str, Tensor]] = []
    for options in ({}, {"offload": "cpu", "offload_accumulate": mode}):
        model, optimizer, _ = run(steps=3, **options)
        runs.append({name: p.detach().cpu() for name, p in model.named_parameters()})
        state = next(iter(optimizer.state.values()))["exp_avg"]
        assert state.device.type == ("cpu" if options else "cuda")
    for name, value in runs[0].items():
        assert (runs[1][name] - value).abs().max() < 2e-5, name


def test_what_is_copied_from_is_page_locked() -> None:
    """Else copies would block the host, and nothing would overlap."""
    model, _, _ = run(steps=1, offload="cpu")
    buffers = zc.registry.sharded(model).runtime.buffers
    assert all(t.is_pinned() for t in (*buffers.host, *buffers.master_shard))
