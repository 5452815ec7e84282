"""Stage 2 keeps, to the boundary, what ranks can't agree on (zc/engine/rounds.py): what a loop does meanwhile.

Rank 1 has one backward more, so what it brings is kept. SGD with learning rate 1: an update is the mean over ranks of
the sum over backwards, here worked out by hand.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.optim import SGD

import zc

ONES = torch.ones(4)


class Sums(nn.Module):
    """Two parameters whose gradients are the output's own, the very tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.first, x + self.second


def _trained(rank: int, world_size: int, backend: str, what: str) -> tuple[Tensor, Tensor]:
    """Job: weights after one update."""
    model = Sums()
    model, optimizer = zc.compile(  # type: ignore[assignment]
        model, SGD(model.parameters(), lr=1.0), stage=2, backend=backend, bucket_nbytes=16
    )
    for k in range(1 + rank):
        grads = [torch.full((4,), 1.0 + rank + k), torch.full((4,), 10.0 * (1 + rank + k))]
        outputs = [out for out in model(torch.zeros(4)) if out.requires_grad]
        torch.autograd.backward(outputs, grads[: len(outputs)])
        for grad in grads:
            grad.zero_()  # the caller's memory, and the gradient is kept
    if what == "one is dropped":
        model.second.grad = None
    optimizer.step()
    return model.first.detach().clone(), model.second.detach().clone()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["nothing", "one is dropped"])
def test_a_kept_gradient(backend: str, what: str) -> None:
    # rank 0 brings 1, rank 1 brings 2 and 3
    wanted = -(1 + 2 + 3) / 2
    for first, second in run_ranks(_trained, 2, backend, what):
        assert torch.equal(first, wanted * ONES)
        assert torch.equal(second, 10 * wanted * ONES if what == "nothing" else 0 * ONES)
