"""Guards a compiled model against operations that other code applies to any module: moves, DDP, flattening of RNNs,
pickles and copies.

A framework may move the model to the device that it is on, under another name (``cpu:0``). That would copy all weights
out of their buckets, and no update would reach the copies, so a move that changes nothing is skipped. On a GPU,
`torch.nn.LSTM.flatten_parameters` would move the weights from their bucket into cuDNN's buffer, so it does nothing.
``model.no_sync()`` and ``model.require_backward_grad_sync`` work as in DDP; its ``join()`` is refused by name.

A model that is pickled whole (``torch.save(model)``) loads as a plain module, with a warning: a loaded DDP module
reduces again, and a compiled model can't without its optimizer. Its pickle contains an object that warns when it is
loaded, even if zc is not installed. A deepcopy, such as an averaged copy, is a plain module without a warning.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.engine.core import SYNCS, syncs
from zc.engine.instead import Instead, instead
from zc.engine.param_checks import Names
from zc.errors import PlanError, ZcError
from zc.optim.grad_shards import ShardedGrad

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime
    from zc.engine.weights import Weights

_NAME = "_zc_compiled"
_TEXT = (
    "zc: this module was saved whole (torch.save(model)) while it was compiled by zc, and is a plain module now: over "
    "several ranks nothing reduces its gradients until zc.compile(model, optimizer) is called. zc.save keeps what "
    "training needs, model.state_dict() the weights alone"
)


class _Mark:
    """Marks a compiled model, in its ``__dict__``, and lives as long as the model."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return warnings.warn, (_TEXT,)  # returns None


class NotForDDP:
    """Raises when DistributedDataParallel reads it, which it does first. Copies of the model may go into DDP.
    ``names``: what DDP is told to leave to each rank."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __iter__(self) -> Iterator[NoReturn]:
        raise PlanError(
            "DistributedDataParallel was given a model that zc has compiled, whose gradients are averaged over the "
            "ranks already: leave DDP out (zc.close(model) makes a plain module of it again)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return frozenset, (self.names,)


def _no_sync(of_runtime: weakref.ref[Runtime]) -> contextlib.AbstractContextManager[None]:
    """``model.no_sync()`` of a compiled model, as in DistributedDataParallel. On a copy it does nothing."""
    runtime = of_runtime()
    return runtime.no_sync() if runtime is not None else contextlib.nullcontext()


def _refuse_join(*_: Any, **__: Any) -> NoReturn:
    """``model.join()``, and ``join_hook`` for torch's ``Join([model])``, which answers the exchanges of other ranks
    while this one has no batch, but takes no step with them. Copies have None in its place."""
    raise ZcError(
        "DDP's join was given a model that zc has compiled, whose step() exchanges, too, so a rank without a batch "
        "must call it: take `for batch in zc.join(model, loader):`, and skip the backward where batch is None"
    )


def install(model: nn.Module, runtime: Runtime) -> Callable[[nn.Module], None]:
    """Installs the guards. What it returns removes them."""
    remember_names(model, runtime)
    of_runtime = weakref.ref(runtime)
    torch_private.set_apply(model, instead(model, "_apply", partial(_apply, weakref.ref(model), of_runtime)))
    torch_private.tell_ddp(model, NotForDDP(torch_private.told_ddp(model)))
    no_join = Instead(_refuse_join, lambda: (type(None), ()))
    no_sync = Instead(partial(_no_sync, of_runtime), lambda: (partial, (contextlib.nullcontext,)))
    of_ddp = {"no_sync": no_sync, "join": no_join, "join_hook": no_join, SYNCS: True}
    added = {name: value for name, value in of_ddp.items() if not hasattr(model, name)}
    vars(model).update(added)
    runtime.syncs = partial(syncs, weakref.ref(model))
    pickle_without_hooks(model, runtime.weights)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            call: Any = torch.compiler.disable(partial(_skip_flattening, of_runtime, name))  # type: ignore[no-untyped-call]
            vars(module)["flatten_parameters"] = instead(module, "flatten_parameters", call)
    return partial(_remove, tuple(added))


def pickle_without_hooks(model: nn.Module, weights: Weights) -> None:
    """Copies and pickles of modules leave out the hooks of ``weights``, which neither work there nor can be pickled."""
    for module in model.modules() if weights.hooks else ():
        get_state = partial(_state_to_pickle, weakref.ref(weights), weakref.ref(module))
        vars(module)["__getstate__"] = instead(module, "__getstate__", get_state)


def remember_names(model: nn.Module, runtime: Runtime) -> None:
    """From now on a boundary refuses parameters that have replaced the present ones."""
    names = Names(model, runtime.placed)
    setattr(model, _NAME, _Mark(names))
    runtime.names = weakref.ref(names)


def _remove(added: Collection[str], model: nn.Module) -> None:
    """Removes everything that `install`, which has ``added`` these attributes, and `blocks.install_call` put on the
    model."""
    told = torch_private.told_ddp(model)
    if SYNCS in added:
        vars(model).pop(SYNCS, None)
    own = _Mark, Instead, NotForDDP
    for module in model.modules():
        for name in [n for n, value in vars(module).items() if isinstance(value, own)]:
            del vars(module)[name]
    if isinstance(told, NotForDDP) and told.names:
        torch_private.tell_ddp(model, told.names)


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
    weights = runtime.weights
    filtered = _skipping_copies if weights.is_unsharded else _refusing_moves
    with weights.named_plainly():
        return torch_private.plain_apply(model, filtered(in_buckets, function), recurse)


def _state_to_pickle(of_weights: weakref.ref[Weights], of_module: weakref.ref[nn.Module]) -> dict[str, Any]:
    """The state of a module for ``torch.save(model)`` and copies."""
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
    copies tensors. If it moves, casts or changes them, it raises ZcError. Two odd numbers stand for the values."""

    def apply(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedGrad):
            return tensor
        if id(tensor) not in in_buckets:
            return function(tensor)
        # frozen ones may be integers
        like = torch.tensor([-300.5, 0.78125], device="cpu").to(tensor.device, tensor.dtype)
        result = function(like.clone())
        if (result.dtype, result.device) != (like.dtype, like.device):
            raise ZcError(
                f"a parameter of {like.dtype} on {like.device} can't become {result.dtype} on {result.device}, since "
                "its bytes lie in shards: move or cast the model before zc.compile, or use param_dtype"
            )
        if not torch.equal(result, like):
            raise ZcError(
                f"a function that makes {result.tolist()} of {like.tolist()} was applied to the model, whose bytes lie "
                "in shards: apply it inside `with zc.whole_parameters(model):` on all ranks"
            )
        return tensor

    return apply


def _is_same(one: Tensor, other: Tensor) -> bool:
    if _metadata(one) != _metadata(other):
        return False
    bits = [tensor.to(one.device).reshape(-1).view(torch.uint8) for tensor in (one, other)]  # a NaN equals itself
    return torch.equal(*bits)


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.dtype, tensor.shape, strides, tensor.device.type, tensor.device.index or 0


def _skip_flattening(of_runtime: weakref.ref[Runtime], name: str) -> None:
    runtime = of_runtime()
    if runtime is not None:
        runtime.say_once(
            f"{name + '.' if name else ''}flatten_parameters() does nothing: on a GPU it would move the weights out of "
            "their bucket. cuDNN copies them together in each call, and may warn of that"
        )
