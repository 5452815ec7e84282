"""Refuses reads of parameters that have no bytes, with an error that names the way out.

Outside of the model's forward and backward, each parameter has a class whose ``__torch_function__`` refuses functions
that read an element. In a forward or backward that is not compiled, it first gathers the bytes. torch's lazy parameters
and `zc.engine.pending` change the class of a tensor in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from zc import torch_private
from zc.engine.pending import NO_VALUE
from zc.errors import ZcError, not_compiled, stepping_optimizer
from zc.planning.layout import own_strides

_OWNERS: Any = WeakIdKeyDictionary()  # parameter -> its Absent

# functions that read no element, and those that hooks on parameters need
_ALLOWED = NO_VALUE | torch_private.hook_attributes()
_VIEWS = frozenset((Tensor.view_as, Tensor.expand_as))
_DATA: Any = Tensor.data
_ALIASES = (_DATA.__get__, Tensor.detach)
_AS_ANOTHER = frozenset((Tensor.to, Tensor.type_as))  # of another tensor they read dtype and device
_RAW = frozenset(  # may lead to writes that autograd does not count
    (
        _DATA.__get__, _DATA.__set__, Tensor.numpy, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__array__,
        Tensor.__dlpack__,
    )
)  # fmt: skip
_BACKWARD = frozenset((Tensor.backward, torch.autograd.backward))


def _way_out(param: Tensor) -> str:
    return (
        f"that has no bytes: with {_why(param)} it has them only inside the model's forward and backward. Use `with "
        "zc.whole_parameters(model):` on all ranks to read or write values, zc.full_state_dict(model) for all of them "
        "on rank 0, zc.save for a checkpoint"
    )


def _why(param: Tensor) -> str:
    """The option of `zc.compile` that has taken the bytes."""
    owner = _OWNERS.get(param)
    return owner.why if owner is not None else "sharded weights"


class AbsentParameter(nn.Parameter):
    """A parameter that has its shape but no bytes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """``type(param)(...)`` is meant to make an ordinary parameter."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.copy_ and _is_loaded(*args):
            return args[0]
        if func is torch.autograd.grad:
            return _grad(*args, **(kwargs or {}))
        params = [a for a in torch_private.tensors_in((args, kwargs)) if isinstance(a, AbsentParameter)]
        if func in _BACKWARD:
            return _backward(func, params, args, kwargs or {})
        is_view = func in _VIEWS or (func in _ALIASES and not _can_read(func, params))
        is_of_another = func in _AS_ANOTHER and not isinstance(args[0], AbsentParameter)
        if func not in _ALLOWED and not is_view and not is_of_another:
            _need(func, params)
        with torch_private.without_torch_function():
            output = func(*args, **(kwargs or {}))
        if is_view and type(output) is Tensor:
            view: Any = output
            view.__class__, view.param = AbsentView, args[0]
        return output

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Never raises: debuggers print parameters, too."""
        if _can_read(Tensor.__repr__, [self]):
            with torch_private.without_torch_function():
                return str(nn.Parameter.__repr__(self))  # type: ignore[no-untyped-call]
        return f"Parameter of shape {tuple(self.shape)}, {self.dtype}, {self.device}, without bytes (zc, {_why(self)})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        _need("copy.deepcopy", [self])
        copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _need("pickling", [self])
        return nn.Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]


class AbsentView(Tensor):
    """The result of ``data``, ``detach``, view_as or expand_as of an AbsentParameter, ``param``. Hooks and code like
    DDP read its ``grad_fn``, which leads to the parameter's own node, or its shape, but no element."""

    param: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _ALLOWED:
            view = next(a for a in torch_private.tensors_in((args, kwargs)) if isinstance(a, AbsentView))
            raise ZcError(f"{getattr(func, '__name__', func)} reads a view of a parameter {_way_out(view.param)}")
        with torch_private.without_torch_function():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"view of shape {tuple(self.shape)} of a parameter without bytes (zc, {_why(self.param)})"


def _backward(func: Any, params: list[AbsentParameter], args: Any, kwargs: Any) -> Any:
    """Runs ``backward(inputs=params)``, which reads no element of them, so they are plain parameters meanwhile. Eager
    code of that backward has read its parameters in the forward, so they are whole."""
    lent = [param for param in params if Absent.lend(param)]
    try:
        return func(*args, **kwargs)
    finally:
        for param in lent:
            Absent.take_back(param)
            _can_read(_DATA.__get__, [param])  # a hook may have written what is whole


