"""Item 2: hooks on gradients, and the other ways into autograd."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from models import mlp
from rows import STEPS, Script, plain, row
from torch import Tensor, nn

import zc


@row(2, "a hook on a parameter sees its gradient")
def param_hook(s: Script) -> None:
    grads: list[Tensor] = []
    s.model[0].weight.register_hook(lambda grad: grads.append(grad.clone()))
    for step in range(STEPS):
        s.loss(step).backward()
        s.note(f"hooked {step}", grads[-1])
        s.update()
    s.note("calls", len(grads))


@row(2, "a hook that changes a gradient, registered after a step")
def changing_hook(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    handle = s.model[2].weight.register_hook(lambda grad: grad * 0.5)
    for step in range(1, 3):
        s.loss(step).backward()
        s.update()
    handle.remove()
    s.loss(3).backward()
    s.update()


@row(2, "a post-accumulate-grad hook", refused={"always": "ZcError: post-accumulate-grad hook"})
def post_accumulate_hook(s: Script) -> None:
    s.model[0].weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2.0))
    plain(s)


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2.0))
    return model


row(2, "a post-accumulate-grad hook from before zc.compile", make=hooked,
    refused={"always": "PlanError: post-accumulate-grad hook"})(plain)  # fmt: skip


@row(2, "zc.whole_parameters between two backwards, and a write in it before the step")
def whole_between(s: Script) -> None:
    for step in range(STEPS):
        first, second = s.loss(step), s.loss(step, 1)
        second.backward()
        with zc.whole_parameters(s.model) if s.is_zc else contextlib.nullcontext():
            s.note(f"norm {step}", torch.stack([p.detach().norm() for p in s.model.parameters()]).norm())
        first.backward()
        with zc.whole_parameters(s.model) if s.is_zc else contextlib.nullcontext(), torch.no_grad():
            for param in s.model.parameters():
                param.mul_(0.99)
        s.update()


@row(2, "hooks on modules (full_backward_hook)")
def module_hook(s: Script) -> None:
    s.model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    plain(s)


@row(2, "torch.autograd.grad for parameters, between steps")
def autograd_grad(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.update()
        for k, grad in enumerate(torch.autograd.grad(s.loss(step, 1), list(s.model.parameters()))):
            s.note(f"grad {step} {k}", grad)


@row(2, "torch.autograd.grad for some parameters, before the backward")
def autograd_grad_some(s: Script) -> None:
    for step in range(3):
        loss = s.loss(step)
        (grad,) = torch.autograd.grad(loss, [s.model[2].weight], retain_graph=True)
        s.note(f"grad {step}", grad)
        loss.backward()
        s.update()


@row(2, "backward(inputs=...) for some parameters")
def backward_inputs(s: Script) -> None:
    for step in range(3):
        s.loss(step).backward(inputs=[s.model[0].weight, s.model[2].bias])
        s.update()


@row(2, "an adversarial step: the input's gradient, then a second backward")
def adversarial(s: Script) -> None:
    for step in range(3):
        x, y = s.batch(step)
        x.requires_grad_(True)
        F.mse_loss(s.model(x), y).backward()
        assert x.grad is not None
        F.mse_loss(s.model((x + 0.1 * x.grad).detach()), y).backward()
        s.update()


DOUBLE = {"compiled": 'ZcError: zc.compile(..., backend="eager") trains it'}


@row(2, "a gradient penalty (double backward)", make=lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(),
     nn.Linear(16, 16)), refused=DOUBLE, note="torch.compile's own limit, with and without zc")  # fmt: skip
def gradient_penalty(s: Script) -> None:
    for step in range(3):
        x, y = s.batch(step)
        x.requires_grad_(True)
        loss = F.mse_loss(s.model(x), y)
        (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
        (loss + grad.square().sum()).backward()
        s.update()


@row(2, "a hook over several parameters (register_multi_grad_hook)")
def multi_grad_hook(s: Script) -> None:
    seen: list[list[Tensor | None]] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(s.model.parameters()), lambda grads: seen.append([g if g is None else g.clone() for g in grads])
    )
    for step in range(STEPS):
        s.loss(step).backward()
        for k, grad in enumerate(seen[-1]):
            assert grad is not None
            s.note(f"hooked {step} {k}", grad)
        s.update()
    s.note("calls", len(seen))


@row(2, "a hook on the AccumulateGrad node of a parameter")
def accumulate_node_hook(s: Script) -> None:
    """As apex and Megatron register theirs. The hook gets this rank's gradient."""
    seen: list[Tensor] = []
    node = torch.autograd.graph.get_gradient_edge(s.model[0].weight).node
    node.register_hook(lambda _, grads: seen.append(grads[0].clone()))
    for step in range(STEPS):
        s.loss(step).backward()
        s.note(f"hooked {step}", seen[-1])
        s.update()
    s.note("calls", len(seen))


@row(2, "the gradient of an activation (retain_grad)")
def retain_grad(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        out = s.model(x)
        out.retain_grad()
        F.mse_loss(out, y).backward()
        assert out.grad is not None
        s.note(f"grad {step}", out.grad)
        s.update()


@row(2, "two forwards, then their backwards in reverse order")
def reverse_order(s: Script) -> None:
    for step in range(STEPS):
        first, second = s.loss(step, 0), s.loss(step, 1)
        second.backward()
        first.backward()
        s.update()


STALE = "PyTorch's own, with and without zc: run the forward again after the step"


@row(2, "a backward through a forward of before the step", note=STALE,
     refused={"always": "RuntimeError: modified by an inplace operation"})  # fmt: skip
def stale_forward(s: Script) -> None:
    old_loss = s.loss(0, 1)
    s.loss(0).backward()
    s.update()
    old_loss.backward()


@row(2, "anomaly detection")
def anomaly(s: Script) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        plain(s)


@row(2, "saved tensors kept elsewhere (saved_tensors_hooks)")
def saved_tensors(s: Script) -> None:
    for step in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            loss = s.loss(step)
        loss.backward()
        s.update()


@row(2, "torch.func.functional_call with the model's own parameters")
def functional_call(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step)
        F.mse_loss(torch.func.functional_call(s.model, dict(s.model.named_parameters()), (x,)), y).backward()
        s.update()


@row(2, "torch.func.functional_call with other values (a look ahead)")
def look_ahead(s: Script) -> None:
    for step in range(3):
        x, y = s.batch(step)
        ahead = {name: p - 0.1 * p.detach() for name, p in s.model.named_parameters()}
        F.mse_loss(torch.func.functional_call(s.model, ahead, (x,)), y).backward()
        s.update()
