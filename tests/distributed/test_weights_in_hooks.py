"""Hooks of a backward that read weights which no rank keeps whole: DDP's numbers, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from tiers import FULL, full_cases
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zc


class Adds(torch.autograd.Function):
    """The identity; its backward adds a tenth of the mean of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad + 0.1 * ctx.weight.detach().mean(), None


def _on_params(model: nn.Module, net: nn.Module, x: Tensor, first: bool) -> Tensor:
    """A hook on each parameter reads it: weight decay by hand."""
    for param in model.parameters() if first else ():
        if param.requires_grad:
            param.register_hook(lambda grad, param=param: grad + 0.1 * param.detach())
    return net(x)


def _on_output(model: nn.Module, net: nn.Module, x: Tensor, first: bool) -> Tensor:
    """A hook on the output reads all parameters."""
    output = net(x)
    output.register_hook(lambda grad: grad * (1 + sum(p.detach().norm() for p in model.parameters())))
    return output


def _behind(model: nn.Module, net: nn.Module, x: Tensor, first: bool) -> Tensor:
    """A function behind the model reads a parameter in its backward."""
    return Adds.apply(net(x), next(model.parameters()))  # type: ignore[no-any-return]


def _again(model: nn.Module, net: nn.Module, x: Tensor, first: bool) -> Tensor:
    """The whole model runs again in the backward, and a hook reads."""
    output = checkpoint(net, x, use_reentrant=False)
    assert isinstance(output, Tensor)
    output.register_hook(lambda grad: grad * (1 + next(model.parameters()).detach().norm()))
    return output


LOOPS = (_on_params, _on_output, _behind, _again)


def _train(
    rank: int, loop: Callable[..., Tensor], options: dict[str, Any] | None, is_partly_frozen: bool
) -> dict[str, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    model[2].requires_grad_(not is_partly_frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if options is None:
        net: nn.Module = DistributedDataParallel(model)
    else:
        net, optimizer = zc.compile(model, optimizer, **options)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loop(model, net, torch.randn(4, 8), step == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if options is None:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    with zc.whole_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _compare(
    rank: int, world_size: int, loops: tuple[Callable[..., Tensor], ...], options: dict[str, Any]
) -> list[str]:
    """Job: loops in which zc's weights are not DDP's."""
    wrong, is_partly_frozen = [], "shard_frozen" in options
    for loop in loops:
        theirs, ours = _train(rank, loop, None, is_partly_frozen), _train(rank, loop, options, is_partly_frozen)
        if not all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in theirs):
            wrong.append(loop.__name__)
    return wrong


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 2, "shard_frozen": True}], ids=["3", "shard_frozen"])
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@full_cases("aot_eager-3")
def test_hooks_read_weights_that_are_sharded(backend: str, options: dict[str, Any]) -> None:
    """Compiled, they found parameters over no bytes from the second step on, which ended the process. The tolerance is
    that of sums in another order, of four updates by gradients of about 1."""
    # by default half of them where frozen weights alone are sharded: whoever reads them is told apart nowhere
    loops = LOOPS if FULL or backend == "eager" or options["stage"] == 3 else LOOPS[1::2]
    assert run_ranks(_compare, 2, loops, {**options, "backend": backend, "bucket_nbytes": 400}) == [[], []]
