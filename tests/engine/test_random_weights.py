"""Sharded weights in graphs that draw random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zc


class DroppedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = F.dropout(self.a.weight), F.dropout(self.b.weight)
        hidden = F.linear(x, first)
        return hidden, F.linear(hidden, second)


def test_a_dropped_weight_has_one_mask() -> None:
    """Made anew where it is read, in another window than its mask, it had two: wrong gradients, without a word."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DroppedWeights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch._inductor.config.patch(fallback_random=True):  # keeps native_dropout as one operation
        zc.compile(model, optimizer, stage=3, backend="aot_eager", bucket_nbytes=64 * 64 * 4)
        for _ in range(2):  # the first pass tries the graph with whole weights
            optimizer.zero_grad()
            hidden, _ = model(torch.eye(64))
            hidden.sum().backward()
            grad = zc.full_grad(model)["a.weight"]
            assert torch.equal(grad != 0, hidden.detach().t() != 0)
