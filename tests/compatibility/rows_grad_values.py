"""Item 6: what loops do with param.grad as a value, in place or by assignment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from models import seeded
from rows import Row, Script, add, row, sgd
from torch import Tensor, nn

import zc


def _whole(s: Script) -> contextlib.AbstractContextManager[Any]:
    """Where parameters may be read and written, in every stage."""
    return zc.whole_parameters(s.model) if s.is_zc else contextlib.nullcontext()


def _mask(param: nn.Parameter) -> Tensor:
    """The same zeros and ones on every rank."""
    return (torch.rand(param.shape, generator=seeded(1, param.numel())) > 0.5).to(param.dtype)


def _set_data(s: Script, p: Any) -> None:
    p.grad.data = p.grad.data + 0.1 * p.grad.data.sign()


def _assign(new: Callable[[Any], Tensor]) -> Callable[[Script, Any], None]:
    def use(s: Script, p: Any) -> None:
        p.grad = new(p.grad)

    return use


def _set_by_mask(s: Script, p: Any) -> None:
    p.grad[p.grad.abs() < p.grad.abs().mean()] = 0.0


def _centralise(s: Script, p: Any) -> None:
    if p.dim() > 1:
        p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def _clip_by_weights(s: Script, p: Any) -> None:
    """Adaptive gradient clipping, by whole parameters."""
    most = 0.01 * p.detach().norm().clamp(min=1e-3)
    p.grad.mul_((most / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


EDITS: dict[str, Callable[[Script, Any], Any]] = {
    "clamp_": lambda s, p: p.grad.clamp_(-1e-3, 1e-3),
    "clip_grad_value_": lambda s, p: torch.nn.utils.clip_grad_value_([p], 1e-3),
    "nan_to_num_ of a division by itself": lambda s, p: p.grad.div_(p.grad.clone().mul_(_mask(p))).nan_to_num_(0, 0, 0),
    "sign_": lambda s, p: p.grad.sign_(),
    "+= a mask times itself": lambda s, p: p.grad.add_(p.grad * _mask(p)),
    "weight decay by add_(p)": lambda s, p: p.grad.add_(p.detach(), alpha=0.1),
    "noise that all ranks have": lambda s, p: p.grad.add_(_mask(p), alpha=0.01),
    "elements set by a mask": _set_by_mask,
    "masked_fill_": lambda s, p: p.grad.masked_fill_(_mask(p) > 0, 0.25),
    "torch.where, assigned": _assign(lambda g: torch.where(g.isnan() | (g < 0), 0.0, g)),
    "half of it, assigned": _assign(lambda g: g * 0.5),
    "its .data assigned": _set_data,
    "a clone, assigned": _assign(lambda g: g.detach().clone()),
    "mean and deviation of one": _assign(lambda g: (g - g.mean()) / (g.std() + 1e-3) if g.numel() > 1 else g),
    "centralised by rows": _centralise,
    "adaptive clipping by whole parameters": _clip_by_weights,
    "torch._foreach_ functions": lambda s, p: torch._foreach_lerp_([p.grad], [p.grad.sign()], 0.01),
    "a power of its magnitude": _assign(lambda g: g.sign() * (g.abs() + 1e-6).pow(0.75)),
}  # fmt: skip


def _edited(edit: Callable[[Script, Any], Any]) -> Callable[[Script], None]:
    def loop(s: Script) -> None:
        for step in range(3):
            s.loss(step).backward()
            s.reduced()
            with _whole(s):
                for param in s.model.parameters():
                    edit(s, param)
            s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0))
            s.update()

    return loop


for _name, _edit in EDITS.items():
    add(Row(f"param.grad edited: {_name}", 6, _edited(_edit), optimizer=sgd))


@row(6, "numbers of each param.grad: sum, mean, max, min, any, all, count_nonzero, dot", tolerance=2e-5)
def numbers(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        for name, p in s.model.named_parameters():
            g: Any = p.grad
            for call in ("sum", "mean", "max", "min", "any", "all", "count_nonzero"):
                s.note(f"{name} {step} {call}", getattr(g, call)())
            s.note(f"{name} {step} largest", g.abs().max())
            s.note(f"{name} {step} square", (g * g).sum())
            s.note(f"{name} {step} finite", torch.isfinite(g).all())
            s.note(f"{name} {step} bad", g.isnan().sum())
            for order in (0, 1, 3, float("inf")):
                s.note(f"{name} {step} {order}", g.norm(order))
        s.update()


@row(6, "momentum by hand: a value kept from step to step, and assigned", optimizer=sgd)
def momentum(s: Script) -> None:
    kept: dict[str, Tensor] = {}
    for step in range(4):
        s.loss(step).backward()
        s.reduced()
        for name, p in s.model.named_parameters():
            assert p.grad is not None
            kept[name] = p.grad.clone() if step == 0 else kept[name].mul_(0.9).add_(p.grad)
            p.grad = kept[name]
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.05)
        s.update()


@row(6, "an average of gradients amplified (Grokfast)", optimizer=sgd)
def grokfast(s: Script) -> None:
    slow = None
    for step in range(4):
        s.loss(step).backward()
        s.reduced()
        params = dict(s.model.named_parameters())
        if slow is None:
            slow = {name: p.grad.data.detach() for name, p in params.items()}
            slow = {name: g.clone() for name, g in slow.items()}
        for name, p in params.items():
            slow[name] = slow[name] * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + slow[name] * 2.0
        s.update()


@row(6, "gradients kept across zero_grad, and two tasks' gradients projected (PCGrad)")
def projected(s: Script) -> None:
    for step in range(3):
        kept = []
        for m in range(2):
            s.loss(step, m).backward()
            s.reduced()
            kept.append({name: p.grad.clone() for name, p in s.model.named_parameters()})
            s.optimizer.zero_grad()
        for name, p in s.model.named_parameters():
            one, other = kept[0][name], kept[1][name]
            dot = (one * other).sum()
            p.grad = one + other - torch.where(dot < 0, dot / other.norm() ** 2, 0.0) * other
        s.update()


@row(6, "an assigned param.grad, and a backward that adds to it")
def added(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        for p in s.model.parameters():
            p.grad = p.grad * 0.5
        s.loss(step, 1).backward()
        s.update()


@row(6, "a whole tensor that is written with gradients", optimizer=sgd)
def whole_sums(s: Script) -> None:
    sums = [torch.zeros(p.shape, dtype=p.dtype) for p in s.model.parameters()]
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        for total, p in zip(sums, s.model.parameters(), strict=True):
            total.mul_(0.5).add_(p.grad)
        torch._foreach_add_(sums, [p.grad for p in s.model.parameters()], alpha=0.1)
        s.update()
    for k, total in enumerate(sums):
        s.note(f"sum {k}", total)


@row(6, "clip_grad_norm_ with foreach, of orders 0.5, 1, 2, 3 and inf")
def clip_foreach(s: Script) -> None:
    for step, order in enumerate((0.5, 1.0, 2.0, 3.0, float("inf"))):
        s.loss(step).backward()
        s.reduced()
        norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1, norm_type=order, foreach=step % 2 == 0)
        s.note(f"norm {step}", norm)
        s.update()


@row(6, "noise drawn in place, by ranks with one seed", oracle_dtype=torch.float32)
def drawn(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.reduced()
        torch.manual_seed(step)
        for p in s.model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            p.grad.mul_(torch.empty_like(p.grad).bernoulli_(0.5))
        s.update()


@row(6, "param.grad assigned from another parameter", refused={"always": "UncoveredGradientError: param.grad by hand"})
def of_another(s: Script) -> None:
    s.loss(0).backward()
    s.model[0].weight.grad = s.model[2].weight.grad * 0.5
    s.optimizer.step()


@row(6, "a handle of param.grad used after zero_grad", refused={"always": "ZcError: clone it before"})
def stale(s: Script) -> None:
    s.loss(0).backward()
    grad = s.model[0].weight.grad
    s.optimizer.zero_grad()
    s.loss(1).backward()
    grad.mul_(2.0)
