"""Makes reads of parameters wait while their new values may still be in flight (overlap_gather).

Between ``optimizer.step()`` and the next forward, parameters have a class whose ``__torch_function__`` waits for the
gathers, gives all parameters their own class back, and then calls the function. So ``p.norm()``, an average of the
weights, a clamp or a copy right after the step sees the update, as without overlap. Functions that read no element
(``p.grad``, ``p.shape``) do not wait. torch's lazy parameters change their class in the same way.

A ``p.data``, view or array from before the step reaches the memory without the parameter. While one exists,
`zc.engine.overlap_gather` makes the step wait. zc can't see an address, a DLPack capsule or a storage object, nor a C++
extension that bypasses torch's dispatch: call `zc.synchronize` before you use these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zc import torch_private

_WAITING: weakref.WeakSet[Pending] = weakref.WeakSet()

# functions that read no element of a parameter
NO_VALUE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in (
            "grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "nbytes",
            "is_cuda", "is_meta", "itemsize", "_version",
        )),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(Tensor, name) for name in (
            "size", "numel", "nelement", "dim", "stride", "storage_offset", "element_size", "is_contiguous",
            "is_floating_point", "is_complex", "get_device", "requires_grad_", "__len__",
        )),
        torch.is_tensor, torch.is_floating_point, torch.is_complex, torch.numel,
        *(getattr(torch, f"{name}_like") for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")),
        *(getattr(Tensor, f"new_{name}") for name in ("zeros", "ones", "empty", "full", "tensor")),
    }
)  # fmt: skip


class PendingParameter(nn.Parameter):
    """The class of a parameter while its new value may be in flight."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """``type(param)(...)`` is meant to make an ordinary parameter."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in NO_VALUE:
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        _arrive()
        return func(*args, **(kwargs or {}))  # the parameters have their own class again

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """nn.Parameter's own method checks the class before it reads the value, so this one waits first."""
        _arrive()
        copied: nn.Parameter = self.__deepcopy__(memo)
        return copied


def _arrive() -> None:
    for pending in list(_WAITING):
        pending.arrive()


def _make_plain(params: list[nn.Parameter]) -> None:
    for param in params:
        param.__class__ = nn.Parameter
    params.clear()


def can_be_watched(param: nn.Parameter) -> bool:
    """Whether the parameter has torch's own class, which is the only one that zc exchanges."""
    return type(param) is nn.Parameter


class Pending:
    """The parameters of one model. ``wait`` is called before one is read; it is a method, referenced weakly."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._params: list[nn.Parameter] = []
        weakref.finalize(self, _make_plain, self._params).atexit = False

    def leave(self, params: Iterable[nn.Parameter]) -> None:
        """Makes reads of these parameters wait from now on. All must pass `can_be_watched`."""
        for param in params:
            param.__class__ = PendingParameter
            self._params.append(param)
        _WAITING.add(self)

    def release(self) -> None:
        """Gives the parameters their own class back, without waiting."""
        _make_plain(self._params)
        _WAITING.discard(self)

    def arrive(self) -> None:
        """Called at a read: waits for the gathers."""
        self.release()
        wait = self._wait()
        if wait is not None:
            wait()
