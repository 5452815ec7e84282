"""``adamw_step``: one AdamW step on a flat shard, with the low-precision copy written in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import ranges, scratch_like

__all__ = ["adamw_step", "adamw_step_twin"]


@torch.no_grad()
def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    publish: Tensor | None = None,
    maximize: bool = False,
) -> None:
    """One step of ``torch.optim.AdamW`` (decoupled decay, Loshchilov and Hutter, arXiv:1711.05101) on [S] elements.

    ``step`` is incremented first, as torch does it. Where ``found_inf`` is 1 nothing changes, ``step`` and ``publish``
    included. ``grad`` is divided by ``grad_scale`` on the way and is not written.

    Args:
        param: [S] fp32, the master shard. exp_avg, exp_avg_sq: [S] fp32. All contiguous.
        grad: [S] fp32, bf16 or fp16, contiguous.
        step: 0-d fp32 on the device of ``param``.
        lr: a float, or a 0-d tensor (a scheduler then recompiles nothing).
        grad_scale, found_inf: 0-d or one-element fp32 tensors on the device of ``param``, as ``GradScaler`` keeps them.
        publish: [S] bf16, fp16 or fp32; receives the updated ``param``, rounded to nearest even.

    Raises:
        ValueError: a dtype, device, layout, size or overlap that breaks the above; nothing has been written.
    """
    _check(param, grad, exp_avg, exp_avg_sq, step, lr, grad_scale, found_inf, publish)
    adamw_step_twin(
        param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay,
        grad_scale, found_inf, publish, maximize,
    )  # fmt: skip


def adamw_step_twin(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    publish: Tensor | None,
    maximize: bool,
) -> None:
    """The same with torch's own fused kernel, piece by piece, so that what is published is still in cache."""
    if found_inf is not None and found_inf.item() != 0:
        return
    step += 1
    if isinstance(lr, Tensor):
        lr = float(lr)  # the fused CPU kernel reads it on the host too
    scratch = None if grad_scale is None and grad.dtype == param.dtype else scratch_like(param, param.dtype)
    for start, length in ranges(param.numel()):
        here = slice(start, start + length)
        grad_piece = grad[here]
        if scratch is not None:
            grad_piece = scratch[:length].copy_(grad_piece)
            if grad_scale is not None:
                grad_piece.div_(grad_scale)
        torch._fused_adamw_(
            [param[here]], [grad_piece], [exp_avg[here]], [exp_avg_sq[here]], [], [step],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=maximize,
        )  # fmt: skip
        if publish is not None:
            publish[here].copy_(param[here])


def _check(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float | Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    publish: Tensor | None,
) -> None:
    low = FLOATS[:3]
    written = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in written.items():
        check_dtype(name, tensor, (torch.float32,))
    check_dtype("grad", grad, low)
    if publish is not None:
        check_dtype("publish", publish, low)
        written["publish"] = publish
    flats = written | {"grad": grad}
    for name, tensor in flats.items():
        check_flat(name, tensor)
        check_numel(name, tensor, "param", param.numel())
        check_device(name, tensor, "param", param)
    names = list(flats)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            check_disjoint(name, flats[name], other, flats[other])
    for name, scalar in {"step": step, "grad_scale": grad_scale, "found_inf": found_inf, "lr": lr}.items():
        if not isinstance(scalar, Tensor):
            continue
        check_numel(name, scalar, "a scalar", 1)
        if name != "lr":  # torch allows lr on the CPU for any device
            check_dtype(name, scalar, (torch.float32,))
            check_device(name, scalar, "param", param)
