"""``param.grad`` of a compiled model: a gradient that no rank holds whole.

After a backward every parameter that got a gradient has a ShardedGrad, a `zc.optim.sharded_value.ShardedValue` whose
elements lie in the accumulators. What is read of it is the mean over ranks, so the first read after a backward finishes
the gradients of all parameters. Stock ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` takes one collective
for all parameters together.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.errors import ZcError
from zc.optim.reductions import GRADIENT
from zc.optim.sharded_value import ShardedValue

if TYPE_CHECKING:
    from zc.optim.grad_shards import GradShards
    from zc.optim.optimizer import ShardedOptimizer

aten = torch.ops.aten


class ShardedGrad(ShardedValue):
    """The gradient of one parameter, sharded over ranks: the parameter's shape, dtype and device, and no storage."""

    is_live = True

    @staticmethod
    def __new__(cls, owner: GradShards, name: str) -> ShardedGrad:
        param = owner.runtime.params[name]
        nothing = torch.empty(0, dtype=owner.acc_dtype(name), device=param.device)
        grad: Any = ShardedValue.__new__(cls, owner, owner.part(name), nothing, dtype=param.dtype)
        return grad  # type: ignore[no-any-return]

    def copies(self) -> list[Tensor]:
        return self.owner.live(self, self.param_name)

    def changed(self) -> None:
        self.owner.drop_norms(self.param_name)

    @property
    def formula(self) -> tuple[Any, int]:  # type: ignore[override]
        return GRADIENT, self.owner.num_changes

    def _what(self) -> str:
        return f"the gradient of {self.param_name}"

    def set_to_zero(self) -> None:
        self.owner.zero_grad_of(self.param_name)


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
