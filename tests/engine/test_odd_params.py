"""Stage 3, compiled: parameters with holes in their memory, and forwards that reduce or return weights, or
choose rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

import zc

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Holes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(8, 16)[:, ::2])
        self.turned = nn.Parameter(torch.randn(8, 16).t()[::2])
        self.vector = nn.Parameter(torch.randn(16)[::2])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x @ self.columns + (x * self.vector) @ self.turned,)


class Penalty(nn.Module):
    """The sum of squares of all weights, which lie in a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(12)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.net(x), torch.stack([(p * p).sum() for p in self.parameters()]).sum()


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.layer.weight
        return self.layer(x), weight[:3], weight.t(), weight.detach()


class Chosen(nn.Module):
    """How many rows it has is known when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.last(self.first(x[x[:, 0] > 0])),)


class Biased(nn.Module):
    """Attention with a bias that is learned: of a tensor that wants no gradient flex_attention makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) / 4), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, bias = (x @ self.weight)[None, None], self.bias
        if x.dtype == torch.float32:
            return (flex_attention.flex_attention(q, q, q, lambda score, b, h, i, j: score + bias[0] * (i - j)),)
        at = torch.arange(4.0)
        return (torch.softmax(q @ q.mT / 8**0.5 + bias * (at[:, None] - at), -1) @ q,)


def trained(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, updates: int = 3) -> None:
    for _ in range(updates):
        torch.stack([output.square().mean() for output in model(x)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("make", [Holes, Penalty, Returning, Chosen, Biased])
def test_against_float64(make: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has the backward on a CPU, and refuses it as slow
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    twin = make().double()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zc.compile(model, optimizer, stage=3, backend="aot_eager", bucket_nbytes=256, weight_nbytes=1024)
    # as it is traced: what a window gives has these strides
    assert all(param.stride() == torch.empty(param.shape).stride() for param in model.parameters())
    trained(model, optimizer, X)
    trained(twin, torch.optim.SGD(twin.parameters(), lr=0.01), X.double())
    for key, value in zc.full_state_dict(model).items():
        assert torch.allclose(value.double(), twin.state_dict()[key], rtol=1e-4, atol=1e-6), key
    zc.close(model)


@pytest.mark.filterwarnings("ignore")
def test_stage_3_trains_with_fake_quantizers() -> None:
    """With a hook of zc's on each of them, Dynamo compiled their forwards, and failed in torch's code."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(net.train(), inplace=True)
    plain, x = copy.deepcopy(net), torch.randn(4, 8)
    zc.compile(net, torch.optim.SGD(net.parameters()), stage=3, backend="aot_eager")
    for model in (net, plain):
        model(x).square().sum().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)  # type: ignore[attr-defined]
    zc.close(net)
