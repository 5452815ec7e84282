"""Guards a compiled model against operations that other code applies to any module: moves, DDP, flattening of RNNs.

A framework may move the model to the device that it is on, under another name (``cpu:0``). That would copy all weights
out of their buckets, and no update would reach the copies, so a move that changes nothing is skipped. On a GPU,
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
    of_runtime = weakref.ref(runtime)
    torch_private.set_apply(model, Instead(model, "_apply", partial(_apply, weakref.ref(model), of_runtime)))
    torch_private.tell_ddp(model, NotForDDP())
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = NoSync(partial(_no_sync, of_runtime))
    weights = runtime.weights
    if isinstance(weights, ShardedWeights):
        for module in model.modules():
            get_state = partial(_state_to_pickle, weakref.ref(weights), weakref.ref(module))
            vars(module)["__getstate__"] = Instead(module, "__getstate__", get_state)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            call: Any = torch.compiler.disable(partial(_skip_flattening, of_runtime, name))  # type: ignore[no-untyped-call]
            vars(module)["flatten_parameters"] = Instead(module, "flatten_parameters", call)


def _no_sync(of_runtime: weakref.ref[Runtime]) -> AbstractContextManager[None] | None:
    runtime = of_runtime()
    return runtime.no_sync() if runtime is not None else None


def install_call(block: nn.Module, call: Callable[..., Any]) -> None:
    """Makes ``block(...)`` run ``call(...)``; `zc.copies.unmark` undoes it."""
    torch_private.set_call(block, Instead(block, "_call_impl", call))


def _apply(
    of_model: weakref.ref[nn.Module],
    of_runtime: weakref.ref[Runtime],
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
) -> nn.Module:
    model, runtime = of_model(), of_runtime()
    assert model is not None
    if runtime is None:
        return torch_private.plain_apply(model, function, recurse)
    in_buckets = {id(param) for param in runtime.placed.values()}
    if isinstance(runtime.weights, ShardedWeights):
        with runtime.weights.passes.named_plainly():
            return torch_private.plain_apply(model, _refusing_moves(in_buckets, function), recurse)
    return torch_private.plain_apply(model, _skipping_copies(in_buckets, function), recurse)


def _state_to_pickle(of_weights: weakref.ref[ShardedWeights], of_module: weakref.ref[nn.Module]) -> dict[str, Any]:
    """The state of a module for ``torch.save(model)`` and copies (stage 3)."""
    weights, module = of_weights(), of_module()
    assert module is not None
    if weights is not None:
        weights.refuse_without_bytes("pickling or copying the model", module)
    hooks = {handle.id for handle in weights.hooks} if weights is not None else set()
    state = torch_private.state_to_pickle(module, hooks)
    del state["__getstate__"]
    return state


def _skipping_copies(in_buckets: set[int], function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, except that a parameter in a bucket stays as it is if ``function`` only copies it. Torch calls it
    for a parameter, and then for its gradient."""
    is_skipped = False  # the last parameter

    def apply(tensor: Tensor) -> Tensor:
        nonlocal is_skipped
        if is_skipped and isinstance(tensor, ShardedGrad):
            return tensor
        result = function(tensor)
        is_skipped = id(tensor) in in_buckets and (result is tensor or _is_same(tensor.detach(), result.detach()))
        return tensor if is_skipped else result

    return apply


def _refusing_moves(in_buckets: set[int], function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, except that parameters, which have no bytes in stage 3, stay as they are if ``function`` only
    copies tensors. If it moves or casts them, it raises ZcError."""

    def apply(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedGrad):
            return tensor
        if id(tensor) not in in_buckets:
            return function(tensor)
        like = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
        result = function(like)
        if (result.dtype, result.device) != (like.dtype, like.device):
            raise ZcError(
                f"a parameter of {like.dtype} on {like.device} can't become {result.dtype} on {result.device}, since "
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


def _skip_flattening(of_runtime: weakref.ref[Runtime], name: str) -> None:
    runtime = of_runtime()
    if runtime is not None:
        runtime.say_once(
            f"{name + '.' if name else ''}flatten_parameters() does nothing: on a GPU it would move the weights out of "
            "their bucket. cuDNN copies them together in each call, and may warn of that"
        )