def _grad(outputs: Any, inputs: Any, *, materialize_grads: bool, **others: Any) -> tuple[Tensor | None, ...]:
    """Runs torch.autograd.grad, which reads no element of its inputs, with their edges of the graph instead. Inside
    `without_torch_function`, eager code of the backward would read parameters that have no bytes."""
    _need(torch.autograd.grad, [each for each in outputs if isinstance(each, AbsentParameter)])
    with torch_private.without_torch_function():
        edges = [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in inputs]
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, edges, **others)
    with torch_private.without_torch_function():
        pairs = zip(inputs, grads, strict=True)
        return tuple(torch.zeros_like(p) if grad is None and materialize_grads else grad for p, grad in pairs)


def _can_read(what: Any, params: list[AbsentParameter]) -> bool:
    """Makes these parameters whole if their owners can, and says whether they are."""
    owners = [(_OWNERS.get(param), param) for param in params]
    return all(owner is None or owner.read(param, what in _RAW) for owner, param in owners)


def _need(what: Any, params: list[AbsentParameter]) -> None:
    for param in params:
        if not _can_read(what, [param]):
            if (optimizer := stepping_optimizer()) is not None:
                raise ZcError(
                    f"{optimizer}.step() met a parameter of shape {tuple(param.shape)}, whose bytes lie in shards with "
                    f"{_why(param)}: {not_compiled(optimizer)}"
                )
            name = getattr(what, "__name__", str(what))
            raise ZcError(f"{name} reads a parameter of shape {tuple(param.shape)} {_way_out(param)}")


def _is_loaded(param: Tensor, value: Tensor, *_: Any) -> bool:
    """Whether ``param.copy_(value)`` is part of a load_state_dict; if so, this rank's elements are written."""
    owner = _OWNERS.get(param) if isinstance(param, AbsentParameter) else None
    return owner is not None and owner.load(param, value)


class Absent:
    """The parameters of one model. Both methods are held weakly.

    Args:
        get_bytes: ``(param, is_raw)``: makes a parameter whole if it can, and says whether it is. ``is_raw``: the
            caller may write it without autograd noticing.
        load: ``(param, value)``: if a load_state_dict runs, writes the value into shards and returns True.
        why: the option of `zc.compile` by which they have none.
    """

    def __init__(
        self, get_bytes: Callable[[nn.Parameter, bool], bool], load: Callable[[nn.Parameter, Tensor], bool], why: str
    ) -> None:
        self.why = why
        self._get_bytes, self._load = weakref.WeakMethod(get_bytes), weakref.WeakMethod(load)
        # weak: `_OWNERS` keeps this object as long as any of its parameters lives
        self._params: list[weakref.ref[nn.Parameter]] = []

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """From now on a read of these parameters is refused or gathers their bytes. Skips empty parameters."""
        for param in params:
            if type(param) is nn.Parameter and param.numel() > 0:
                param.__class__ = AbsentParameter
                self._params.append(weakref.ref(param))
                _OWNERS[param] = self

    def release(self) -> None:
        """Makes them plain parameters again. The caller then sees to their bytes."""
        for ref in self._params:
            if (param := ref()) is not None:
                param.__class__ = nn.Parameter
        self._params.clear()

    @staticmethod
    def lend(param: nn.Parameter) -> bool:
        """Makes it a plain parameter until `take_back`; False if it is one already."""
        is_absent = type(param) is AbsentParameter
        if is_absent:
            param.__class__ = nn.Parameter
        return is_absent

    @staticmethod
    def take_back(param: nn.Parameter) -> None:
        param.__class__ = AbsentParameter

    def read(self, param: nn.Parameter, is_raw: bool) -> bool:
        get_bytes = self._get_bytes()
        return get_bytes is None or get_bytes(param, is_raw)

    def load(self, param: nn.Parameter, value: Tensor) -> bool:
        load = self._load()
        return load is not None and load(param, value)


def give_bytes(param: nn.Parameter) -> Tensor:
    """Gives a parameter memory of its own, with nothing defined in it. Returns its ``data`` without bytes.

    To take the memory away again, assign that to ``data``. The memory then goes with the last tensor that shares it,
    such as a view that the program has kept: to empty its storage would leave that one without memory.
    """
    with torch.inference_mode(False), torch.no_grad(), torch_private.without_torch_function():
        empty = param.data
        param.data = torch.empty_like(empty, memory_format=torch.preserve_format)
    return empty


def without_bytes(param: nn.Parameter, slot_dtype: torch.dtype) -> Tensor:
    """A tensor of the shape and device of ``param`` and the strides that it has in its slot, whose storage has no
    bytes."""
    is_dense = own_strides(param.shape, param.stride()) is not None
    order = torch.preserve_format if is_dense else torch.contiguous_format
    empty = torch.empty_like(param.detach(), dtype=slot_dtype, memory_format=order)
    empty.untyped_storage().resize_(0)
    return empty
