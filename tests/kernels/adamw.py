"""AdamW in float64, and how far a step may be from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparisons import B16, F32, F64, assert_bits, assert_guards, guarded
from torch import Tensor

ULP = 2.0**-23  # of fp32, relative to a number's power of two at most


def oracle(tensors: list[Tensor], step: float, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(param, exp_avg, exp_avg_sq) after the step in float64, and the largest magnitude that each one's sum passed."""
    param, grad, exp_avg, exp_avg_sq = (tensor.cpu().to(F64) for tensor in tensors)
    lr, beta1, beta2 = float(options["lr"]), options["beta1"], options["beta2"]
    if options["grad_scale"] is not None:
        grad = grad / options["grad_scale"].cpu().to(F64)
    if options["maximize"]:
        grad = -grad
    old = param.abs()
    param = param - lr * options["weight_decay"] * param
    terms = (exp_avg * beta1).abs() + (grad * (1 - beta1)).abs()
    exp_avg = exp_avg * beta1 + grad * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
    rate = lr / (1 - beta1**step)
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + options["eps"]
    update = rate * exp_avg / denominator
    # an error of the first moment reaches the weight through the same factor
    return [param - update, exp_avg, exp_avg_sq], [old + update.abs() + rate * terms / denominator, terms, exp_avg_sq]


def check_adamw(run: Callable[..., None], device: str, numel: int, options: dict[str, Any], *,
                grad_dtype: torch.dtype = F32, publish_dtype: torch.dtype | None = B16,
                cast: Callable[[Tensor, torch.dtype], Tensor], ulps: float = 4.0, shift: int = 0) -> None:  # fmt: skip
    """Two steps from random moments; each number within ``ulps`` of the terms that it was summed from."""
    generator = torch.Generator().manual_seed(numel)
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": None,
               "found_inf": None, "maximize": False} | options  # fmt: skip
    storages, tensors = [], []
    for dtype in (F32, grad_dtype, F32, F32):
        view, storage = guarded(numel, dtype, device, shift)
        view.copy_(torch.randn(numel, generator=generator))
        storages.append(storage)
        tensors.append(view)
    tensors[3].square_()
    publish = None
    if publish_dtype is not None:
        publish, publish_storage = guarded(numel, publish_dtype, device, shift)
    step = torch.tensor(6.0, device=device)
    grad_before = tensors[1].clone()
    for now in (7.0, 8.0):
        before = [tensor.clone() for tensor in tensors]
        expected, magnitudes = oracle(before, now, options)
        run(*tensors, step, publish=publish, **options)
        if options["found_inf"] is not None and options["found_inf"].item() != 0:
            assert step.item() == 6.0
            for tensor, old in zip(tensors, before, strict=True):
                assert_bits(tensor, old)
            assert publish is None or bool(publish.isnan().all())
            break
        assert step.item() == now
        for name, tensor, reference, magnitude in zip(
            ("param", "exp_avg", "exp_avg_sq"), (tensors[0], *tensors[2:]), expected, magnitudes, strict=True
        ):
            error = (tensor.cpu().to(F64) - reference).abs() / (magnitude * ULP + 1e-45)
            assert numel == 0 or error.max() <= ulps, f"{name}: {error.max()} ulp after step {now}"
        if publish is not None and publish_dtype is not None:
            assert_bits(publish, cast(tensors[0], publish_dtype))
            assert_guards(publish_storage, publish)
    assert_bits(tensors[1], grad_before)
    for storage, tensor in zip(storages, tensors, strict=True):
        assert_guards(storage, tensor)
