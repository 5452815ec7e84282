"""A GradScaler over sharded gradients: no wait of the host of zc's own, and a step that was left out is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zc

NOTE = "no rank takes that step"


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_finite_steps_read_nothing_and_a_step_left_out_is_said(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[torch.Tensor] = []
    plain = torch.Tensor.item
    model: nn.Module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    zc.compile(model, optimizer, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda tensor: reads.append(tensor) or plain(tensor))
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not reads
        assert NOTE not in zc.explain(model).sections["notes"]
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(torch.full((1, 3), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    # a fused optimizer's own step leaves the update out, so only explain asks
    with pytest.warns(UserWarning, match=NOTE):
        zc.explain(model) if fused else optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert zc.registry.sharded(model).runtime.buffers.num_skipped[0] == 1
