"""Graphs that draw random numbers, in sharded weights or again in a backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zc


class DroppedWeights(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(self.run, x, use_reentrant=False) if self.is_checkpointed else self.run(x)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = F.dropout(self.a.weight), F.dropout(self.b.weight)
        hidden = F.linear(x, first)
        return hidden, F.linear(hidden, second)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_dropped_weight_has_one_mask(is_checkpointed: bool) -> None:
    """Made anew where it is read, in another window than its mask, it had two: wrong gradients, without a word."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DroppedWeights(is_checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, backend="aot_eager", bucket_nbytes=64 * 64 * 4)
    for _ in range(2):  # the first pass tries the graph with whole weights
        optimizer.zero_grad()
        hidden, _ = model(torch.eye(64))
        hidden.sum().backward()
        grad = zc.full_grad(model)["a.weight"]
        assert torch.equal(grad != 0, hidden.detach().t() != 0)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x * self.weight) * 1.5, x, use_reentrant=False)


def test_checkpointing_draws_its_mask_again() -> None:
    """aot_eager ran Inductor's random numbers op by op, which ignores their seed: the backward had another mask."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Checkpointed()
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, backend="aot_eager")
    output = model(torch.ones(4, 64))
    output.sum().backward()
    torch.testing.assert_close(zc.full_grad(model)["weight"], output.detach().sum(0))
