# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``adamw_step``: one AdamW step on a flat shard, with the low-precision copy written in the same pass.

Bytes moved an element, all fp32 and a bf16 copy: param, exp_avg, exp_avg_sq read and written (24), grad read (4), copy
written (2): 30. 128-bit accesses where every tensor starts at 16 bytes. The formulas are those of torch's fused kernels
(ATen/native/cuda/fused_adam_utils.cuh) in fp32; 1 - beta and the bias corrections come from fp64, as in torch's CPU
kernel (its CUDA kernel of 2.13 rounds beta to fp32 first, which moves 1 - 0.999 by 1e-5 of itself).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import ranges, scratch_like
from zc.kernels._private import fused_adamw_
from zc.kernels._triton import cdiv, constexpr, jit, on_device, tl, use_triton

__all__ = ["adamw_step", "adamw_step_triton", "adamw_step_twin"]

BLOCK = 1024


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
    launch = adamw_step_triton if use_triton(param) else adamw_step_twin
    launch(
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
        fused_adamw_(
            [param[here]], [grad_piece], [exp_avg[here]], [exp_avg_sq[here]], [], [step],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=maximize,
        )  # fmt: skip
        if publish is not None:
            publish[here].copy_(param[here])


def adamw_step_triton(
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
    """Two launches: one program prepares the step's scalars, then one pass over the shard. Nothing is read back."""
    if isinstance(lr, Tensor) and lr.device != param.device:
        lr = float(lr)  # on the CPU: no synchronisation
    lr_value = 0.0 if isinstance(lr, Tensor) else lr
    scalars = torch.empty(3, dtype=torch.float32, device=param.device)
    absent = scalars  # a pointer that its constexpr says is never read
    with on_device(param):
        prepare_step[(1,)](
            step, scalars, lr if isinstance(lr, Tensor) else absent, absent if found_inf is None else found_inf,
            *_split(lr_value), *_split(beta1), *_split(beta2), float(weight_decay),
            LR_ON_DEVICE=isinstance(lr, Tensor), FOUND_INF=found_inf is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        if param.numel() == 0:
            return
        adamw_flat[(cdiv(param.numel(), BLOCK),)](
            param, grad, exp_avg, exp_avg_sq, scalars, absent if grad_scale is None else grad_scale,
            absent if found_inf is None else found_inf, absent if publish is None else publish, param.numel(),
            float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, float(eps), MAXIMIZE=maximize,
            GRAD_SCALE=grad_scale is not None, FOUND_INF=found_inf is not None, PUBLISH=publish is not None,
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _split(x: float) -> tuple[float, float]:
    """Two fp32 numbers whose sum is ``x`` to 48 bits: Triton passes floats as fp32, and 1 - beta ** step needs more."""
    high = torch.tensor(x, dtype=torch.float32).item()
    return high, x - high


@jit
def _power(base, exponent):
    """``base ** exponent`` in fp64 by squaring, an integer exponent: the same on every device, no library call."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@jit
def prepare_step(step, scalars, lr, found_inf, lr_high, lr_low, beta1_high, beta1_low, beta2_high, beta2_low,
                 weight_decay, LR_ON_DEVICE: constexpr, FOUND_INF: constexpr):  # fmt: skip
    skip = False
    if FOUND_INF:
        skip = tl.load(found_inf) != 0
    if not skip:
        now = tl.load(step) + 1.0
        tl.store(step, now)
        one = now.to(tl.float64) * 0.0 + 1.0  # widens: the interpreter passes plain floats, which have no .to()
        beta1 = one * beta1_high + one * beta1_low
        beta2 = one * beta2_high + one * beta2_low
        if LR_ON_DEVICE:  # noqa: SIM108  decided when it compiles
            rate = tl.load(lr).to(tl.float64)
        else:
            rate = one * lr_high + one * lr_low
        tl.store(scalars, (rate / (1.0 - _power(beta1, now.to(tl.int32)))).to(tl.float32))
        tl.store(scalars + 1, tl.sqrt(1.0 - _power(beta2, now.to(tl.int32))).to(tl.float32))
        tl.store(scalars + 2, rate.to(tl.float32) * weight_decay)


@jit
def _adamw_block(param, grad, exp_avg, exp_avg_sq, scalars, grad_scale, publish, mask, beta1, rest1, beta2, rest2, eps,
                 MAXIMIZE: constexpr, GRAD_SCALE: constexpr, PUBLISH: constexpr):  # fmt: skip
    p = tl.load(param, mask=mask)
    g = tl.load(grad, mask=mask).to(tl.float32)
    m = tl.load(exp_avg, mask=mask)
    v = tl.load(exp_avg_sq, mask=mask)
    if GRAD_SCALE:
        g = tl.math.div_rn(g, tl.load(grad_scale) + tl.zeros_like(g))
    if MAXIMIZE:
        g = -g
    p = p - tl.load(scalars + 2) * p
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    denominator = tl.math.div_rn(tl.math.sqrt_rn(v), tl.load(scalars + 1) + tl.zeros_like(v)) + eps
    p = p - tl.math.div_rn(tl.load(scalars) * m, denominator)
    tl.store(param, p, mask=mask)
    tl.store(exp_avg, m, mask=mask)
    tl.store(exp_avg_sq, v, mask=mask)
    if PUBLISH:
        tl.store(publish, p.to(publish.dtype.element_ty), mask=mask)


@jit
def adamw_flat(param, grad, exp_avg, exp_avg_sq, scalars, grad_scale, found_inf, publish, numel, beta1, rest1, beta2,
               rest2, eps, MAXIMIZE: constexpr, GRAD_SCALE: constexpr, FOUND_INF: constexpr,
               PUBLISH: constexpr, BLOCK: constexpr):  # fmt: skip
    skip = False
    if FOUND_INF:
        skip = tl.load(found_inf) != 0
    if not skip:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        at = tl.arange(0, BLOCK)
        here = start + at
        if start + BLOCK <= numel:  # no mask: 128-bit accesses
            _adamw_block(param + here, grad + here, exp_avg + here, exp_avg_sq + here, scalars, grad_scale,
                         publish + here, None, beta1, rest1, beta2, rest2, eps, MAXIMIZE, GRAD_SCALE,
                         PUBLISH)  # fmt: skip
        else:
            _adamw_block(param + here, grad + here, exp_avg + here, exp_avg_sq + here, scalars, grad_scale,
                         publish + here, at < numel - start, beta1, rest1, beta2, rest2, eps, MAXIMIZE, GRAD_SCALE,
                         PUBLISH)  # fmt: skip


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
