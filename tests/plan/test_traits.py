"""The table of torch's optimizers against torch: it has all of them, and each keeps what the table says."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.optim import Optimizer

from zc.planning.layout import Rule
from zc.planning.traits import TRAITS, counted_names, elementwise_names, num_states


def test_every_class_of_torch_is_in_the_table() -> None:
    theirs = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and issubclass(cls, Optimizer)}
    assert theirs - {"Optimizer"} == set(TRAITS)


def after_a_step(name: str, shape: tuple[int, ...] = (6, 4), **options: object) -> Optimizer:
    param = torch.nn.Parameter(torch.ones(shape))
    optimizer: Optimizer = getattr(torch.optim, name)([param], **options)
    param.grad = torch.linspace(-1, 1, param.numel()).view(shape)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", counted_names())
def test_the_states_that_it_keeps(name: str) -> None:
    (state, *_) = after_a_step(name).state.values() or [{}]
    kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() == 24]
    assert len(kept) == num_states(name) == TRAITS[name].num_states


ALL_TENSORS = {  # options with which a class keeps all that it can keep
    "SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if traits.refusal is None])
def test_the_shapes_of_its_states(name: str) -> None:
    """Of a matrix and, where it takes one, of a vector; all else that it keeps is one number."""
    traits, seen = TRAITS[name], set[str]()
    for shape in [(6, 4)] if name == "Muon" else [(6, 4), (6,)]:
        (state,) = after_a_step(name, shape, **ALL_TENSORS.get(name, {})).state.values()
        for key, value in state.items():
            kept = traits.shape_of(key, shape)
            assert kept == tuple(value.shape) if kept is not None else torch.as_tensor(value).numel() == 1, key
            seen |= {key} if kept is not None else set()
    assert seen == {*traits.tensors, *traits.sums}


@pytest.mark.parametrize("name", elementwise_names())
def test_an_elementwise_update_does_not_see_what_else_is_there(name: str) -> None:
    whole, cut = (torch.linspace(-2, 2, 24).requires_grad_() for _ in range(2))
    parts = [part.detach().clone().requires_grad_() for part in cut.split([5, 19])]
    gradient = torch.linspace(-1, 1, 24).sin()
    for params in ([whole], parts):
        optimizer = getattr(torch.optim, name)(params, foreach=False)
        for _ in range(3):
            for param, grad in zip(params, gradient.split([p.numel() for p in params]), strict=True):
                param.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(torch.cat([p.detach() for p in parts]), whole.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if traits.has_fused])
def test_torch_has_a_fused_update_for_it_on_the_cpu(name: str) -> None:
    after_a_step(name, fused=True)


def test_what_only_some_have() -> None:
    assert {name for name, traits in TRAITS.items() if traits.refusal} == {"LBFGS", "SparseAdam"}
    assert TRAITS["Muon"].rule == Rule(whole=True, cost="newton_schulz") and TRAITS["AdamW"].rule == Rule()
    assert num_states("Lion") == num_states("Adam") == 2 and "Adafactor" not in counted_names()
