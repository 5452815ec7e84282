"""An output that the loss leaves out: AOTAutograd gives its parameters a gradient of zeros, where eager has None.

That is torch.compile's, and so zc's where it compiles; it shows where zeros move a parameter (weight decay).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zc


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


def after_backward(backend: str, *, by_zc: bool) -> Tensor | None:
    """The gradient of the weight that the loss does not see."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TwoOutputs()
    called = model if by_zc or backend == "eager" else torch.compile(model, backend=backend)
    if by_zc:
        zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), backend=backend)
    called(torch.randn(3, 4))[0].sum().backward()
    return zc.full_grad(model)["unused.weight"] if by_zc else model.unused.weight.grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_its_gradient_is_what_torch_compile_makes_of_it(backend: str) -> None:
    wanted = None if backend == "eager" else torch.zeros(2, 4)
    for after in (after_backward(backend, by_zc=False), after_backward(backend, by_zc=True)):
        assert (after is None) == (wanted is None)
        assert after is None or torch.equal(after, wanted)
