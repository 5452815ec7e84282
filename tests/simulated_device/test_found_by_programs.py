"""What programs of the fuzzer (device_fuzz.py) have found on the device, as small as it is seen."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from device_ranks import needs_device, run_on_device
from torch import Tensor, nn

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore")]


class Fault(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise FloatingPointError("planted")


class Failing(nn.Module):
    """Half of its backward comes before the error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(Fault.apply(self.first(x)))) + self.shift  # type: ignore[no-any-return, no-untyped-call]


class Whole(torch.optim.Optimizer):
    """A class that zc does not know gets whole parameters."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad)


def _raised(rank: int, world_size: int, stage: int) -> None:
    """Job: a backward that raises, the class's zero_grad, which does not call zc, and a step."""
    import zc

    for _ in range(20):
        model = Failing().to("sim")
        optimizer = Whole(model.parameters(), {})
        zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=1)
        loss = model(torch.ones(2, 4, device="sim")).square().mean()
        with contextlib.suppress(FloatingPointError):
            loss.backward()
        type(optimizer).zero_grad(optimizer)
        optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_right_after_a_backward_that_raised(stage: int) -> None:
    """The device's thread of autograd may let go of that backward later than the caller has its error: as luck would
    have it. tests/engine/test_backwards.py has it for certain."""
    run_on_device(_raised, 1, stage)


def _late_layer(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> float:
    """Job: SGD with momentum in host memory, of a layer that gets its first gradient an update later than another."""
    import zc

    torch.manual_seed(0)
    models = [nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].to("sim")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options) for model in models]
    zc.compile(models[1], optimizers[1], stage=stage, backend="eager", offload="cpu")
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.ones(2, 4, device=next(model.parameters()).device)
            out = model[0](x) + (model[1](x) if step else 0.0)  # type: ignore[index]
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    zc.synchronize(models[1])
    with zc.whole_parameters(models[1]):
        values = [param.detach().cpu() for param in models[1].parameters()]
    pairs = zip(values, models[0].parameters(), strict=True)
    return max(float((value - param).abs().max()) for value, param in pairs)


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}, {"dampening": 0.5}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_momenta_in_host_memory_of_a_layer_that_comes_later(stage: int, options: dict[str, Any]) -> None:
    """torch's fused SGD, which zc selects there, raised TypeError."""
    assert max(run_on_device(_late_layer, 1, stage, options)) < 1e-6
