"""``param.grad`` of a compiled model: a gradient that no rank holds whole.

After a backward every parameter that got a gradient has a ShardedGrad. It has a norm and can be scaled, so stock
``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` works, with one collective for all parameters together.
``full_tensor()`` gathers it. Any other operation raises an error that says what to call: zeros or None in its place
would make clipping and logging wrong without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.errors import ZcError, not_compiled, stepping_optimizer

if TYPE_CHECKING:
    from zc.optim.grad_shards import GradShards
    from zc.optim.optimizer import ShardedOptimizer

aten = torch.ops.aten


class ShardedGrad(Tensor):
    """The gradient of one parameter, sharded over ranks: the parameter's shape, dtype and device, and no storage."""

    param_name: str
    _owner: weakref.ref[GradShards]  # weak: a parameter holds its .grad where Python's collector does not look

    @staticmethod
    def __new__(cls, owner: GradShards, name: str, param: nn.Parameter) -> ShardedGrad:
        wrapper = torch_private.make_wrapper(cls, param)
        wrapper.param_name, wrapper._owner = name, weakref.ref(owner)
        return wrapper

    @property
    def owner(self) -> GradShards:
        """Holds the shards. Raises ZcError if the compiled model is gone."""
        owner = self._owner()
        if owner is None:
            raise ZcError(f"the gradient of {self.param_name} is gone with its compiled model")
        return owner

    def full_tensor(self) -> Tensor:
        """The whole gradient on every rank (a collective: call it on all of them), in the accumulator's dtype."""
        return self.owner.full_grad_of(self.param_name)

    def numpy(self, *, force: bool = False) -> Any:
        raise ZcError(_refusal("Tensor.numpy", self.param_name))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch.Tensor has it
        return f"ShardedGrad({self.param_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, proto: Any) -> Any:
        raise ZcError(f"the gradient of {self.param_name} is sharded over ranks: save full_tensor() instead")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the disabled default, a plain function
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None or not isinstance(args[0], ShardedGrad):
            grad = next((a for a in args if isinstance(a, ShardedGrad)), None)
            name = grad.param_name if grad is not None else "a parameter"
            if func is aten.add.Tensor and torch_private.current_graph_task() != -1:
                raise ZcError(_CREATE_GRAPH.format(name))
            raise ZcError(_refusal(func, name))
        return handler(args[0], *args[1:], **(kwargs or {}))


class SliceGrad(Tensor):
    """The ``.grad`` of the optimizer's slice of a parameter outside of an update; the update gets the plain gradient.

    torch's GradScaler can unscale it, and all ranks then agree on whether it found an infinity. The zero_grad of the
    optimizer's class can clear it. Any other operation raises: a loop over the optimizer's parameters sees one rank's
    slices, and a norm of them would differ from rank to rank. (DTensor answers GradScaler in the same place.)
    """

    param_name: str
    _owner: weakref.ref[ShardedOptimizer]

    @staticmethod
    def __new__(cls, owner: ShardedOptimizer, name: str, param: nn.Parameter) -> SliceGrad:
        wrapper = torch_private.make_wrapper(cls, param)
        wrapper.param_name, wrapper._owner = name, weakref.ref(owner)
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch.Tensor has it
        return f"SliceGrad({self.param_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the disabled default, a plain function
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            grads, found_inf, inverse = args
            owner = grads[0]._owner()
            if owner is None:
                raise ZcError(f"the gradient of {grads[0].param_name} is gone with its compiled model")
            return owner.unscale([grad.param_name for grad in grads], found_inf, inverse)
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            grads = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            owner = grads[0]._owner()
            if owner is not None:
                owner.zero_slices([grad.param_name for grad in grads])
            return args[0]
        if func in (aten.detach.default, aten.alias.default):
            return args[0]
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        name = next((item.param_name for item in flat if isinstance(item, SliceGrad)), "a parameter")
        raise ZcError(
            f"{func} on the optimizer's gradient of {name}: the optimizer holds this rank's slices only, and their "
            "gradients are finished when step() starts. Clip, scale and look at model.parameters() instead"
        )


# without create_graph AccumulateGrad adds in place, with it out of place, so that the sum can be differentiated
_CREATE_GRAPH = (
    "backward(create_graph=True) found a gradient of {0}, and can't add to it: it is sharded over ranks, without a "
    "graph. Call zero_grad() before each such backward, or take what is to be differentiated again by "
    "torch.autograd.grad(..., create_graph=True), and call backward() once on the whole loss"
)


_READS = (aten.abs, aten.eq, aten.ne, aten.isnan, aten.isinf, aten.max, aten.amax, aten.mean, aten.sum)
_OF_DDP = (aten.mul.out, aten.copy_.default)  # its reducer's, into its bucket


def _refusal(what: Any, name: str) -> str:
    if (optimizer := stepping_optimizer()) is not None:
        return f"{optimizer}.step() met the gradient of {name}, which is sharded over ranks: {not_compiled(optimizer)}"
    advice = (
        "use zc.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_ to clip, .norm() for its norm, .mul_() to scale it, "
        ".full_tensor() to gather it"
    )
    if what in _OF_DDP:
        advice += ". Is the model inside a DistributedDataParallel? Leave that out"
    if getattr(what, "overloadpacket", None) in _READS:
        advice = (
            "call zc.grads_are_finite(model) to learn whether all gradients are finite; .norm(float('inf')) is the "
            "largest magnitude, .norm(1) / .numel() the mean one, .full_tensor() has all elements"
        )
    return f"{what} does not work on the gradient of {name}, which is sharded over ranks: {advice}"


def _norm(
    grad: ShardedGrad,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Of all elements. Refuses norms of rows, which are cut over ranks."""
    if dim and grad.dim() and len({d % grad.dim() for d in dim}) < grad.dim():
        raise ZcError(_refusal(f"norm(dim={list(dim)})", grad.param_name))
    norm: Tensor = grad.owner.grad_norm(grad.param_name, float(order))
    norm = norm if dtype is None else norm.to(dtype)
    return norm.reshape([1] * grad.dim()) if keepdim else norm


def _mul(grad: ShardedGrad, factor: Tensor | float) -> ShardedGrad:
    grad.owner.scale_grad(grad.param_name, factor)
    return grad


def _div(grad: ShardedGrad, divisor: Tensor | float) -> ShardedGrad:
    grad.owner.scale_grad(grad.param_name, 1.0 / divisor)
    return grad


def _zero(grad: ShardedGrad) -> ShardedGrad:
    grad.owner.zero_grad_of(grad.param_name)
    return grad


def _add(grad: ShardedGrad, other: Tensor, *, alpha: float = 1) -> ShardedGrad:
    """AccumulateGrad adds an eager gradient to an existing ``.grad`` in place."""
    if torch_private.current_graph_task() == -1:
        raise ZcError(_refusal("add_ outside of a backward", grad.param_name))
    grad.owner.add_grad(grad.param_name, other if alpha == 1 else other * alpha)
    return grad


def _same(grad: ShardedGrad, *_: Any, **__: Any) -> ShardedGrad:
    return grad


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.mul_.Tensor: _mul,
    aten.mul_.Scalar: _mul,
    aten.div_.Tensor: _div,
    aten.div_.Scalar: _div,
    aten.zero_.default: _zero,
    aten.add_.Tensor: _add,
    aten.detach.default: _same,
    aten.detach_.default: _same,
    aten.alias.default: _same,
}
