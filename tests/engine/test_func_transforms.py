"""Stage 3: torch.func through the model gives what it gives through a plain one, and training goes on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import zc

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module], Tensor]


def tangent(model: nn.Module) -> Tensor:
    out, along = torch.func.jvp(lambda x: model(x), (X,), (torch.ones_like(X),))
    return out.pow(2).sum() + along.sum()


def grads_of_samples(model: nn.Module) -> Tensor:
    of_one = torch.func.grad(lambda x: model(x[None]).pow(2).sum())
    return torch.func.vmap(of_one)(X).pow(2).sum()  # a penalty of the gradient by the input


LOSSES: dict[str, Loss] = {
    "jvp": tangent,
    "vmap of grad": grads_of_samples,
    "grad": lambda model: torch.func.grad(lambda x: model(x).pow(2).sum())(X).pow(2).sum(),
    "jacrev": lambda model: torch.func.jacrev(lambda x: model(x))(X).pow(2).sum(),
    "vmap": lambda model: torch.func.vmap(lambda x: model(x))(X).pow(2).sum(),
}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def trained(loss: Loss, dtype: torch.dtype, backend: str | None = None) -> list[Tensor]:
    """Losses and weights; some of the steps are plain ones, which Dynamo compiles."""
    model = make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if backend is not None:
        zc.compile(model, optimizer, stage=3, backend=backend, bucket_nbytes=64)
    seen = []
    for step in range(4):
        value = model(X.to(dtype)).pow(2).mean() if step == 1 else loss(model)
        seen.append(value.detach().double())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if backend is None else zc.full_state_dict(model)
    return seen + [value.double() for value in state.values()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_transform_through_the_model(name: str, backend: str) -> None:
    wanted = trained(LOSSES[name], torch.float32)
    for value, other in zip(trained(LOSSES[name], torch.float32, backend), wanted, strict=True):
        torch.testing.assert_close(value, other, rtol=2e-5, atol=1e-6)


class Scaled(nn.Module):
    """Reads the weight of a layer that has not run yet, as an argument of a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        squares = torch.func.vmap(lambda row: row.pow(2))(self.layer.weight)
        slope = torch.func.grad(lambda weight: weight.pow(3).sum())(self.layer.weight)
        along = torch.func.jvp(lambda weight: weight.pow(3).sum(), (self.layer.weight,), (torch.ones(4, 8),))[1]
        return self.layer(x).sum() + (squares + slope).sum() + along


def test_weights_that_are_arguments_of_a_transform() -> None:
    """torch.func asks no parameter: it read weights before they came, and its process ended where they had no bytes."""
    model = make()
    zc.compile(
        model, optimizer := torch.optim.SGD(model.parameters(), lr=0.01), backend="eager", stage=2, overlap_gather=True
    )
    model(X).sum().backward()
    optimizer.step()
    assert type(model[0].weight) is not nn.Parameter
    torch.func.grad(lambda weight: weight.sum())(model[0].weight)
    assert type(model[0].weight) is nn.Parameter, "waited for"
    zc.close(model)

    torch.manual_seed(0)
    model = Scaled()
    twin = copy.deepcopy(model)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=3, backend="eager", bucket_nbytes=1)
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize, torch.func.jacfwd):
        for weight in (model.layer.weight, model.layer.weight.detach()):
            with pytest.raises(zc.ZcError, match=r"reads a .* that has no bytes"):
                transform(lambda a: a.sum())(weight)
    for each in (model, twin):
        each(X).backward()
    grads = zc.full_grad(model)
    for name, param in twin.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
    zc.close(model)


def test_forward_mode_through_compiled_code_names_the_backend_that_has_it() -> None:
    def dual(model: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            along = forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent
        assert along is not None
        return along.sum()

    wanted = dual(make())
    refused = pytest.raises(zc.ZcError, match=r'forward_ad through this model.*backend="eager"')
    by_dynamo = torch.__version__ >= "2.14"  # it breaks the graph where a tensor with a tangent comes in
    for stage, backend in ((2, "aot_eager"), (3, "aot_eager"), (3, "eager")):
        model = make()
        zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, backend=backend)
        with contextlib.nullcontext() if backend == "eager" or by_dynamo else refused:
            assert dual(model).equal(wanted)
        model(X).sum().backward()  # the model is as it was
        zc.close(model)


def test_linearize_is_refused_by_name() -> None:
    """It ended in torch's "Multiple dispatch failed"."""
    wanted = torch.func.linearize(make(), X)[1](X)
    model = make()
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, backend="eager")
    with pytest.raises(zc.ZcError, match=r"linearize\) traces a parameter of shape \(8, 8\), and with stage=3"):
        torch.func.linearize(model, X)
    with zc.whole_parameters(model):
        assert torch.func.linearize(model, X)[1](X).equal(wanted)
    model(X).sum().backward()  # the model is as it was
    zc.close(model)
