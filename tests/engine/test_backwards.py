"""Which of autograd's backwards run: they end, raise, and run inside each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zc
from zc import torch_private
from zc.engine.runtime import Backwards, drop_failed


class _Calls(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def _backward(*calls: Callable[[], object]) -> None:
    """A backward that makes these calls in order."""
    with torch.enable_grad():  # off inside another backward
        x = torch.ones(1, requires_grad=True)
        for call in reversed(calls):
            x = _Calls.apply(x, call)  # type: ignore[no-untyped-call]
        x.backward()  # type: ignore[no-untyped-call]


def _raise() -> None:
    raise FloatingPointError("planted")


def test_a_backward_ends() -> None:
    backwards, events = Backwards(lambda: None), list[str]()

    def begin() -> None:
        assert not backwards.has_begun()
        backwards.begin(lambda: events.append("end"))
        assert backwards.has_begun()

    _backward(begin, lambda: events.append("next"))
    assert events == ["next", "end"]
    assert not backwards.open and not backwards.has_raised()


def test_a_backward_raises() -> None:
    backwards, ended = Backwards(lambda: None), list[int]()
    with pytest.raises(FloatingPointError):
        _backward(lambda: backwards.begin(lambda: ended.append(1)), _raise)
    assert backwards.open and backwards.has_raised()
    backwards.forget_raised()
    assert not backwards.open and not ended


def test_whether_the_program_has_stopped_after_a_backward_that_raised() -> None:
    """It has not, if it compiles a forward: that may take longer than the others' patience."""
    backwards, seen = Backwards(lambda: None), list[bool]()
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            _backward(lambda: backwards.begin(lambda: None), _raise)
        seen.append(backwards.has_stopped())
        backwards.go_on()
        seen.append(backwards.has_stopped())
    assert seen == [True, False] * 2 and backwards.has_raised()


def test_a_program_that_compiles_a_forward_has_not_stopped() -> None:
    model = nn.Linear(4, 4)
    zc.compile(model, torch.optim.SGD(model.parameters()), backend="aot_eager")
    backwards, seen = zc.registry.sharded(model).runtime.backwards, list[bool]()
    for rows in (2, 3):
        x = torch.ones(rows, 4, requires_grad=True)
        loss = model(x).sum()
        seen.append(backwards.has_stopped())
        x.register_hook(lambda _: _raise())
        with pytest.raises(FloatingPointError):
            loss.backward()
        seen.append(backwards.has_stopped())
    assert seen == [False, True] * 2


def test_autograd_drops_a_backward_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the thread of a device does, which the caller's error does not wait for."""
    held, failed = list[Callable[[], None]](), list[int]()
    monkeypatch.setattr(torch_private, "queue_callback", held.append)
    backwards = Backwards(lambda: failed.append(1))
    _backward(lambda: backwards.begin(lambda: None))
    assert not backwards.has_raised()
    thread = threading.Timer(0.05, held.clear)
    thread.start()
    drop_failed()
    thread.join()
    assert failed == [1]


def test_the_outermost_backward_ends_last() -> None:
    """An inner one announces nothing itself: the outer one does, once, as soon as the inner one has ended."""
    backwards, events = Backwards(lambda: None), list[str]()

    def begin(name: str) -> None:
        backwards.begin(lambda: events.append(f"end with {name}"))

    def announce() -> None:
        assert backwards.defer_to_outer(lambda: events.append("announced"))

    def inner() -> None:
        _backward(lambda: begin("inner"), announce, announce)
        events.append("inner has ended")

    _backward(lambda: begin("outer"), inner, lambda: events.append("next"))
    assert events == ["inner has ended", "announced", "next", "end with outer"]
    _backward(lambda: events.append(str(backwards.defer_to_outer(_raise))))
    assert events[-1] == "False"


def test_an_inner_backward_raises_and_is_caught() -> None:
    backwards, seen = Backwards(lambda: None), list[tuple[bool, bool]]()

    def inner() -> None:
        with pytest.raises(FloatingPointError):
            _backward(lambda: backwards.begin(_raise), _raise)
        seen.append((backwards.has_raised(), bool(backwards.open)))
        backwards.forget_raised()
        seen.append((backwards.has_raised(), bool(backwards.open)))

    _backward(lambda: backwards.begin(lambda: seen.append((False, False))), inner)
    assert seen == [(True, True), (False, True), (False, False)]


def _weights_after(call: Callable[[nn.Module, Any], object], backend: str | None) -> list[Tensor]:
    """Of two microbatches; a hook makes the call in the second one's backward, after a bias has its gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    if backend is not None:
        zc.compile(net, optimizer, backend=backend)
    try:
        for microbatch in range(2):
            if microbatch:
                net[2].weight.register_hook(lambda _: [call(net, optimizer)].clear())
            net(torch.full((3, 4), 1.0 + microbatch, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        return [param.detach().clone() for param in net.parameters()]
    finally:
        if backend is not None:
            zc.close(net)


def _set_to_none(net: nn.Module, _: object) -> None:
    for param in net.parameters():
        param.grad = None


CHANGES: dict[str, tuple[Callable[[nn.Module, Any], object], str]] = {
    "clips": (lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.01), "asked for inside of a backward"),
    "scales": (lambda net, _: net[0].weight.grad.mul_(0.5), "asked for inside of a backward"),
    "steps": (lambda _, optimizer: optimizer.step(), "asked for inside of a backward"),
    "sets to None": (_set_to_none, "was set to None inside of a backward"),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_hook_that_changes_gradients_inside_of_their_backward_is_refused(how: str, backend: str) -> None:
    """Weights were others than with plain PyTorch, in silence; a step ended in torch's "split_with_sizes expects"."""
    call, text = CHANGES[how]
    with pytest.raises(zc.ZcError, match=text):
        _weights_after(call, backend)


def test_a_hook_that_clears_gradients_inside_of_their_backward() -> None:
    """Op by op it drops what has come so far, as in PyTorch. Compiled, it dropped what has yet to come there."""

    def clear(_: object, optimizer: Any) -> None:
        optimizer.zero_grad()

    for param, wanted in zip(_weights_after(clear, "eager"), _weights_after(clear, None), strict=True):
        torch.testing.assert_close(param, wanted)
    with pytest.raises(zc.ZcError, match="are cleared inside of a backward"):
        _weights_after(clear, "aot_eager")
