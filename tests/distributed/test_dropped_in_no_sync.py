"""Gradients of a microbatch in no_sync, which stage 2 has reduced, and which ranks drop that know of different ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from training_runs import message_of

import zc


class Forked(nn.Module):
    """A trunk on all ranks, and a head that only some use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, uses_head: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return (self.head(x) if uses_head else x).square().sum()


def _make_zeros(model: Forked) -> None:
    model.zero_grad(set_to_none=False)


def _make_zeros_by_hand(model: Forked) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def _drop_by_hand(model: Forked) -> None:
    for param in model.parameters():
        param.grad = None


WAYS = {way.__name__: way for way in (_make_zeros, _make_zeros_by_hand, _drop_by_hand)}


def _compiled(rank: int, stage: int, *, has_two: bool = False) -> tuple[Forked, list[torch.optim.Optimizer]]:
    """After a microbatch, in no_sync, in which rank 1 alone uses the head."""
    torch.manual_seed(1)
    model = Forked()
    groups = [model.trunk.parameters(), model.head.parameters()] if has_two else [model.parameters()]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(group, lr=0.1) for group in groups]
    zc.compile(model, optimizers, backend="eager", stage=stage, bucket_nbytes=4096)
    with zc.no_sync(model):
        model(torch.ones(2, 3), rank == 1).backward()
    return model, optimizers


def _train(rank: int, world_size: int, way: str, stage: int) -> dict[str, Tensor]:
    model, (optimizer,) = _compiled(rank, stage)
    WAYS[way](model)
    model(torch.full((1, 3), 0.5 + rank), True).backward()
    optimizer.step()
    with zc.whole_parameters(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_of_them_is_left(way: str, stage: int) -> None:
    torch.manual_seed(1)
    model = Forked().double()
    losses = [model(torch.full((1, 3), 0.5 + rank, dtype=torch.double), True) for rank in range(2)]
    torch.stack(losses).mean().backward()
    wanted = {name: p.detach() - 0.1 * (0.0 if p.grad is None else p.grad) for name, p in model.named_parameters()}
    for weights in run_ranks(_train, 2, way, stage):
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name].double(), weight, rtol=0, atol=1e-6)


def _one_alone(rank: int, world_size: int, has_two: bool, raises: bool) -> str:
    model, optimizers = _compiled(rank, 2, has_two=has_two)
    if raises and rank == 1:  # and its program goes on
        own = next(iter(zc.registry.sharded(model).optimizers[0].slices.values()))
        place, own.data = own.data, own.data.clone()
        with pytest.raises(zc.ZcError, match="was set to another tensor"):
            optimizers[0].step()
        own.data = place
        optimizers[0].zero_grad()
    elif has_two:  # rank 0 knows of no gradient of the second optimizer, and sees no call
        type(optimizers[1]).zero_grad(optimizers[1])
    elif model.head.bias.grad is not None and not raises:
        model.head.bias.grad.zero_()  # its weight keeps a gradient
    with pytest.raises(zc.RankMismatchError) as raised:
        optimizers[0].step()
    return str(raised.value)


@pytest.mark.parametrize(("has_two", "raises"), [(False, False), (True, False), (False, True)])
def test_gradients_that_one_rank_drops_alone_are_refused(has_two: bool, raises: bool) -> None:
    """After an error that one rank has caught, all ranks are told of it."""
    for text in run_ranks(_one_alone, 2, has_two, raises):
        assert "what the gradients hold" in text and "by optimizer.zero_grad()" in text
        assert ("step() raised on rank 1: ZcError: before step() the .data of the optimizer's" in text) == raises


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda grad: grad.clamp(-0.1, 0.1),
    "div": lambda grad: grad / grad.norm(),
    "mul": lambda grad: grad * (1 / grad.norm().item()),
    "abs_": lambda grad: grad.clone().abs_().sqrt() * 0.5,
    "": lambda grad: -(grad.double() * 0.5).float() + 1.0,  # the mean of the same
}


def _assigned_early(rank: int, world_size: int, name: str) -> tuple[str, list[Tensor]]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    with zc.no_sync(model):
        model(torch.full((1, 3), 1.0 + rank)).square().sum().backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad = MADE[name](param.grad)
    said = message_of(model(torch.full((1, 3), 2.0 + rank)).square().sum().backward)[1]
    if not said:
        optimizer.step()
    return said, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("name", MADE)
def test_what_no_sync_makes_of_a_gradient_is_assigned_where_ddp_has_the_same(name: str) -> None:
    """DDP clips each rank's own gradient there, zc clipped their mean, in silence."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2).double()
    rows = []
    for rank in range(2):
        first, second = (model(torch.full((1, 3), n + rank).double()).square().sum() for n in (1.0, 2.0))
        params = list(model.parameters())
        pairs = zip(torch.autograd.grad(first, params), torch.autograd.grad(second, params), strict=True)
        rows.append([MADE[name](one).double() + other for one, other in pairs])
    for said, weights in run_ranks(_assigned_early, 2, name):
        assert bool(said) == bool(name) and (not name or f"bias.grad = {name} of " in said)
        for weight, param, *grads in zip(weights, model.parameters(), *rows, strict=True) if not name else ():
            torch.testing.assert_close(weight.double(), param - 0.05 * sum(grads), rtol=0, atol=1e-6)
