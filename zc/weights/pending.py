"""Makes reads of parameters wait while their new values may still be in flight (overlap_gather).

From ``optimizer.step()`` until the main stream has waited for its bucket, a parameter has a class of zc's. Its
``__torch_function__`` waits, gives the parameter its own class back, and then calls the function. So ``p.norm()``, an
average of the weights, a clamp or a copy right after the step sees the update, as without overlap. Functions that read
no element (``p.grad``, ``p.shape``) do not wait. torch's lazy parameters change their class in the same way.

A ``p.data``, view or array from before the step reaches the memory without the parameter. While one exists,
`zc.weights.overlapped` makes the step wait. zc can't see an address, a DLPack capsule or a storage object, nor a
C++ extension that bypasses torch's dispatch: call `zc.synchronize` before you use these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zc import torch_private

# of all models in this process; the thread that uses a model, or reads its parameters, changes its own entry
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
        *(getattr(Tensor, f"new_{name}") for name in ("zeros", "ones", "empty", "empty_strided", "full", "tensor")),
    }
)  # fmt: skip


class PendingParameter(nn.Parameter):
    """The class of a parameter while its new value may be in flight."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """``type(param)(...)`` is meant to make an ordinary parameter."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    @torch_private.not_compiled_alone
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in NO_VALUE:
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        _arrive([leaf for leaf in torch_private.tensors_in((args, kwargs)) if type(leaf) is PendingParameter])
        return func(*args, **(kwargs or {}))  # these parameters have their own class again

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """nn.Parameter's own method checks the class before it reads the value, so this one waits first."""
        _arrive([self])
        copied: nn.Parameter = self.__deepcopy__(memo)
        return copied


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _arrive(params: list[nn.Parameter]) -> None:
    """Waits for the gathers of ``params``; if there are none, for all gathers: the read is of an unknown one."""
    for pending in list(_WAITING):
        pending.arrive(params)
    for param in params:  # a parameter whose model is gone has nobody to wait for
        param.__class__ = nn.Parameter


def _make_plain(watched: dict[int, list[nn.Parameter]]) -> None:
    for params in watched.values():
        for param in params:
            param.__class__ = nn.Parameter
    watched.clear()


def can_be_watched(param: nn.Parameter) -> bool:
    """Whether the parameter has torch's own class, which is the only one that zc exchanges."""
    return type(param) is nn.Parameter


class Pending:
    """The parameters of one model that are watched, by bucket. ``wait`` is called before some are read, with these
    parameters, or with none for all. It is a method, referenced weakly."""

    def __init__(self, wait: Callable[[Sequence[nn.Parameter]], None]) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._params: dict[int, list[nn.Parameter]] = {}
        weakref.finalize(self, _make_plain, self._params).atexit = False

    def add(self, bucket: int, params: Iterable[nn.Parameter]) -> None:
        """Makes reads of these parameters wait from now on. All must pass `can_be_watched`."""
        if bucket in self._params:
            return
        self._params[bucket] = list(params)
        for param in self._params[bucket]:
            param.__class__ = PendingParameter
        _WAITING.add(self)

    def release(self, first: int = 0) -> None:
        """Gives the parameters of bucket ``first`` and all later ones their own class back, without waiting."""
        _make_plain({bucket: self._params.pop(bucket) for bucket in list(self._params) if bucket >= first})
        if not self._params:
            _WAITING.discard(self)

    def arrive(self, params: Sequence[nn.Parameter]) -> None:
        """Called at a read."""
        wait = self._wait()
        if wait is None:
            self.release()
        else:
            wait(params)
