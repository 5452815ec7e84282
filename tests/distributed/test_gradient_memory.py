"""Accumulators and ring come with a gradient and go with it: what is in new memory reaches no weight, and what somebody
still holds of an old one stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_cases, run_ranks
from late_gathers import Delayed
from models import Heads, mean_square, mlp, seeded, vectors
from torch import Tensor, nn
from training_runs import adamw

import zc
import zc.api
import zc.engine.buffers
from zc.errors import ZcError
from zc.schedule.buffer import COMM

DIM, BUCKET, TASKS = 32, 5000, 3


@contextlib.contextmanager
def _full_of(value: int) -> Iterator[None]:
    """New memory of accumulators and ring: every byte is ``value``; 0xFF is NaN in every float dtype."""

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        raw = torch.full((numel * dtype.itemsize,), value, dtype=torch.uint8, device=device)
        return raw.view(dtype)

    with mock.patch.object(zc.engine.buffers, "empty", empty):
        yield


def _weights(rank: int, value: int, **options: Any) -> list[Tensor]:
    """After three updates of two microbatches, in which a task is used now and then, with a late comm stream. What is
    compiled uses the same tasks in each update: others would be other graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Heads(DIM, TASKS)
    late = Delayed({COMM: 0.003})
    with _full_of(value), mock.patch.object(zc.api, "make_streams", return_value=late):
        model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, **options)
        for step in range(3):
            for micro in range(2):
                generator = seeded(rank, step, micro)
                x, y = torch.randn(8, DIM, generator=generator), torch.randn(8, 4, generator=generator)
                first = step % TASKS if options["backend"] == "eager" else 0
                tasks = (first, TASKS - 1)[: 1 + micro]
                losses = [nn.functional.mse_loss(out, y) for out in model(x, tasks)]
                torch.stack(losses).sum().backward()
            zc.clip_grad_norm_(model, 1.0)
            zc.full_grad(model)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _poisoned(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, bool]:
    clean, poisoned = _weights(rank, 0, **options), _weights(rank, 0xFF, **options)
    same = all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    return same, all(bool(w.isfinite().all()) for w in poisoned)


def test_what_is_in_new_memory_reaches_no_weight() -> None:
    ways: list[dict[str, Any]] = [{"stage": stage, "backend": "eager"} for stage in (1, 2)]
    ways.append({"stage": 2, "backend": "aot_eager", "write_in_place": True})
    for options, ranks in run_cases(_poisoned, 2, ways):
        assert ranks == ((True, True),) * 2, options


def _kept(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether a copy of a gradient that the caller keeps survives the next step, and what an old stand-in says."""
    torch.manual_seed(0)
    model = mlp(DIM, 2)
    model, optimizer = zc.compile(model, adamw(model), backend="eager", bucket_nbytes=BUCKET)
    gradients, values = [], []
    optimizer.register_step_pre_hook(
        lambda o, *_: gradients.extend(p.grad.clone() for g in o.param_groups for p in g["params"])
    )
    said = ""
    for step in range(2):
        mean_square(model, vectors(DIM)(rank, step, 0)).backward()
        stand_in = model[0].weight.grad
        optimizer.step()
        if not step:
            values = [grad.full_tensor() for grad in gradients]
        optimizer.zero_grad()
    try:
        stand_in.mul_(2.0)
    except ZcError as error:
        said = str(error)
    kept = [torch.equal(grad.full_tensor(), value) for grad, value in zip(gradients, values, strict=False)]
    return all(kept) and len(values) == 4, said


def test_a_kept_gradient_keeps_its_values_and_an_old_stand_in_says_that_it_is_old() -> None:
    for survives, said in run_ranks(_kept, 2):
        assert survives
        assert "0.weight" in said and "set to None" in said, said


@pytest.mark.parametrize("stage", [1, 2])
def test_the_models_own_zero_grad_lets_go_before_new_memory_is_taken(stage: int) -> None:
    model = mlp()
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend="eager")
    runtime = zc.registry.sharded(model).runtime
    x = torch.randn(4, next(model.parameters()).shape[1])
    model(x).sum().backward()
    optimizer.step()
    old = {t.data_ptr() for t in runtime.buffers.acc}
    is_alive: list[bool] = []

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        grads = [p.grad for p in zc.registry.sharded(model).optimizers[0].slices.values()]
        is_alive.append(any(g is not None and g.untyped_storage().data_ptr() in old for g in grads))
        return torch.empty(numel, dtype=dtype, device=device)

    model.zero_grad()
    with mock.patch.object(zc.engine.buffers, "empty", empty):
        model(x).sum().backward()
    assert is_alive
    assert not any(is_alive)
