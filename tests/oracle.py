"""What the numbers should be, from code that shares nothing with zc.

Two oracles. `full_gradients`: one process, float64, torch.func, over all ranks' batches; it knows no ranks, buckets
or dtypes, so it can't make zc's mistakes. `train_ddp`: PyTorch's own DistributedDataParallel on the same gloo
ranks, which is what users compare with.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Loss = Callable[[Callable[..., Any], Any], Tensor]


def float64_copy(model: nn.Module) -> nn.Module:
    """``model`` in float64, in a form that torch.func can differentiate: the same function, without side effects."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if hasattr(module, "use_checkpoint"):
            module.use_checkpoint = False  # saved-tensor hooks don't go through torch.func; the function is the same
    torch.func.replace_all_batch_norm_modules_(twin)  # running statistics are a side effect
    return twin


def widen(batch: Any) -> Any:
    """Floating point tensors of a batch in float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    return type(batch)(widen(item) for item in batch) if isinstance(batch, (tuple, list)) else batch


def full_gradients(model: nn.Module, loss: Loss, batches: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    """The gradient of each trainable parameter in float64: mean over ranks, sum over ``batches[rank]``.

    A parameter that the loss does not use has zeros here.
    """
    twin = float64_copy(model)
    names = {name for name, param in twin.named_parameters() if param.requires_grad}
    params = {name: param.detach() for name, param in twin.named_parameters()}
    buffers = dict(twin.named_buffers())
    fixed = {name: param for name, param in params.items() if name not in names}

    class Call:
        """The functional model, for losses that call it and ask for its parameters' dtype."""

        def __init__(self, chosen: dict[str, Tensor]) -> None:
            self.chosen = chosen

        def __call__(self, *args: Any) -> Any:
            return torch.func.functional_call(twin, (self.chosen, fixed, buffers), args)

        def parameters(self) -> Iterable[Tensor]:
            return iter(params.values())

    def objective(chosen: dict[str, Tensor]) -> Tensor:
        losses = [loss(Call(chosen), widen(batch)) for mine in batches for batch in mine]
        return torch.stack(losses).sum() / len(batches)

    return torch.func.grad(objective)({name: params[name] for name in names})


def relative(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted|| in float64: a rounding error belongs to the whole tensor's scale. 0 / 0 is 0."""
    difference = torch.linalg.vector_norm(got.double() - wanted.double()).item()
    scale = torch.linalg.vector_norm(wanted.double()).item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else float("inf")


def worst(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference and the parameter that has it. The names must be the same."""
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    pairs = ((relative(got[name], wanted[name]), name) for name in wanted)
    # NaN never compares as larger: it must not hide behind a number
    return max(pairs, key=lambda pair: (pair[0] != pair[0], pair[0]), default=(0.0, "(nothing)"))


def train_ddp(
    model: nn.Module,
    loss: Loss,
    make_optimizer: Callable[[nn.Module], Optimizer],
    batches: Iterable[Sequence[Any]],
    *,
    after_backward: Callable[[nn.Module, Optimizer], None] | None = None,
    native_accumulation: bool = True,
    find_unused: bool = False,
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains with DDP: an update for each item of ``batches``, a backward for each microbatch in it, losses as given.

    ``native_accumulation``: DDP.no_sync on all but the last microbatch. Returns the weights by name and, for each
    update, the sum of its losses on this rank.
    """
    wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
    optimizer = make_optimizer(model)
    losses = []
    for microbatches in batches:
        total = 0.0
        for k, batch in enumerate(microbatches):
            last = k == len(microbatches) - 1
            with contextlib.nullcontext() if last or not native_accumulation else wrapped.no_sync():
                value = loss(wrapped, batch)
                value.backward()
            total += value.item()
        if after_backward is not None:
            after_backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return weights(model), losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
