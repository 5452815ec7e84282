"""Whole training steps of one rank on a GPU: plain torch's numbers, every weight dtype, and a host that never waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zc

DEVICE = "cuda"
WIDTH = 192

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(fused: bool = False, sgd: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model whose first bucket has a bias that starts anywhere; with options, compiled by zc."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 384), nn.GELU(), nn.LayerNorm(384), nn.Linear(384, WIDTH))
    model = model.to(DEVICE)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zc.compile(model, optimizer, bucket_nbytes=2**18, **options) if options else (model, optimizer)


def batches(num: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, WIDTH, generator=generator).to(DEVICE, dtype) for _ in range(num)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor]) -> Tensor:
    for x in xs:
        loss = (model(x) - x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize("stage", [1, 2])
def test_plain_torchs_numbers(stage: int, backend: str) -> None:
    """SGD: Adam would make a whole step of a gradient that is nothing but rounding."""
    runs = []
    for options in ({}, {"stage": stage, "backend": backend}):
        model, optimizer = make(sgd=True, **options)
        for _ in range(3):
            step(model, optimizer, batches(2))
        runs.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, expected in runs[0].items():
        assert (runs[1][name] - expected).abs().max() < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", [1, 2])
def test_narrow_weights_are_their_masters_rounded(stage: int, dtype: torch.dtype) -> None:
    model, optimizer = make(stage=stage, param_dtype=dtype)
    losses = [float(step(model, optimizer, batches(1, dtype))) for _ in range(5)]
    assert losses[-1] < losses[0]
    buffers = zc.registry.sharded(model).runtime.buffers
    for flat, master in zip(buffers.flat_param, buffers.master_shard, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(flat, master.to(dtype))


@pytest.mark.parametrize("overlap_gather", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_host_never_waits_in_a_step(stage: int, overlap_gather: bool) -> None:
    model, optimizer = make(stage=stage, param_dtype=torch.bfloat16, overlap_gather=overlap_gather)
    xs = batches(2, torch.bfloat16)

    def once() -> None:
        for x in xs:
            (model(x) - x).square().mean().backward()
        zc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    once()  # compiles
    once()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "holds the memory" not in str(zc.explain(model)), "a step that waits for its gathers overlaps nothing"


OFFLOADS = [{}, {"offload": "cpu"}, {"offload": "cpu", "offload_accumulate": "device"}]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", OFFLOADS, ids=str)
def test_a_scaler_skips_what_overflows(options: dict[str, Any], fused: bool) -> None:
    """Its scale and found_inf are the GPU's, what they are for is in host memory with offload."""
    model, optimizer = make(fused, stage=2, backend="eager", **options)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    (x,) = batches(1)
    for factor, unscaled in ((1.0, False), (float("inf"), True), (float("inf"), False), (1.0, True)):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale((model(x) - x).square().mean() * factor).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) if factor != 1.0 else not any(same)
    assert all(p.isfinite().all() for p in model.parameters())
