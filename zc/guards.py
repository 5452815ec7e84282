"""Guards a compiled model against operations that other code applies to any module: moves, DDP, flattening of RNNs.

A framework may move the model to its own device under another name (``cpu:0``). That would copy all weights out of
their buckets, where no update reaches them, so a move that changes nothing is skipped. On a GPU,
`torch.nn.LSTM.flatten_parameters` would move the weights from their bucket into cuDNN's buffer, so it does nothing.
``model.no_sync()`` works as in DDP.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.copies import Instead, NoSync, NotForDDP, mark
from zc.engine.sharded_weights import ShardedWeights
from zc.errors import ZcError
from zc.optim.sharded_grad import ShardedGrad

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


def install(model: nn.Module, runtime: Runtime) -> None:
    """Installs the guards; `zc.copies.unmark` removes them."""
    mark(model)
    known = weakref.ref(runtime)
    torch_private.set_apply(model, Instead(model, "_apply", partial(_apply, weakref.ref(model), known)))
    torch_private.tell_ddp(model, NotForDDP())
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = NoSync(partial(_no_sync, known))
    weights = runtime.weights
    if isinstance(weights, ShardedWeights):
        for module in model.modules():
            pickled = partial(_pickled, weakref.ref(weights), weakref.ref(module))
            vars(module)["__getstate__"] = Instead(module, "__getstate__", pickled)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            call: Any = torch.compiler.disable(partial(_leave_weights, known, name))  # type: ignore[no-untyped-call]
            vars(module)["flatten_parameters"] = Instead(module, "flatten_parameters", call)


def _no_sync(known: weakref.ref[Runtime]) -> AbstractContextManager[None] | None:
    runtime = known()
    return runtime.no_sync() if runtime is not None else None


def install_call(block: nn.Module, call: Callable[..., Any]) -> None:
    """``block(...)`` is ``call(...)``; `zc.copies.unmark` takes it back."""
    torch_private.set_call(block, Instead(block, "_call_impl", call))


def _apply(
    of_model: weakref.ref[nn.Module],
    known: weakref.ref[Runtime],
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    model, runtime = of_model(), known()
    assert model is not None
    if runtime is None:
        return torch_private.plain_apply(model, function, recurse)
    places = {id(param) for param in runtime.placed.values()}
    if isinstance(runtime.weights, ShardedWeights):
        with runtime.weights.passes.named_plainly():
            return torch_private.plain_apply(model, _refusing_moves(places, function), recurse)
    return torch_private.plain_apply(model, _keeping(places, function), recurse)


def _pickled(known: weakref.ref[ShardedWeights], of_module: weakref.ref[nn.Module]) -> dict[str, Any]:
    """The state of a module for ``torch.save(model)`` and copies (stage 3)."""
    weights, module = known(), of_module()
    assert module is not None
    if weights is not None:
        weights.refuse_without_bytes("pickling or copying the model", module)
    hooks = {handle.id for handle in weights.hooks} if weights is not None else set()
    state = torch_private.state_to_pickle(module, hooks)
    del state["__getstate__"]
    return state


def _keeping(places: set[int], function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, except that it keeps parameters in buckets which it would only copy. Torch applies it to a
    parameter's gradient after the parameter."""
    is_kept = False

    def apply(tensor: Tensor) -> Tensor:
        nonlocal is_kept
        if is_kept and isinstance(tensor, ShardedGrad):
            return tensor
        result = function(tensor)
        is_kept = id(tensor) in places and (result is tensor or _is_same(tensor.detach(), result.detach()))
        return tensor if is_kept else result

    return apply


def _refusing_moves(places: set[int], function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, except that parameters, which have no bytes (stage 3), stay as they are where it would only copy
    them, and raise ZcError where it would not."""

    def apply(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedGrad):
            return tensor
        if id(tensor) not in places:
            return function(tensor)
        like = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
        result = function(like)
        if (result.dtype, result.device) != (like.dtype, like.device):
            raise ZcError(
                f"a parameter of {like.dtype} on {like.device} was to become {result.dtype} on {result.device}, and "
                "its bytes lie in shards: move or cast the model before zc.compile, or use param_dtype"
            )
        return tensor

    return apply


def _is_same(one: Tensor, other: Tensor) -> bool:
    if _facts(one) != _facts(other):
        return False
    bits = [tensor.to(one.device).reshape(-1).view(torch.uint8) for tensor in (one, other)]  # a NaN equals itself
    return torch.equal(*bits)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.dtype, tensor.shape, strides, tensor.device.type, tensor.device.index or 0


def _leave_weights(known: weakref.ref[Runtime], name: str) -> None:
    runtime = known()
    if runtime is not None:
        runtime.say_once(
            f"{name + '.' if name else ''}flatten_parameters() does nothing: on a GPU it would move the weights out of "
            "their bucket. cuDNN copies them together in each call, and may warn of that"
        )
