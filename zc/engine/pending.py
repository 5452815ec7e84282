"""Parameters whose new values may still be on their way: whoever reads one waits (overlap_gather).

Between ``optimizer.step()`` and the next forward each parameter is of a class whose ``__torch_function__`` waits for
the gathers, gives every parameter its own class back, and then does what was asked. So ``p.norm()``, an average of the
weights, a clamp or a copy right after the step see the update, as without overlap. What asks for no value (``p.grad``,
``p.shape``) does not wait. The class of a tensor is changed as torch's own lazy parameters change theirs.

Memory may be reached without the parameter, through a ``p.data``, a view or an array that was kept from before the
step: while such a thing lives, `zc.engine.overlap_gather` lets the step wait. Not seen: an address, a DLPack capsule or
a storage object that was kept, and a C++ extension that takes parameters past torch's dispatch; `zc.synchronize` is for
those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zc import torch_private

_WAITING: weakref.WeakSet[Pending] = weakref.WeakSet()

# What asks a parameter for no element of it
NO_VALUE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in (
            "grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "nbytes",
            "is_cuda", "itemsize", "_version",
        )),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(Tensor, name) for name in (
            "size", "numel", "nelement", "dim", "stride", "storage_offset", "element_size", "is_contiguous",
            "is_floating_point", "is_complex", "get_device", "requires_grad_", "__len__",
        )),
        torch.is_tensor, torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip


class PendingParameter(nn.Parameter):
    """A parameter while its value may be on its way."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """Who makes another one by ``type(param)(...)`` means a parameter."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in NO_VALUE:
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        _arrive()
        return func(*args, **(kwargs or {}))  # of plain parameters by now

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """nn.Parameter's looks at the class first, then at the value."""
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
    """Whether it is of torch's own class: another one can't be exchanged."""
    return type(param) is nn.Parameter


class Pending:
    """The parameters of one model. ``wait``: a method, held weakly, that does what must be done before one is read."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = weakref.WeakMethod(wait)
        self._params: list[nn.Parameter] = []
        weakref.finalize(self, _make_plain, self._params).atexit = False

    def leave(self, params: Iterable[nn.Parameter]) -> None:
        """From here on a read of one of these, which `can_be_watched`, waits."""
        for param in params:
            param.__class__ = PendingParameter
            self._params.append(param)
        _WAITING.add(self)

    def release(self) -> None:
        """Plain parameters again: who reads them now knows what to wait for."""
        _make_plain(self._params)
        _WAITING.discard(self)

    def arrive(self) -> None:
        """Somebody reads."""
        self.release()
        wait = self._wait()
        if wait is not None:
            wait()
