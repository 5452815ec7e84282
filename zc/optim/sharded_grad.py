"""``param.grad`` of a compiled model: a gradient that no rank holds whole.

After a backward every parameter that got a gradient has a ShardedGrad, a `zc.optim.sharded_value.ShardedValue` whose
elements lie in the accumulators. What is read of it is the mean over ranks, so the first read after a backward finishes
the gradients of all parameters. Stock ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` takes one collective
for all parameters together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zc.optim.reductions import GRADIENT
from zc.optim.sharded_value import ShardedValue

if TYPE_CHECKING:
    from zc.optim.grad_shards import GradShards

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
