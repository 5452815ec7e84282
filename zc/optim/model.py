"""zc's state for a compiled model: its optimizers' slices, and the ``param.grad`` of its parameters.

    ShardedModel          gradients of all parameters (param.grad, norms, clipping), and writes to weights
      ShardedOptimizer    one of the caller's optimizers on its slices, with the buckets of its own parameters
      ShardedOptimizer    ...

Gradients are finished for all parameters together, at the first ``step()``. An update installs, updates and publishes
the buckets of one optimizer. Gradients that another optimizer has not used yet keep adding up, as in PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zc import torch_private
from zc.engine.core import Listener
from zc.errors import ZcError
from zc.optim.assignment import Assignment
from zc.optim.grad_shards import IN_NO_SYNC, GradShards, ShardedGrad
from zc.optim.optimizer import ShardedOptimizer
from zc.optim.param_writes import ParamWrites
from zc.optim.sharded_value import ShardedValue
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime
    from zc.optim.optimizer import MakeUpdater


_KEPT = {0: object()}
_ALONE = sys.getrefcount(_KEPT[0])  # of an object that a dictionary alone holds


class ShardedModel(Listener):
    """The state of one model on one rank."""

    def __init__(self, runtime: Runtime, assignment: Assignment, make_updater: MakeUpdater) -> None:
        self.runtime, self.container = runtime, assignment.container
        self.at_close: list[Callable[[nn.Module], None]] = []  # take off the model what zc has put there
        self.grad_shards = GradShards(runtime)
        self._writes = ParamWrites(runtime)
        self.optimizers = [
            ShardedOptimizer(k, runtime, optimizer, rule, self.grad_shards, self._writes)
            for k, (optimizer, rule) in enumerate(zip(assignment.optimizers, assignment.rules, strict=True))
        ]
        self.grad_shards.optimizers = [each.optimizer for each in self.optimizers]
        self.adopt(runtime.plan.buckets)
        runtime.listener = self
        for optimizer in self.optimizers:
            optimizer.start(make_updater)

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Gives the parameters in these buckets their ShardedGrads, and their optimizers slices of them."""
        self.grad_shards.adopt(buckets)
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            self.runtime.sharded_grads[slot.name] = ShardedGrad(self.grad_shards, slot.name)
        for optimizer in self.optimizers:
            optimizer.adopt([b for b in buckets if b.optimizer == optimizer.number])
        self._writes.adopt(buckets)

    def leave(self, params: Mapping[str, nn.Parameter]) -> None:
        """These parameters have left the plan. Their optimizers keep nothing of them."""
        for optimizer in self.optimizers:
            optimizer.leave(params)
        self.grad_shards.forget_taken(list(params))
        self.grad_shards.forget_numbers()
        self._writes.leave(params)

    def flush_state(self) -> None:
        """See `zc.flush_state`."""
        self.optimizers[0].updater.flush(self._writes.take_over)

    def gradients_ready(self, *, are_shown: bool = False) -> None:
        """Sets ``param.grad`` of every parameter with a gradient to its ShardedGrad."""
        self.grad_shards.forget_numbers()
        if are_shown:
            return
        flags = self.runtime.agreement.has_grad
        params, grads = self.runtime.params, self.runtime.sharded_grads
        with torch_private.without_torch_function():  # faster: parameters may be watched
            for bucket in self.runtime.plan.buckets:
                for slot, has_grad in zip(bucket.slots, flags[bucket.index], strict=True):
                    if slot.is_left:
                        continue
                    param, grad = params[slot.name], grads[slot.name]
                    shown = param.grad
                    if shown is grad:
                        if not has_grad:
                            param.grad = None  # its gradient was dropped after this backward had begun
                    elif has_grad and (shown is None or self.is_value(slot.name, shown)):
                        try:
                            param.grad = grad
                        except RuntimeError:  # it has another shape, dtype or device now
                            self._writes.check_places()
                            raise

    def gradients_change(self) -> None:
        self.grad_shards.drop_norms()

    def is_value(self, name: str, grad: Tensor) -> bool:
        if not isinstance(grad, ShardedValue) or grad.is_live or grad.part != self.grad_shards.part(name):
            return False
        if grad.nonlinear is not None:
            raise ZcError(IN_NO_SYNC.format(f"{name}.grad = {grad.nonlinear}"))
        return True

    def has_taken(self, grad: Tensor) -> bool:
        return isinstance(grad, ShardedValue) and (grad.is_taken or grad.is_stale)

    def take_value(self, name: str, grad: Tensor) -> Tensor:
        assert isinstance(grad, ShardedValue)
        local = self.grad_shards.take(name, grad)
        self.runtime.sharded_grads[name] = ShardedGrad(self.grad_shards, name)  # handles of the one before are gone
        return local

    def gradients_cleared(self, optimizer: int | None) -> None:
        """Inside a backward, autograd may be adding to a ``param.grad``, so there they are cleared at its end."""
        if self.grad_shards.unscaled:
            self.grad_shards.say_if_skipped(range(len(self.optimizers)) if optimizer is None else [optimizer])
        buckets = self.runtime.plan.of_optimizer(optimizer)
        names = [slot.name for bucket in buckets for slot in bucket.slots if not slot.is_left]
        if torch_private.current_graph_task() == -1:
            with torch_private.without_torch_function():  # faster: parameters may be watched (weights/param.py)
                for name in names:
                    self.runtime.params[name].grad = None
        self.gradients_dropped(names)

    def gradients_dropped(self, names: Sequence[str]) -> None:
        """Also makes a new ShardedGrad in place of one that the caller still holds, or that has a history of autograd:
        the old one must not show the next gradient."""
        if self.grad_shards.taken:
            self.grad_shards.forget_taken(names)
        self.grad_shards.is_read_in_no_sync = False
        self.grad_shards.forget_numbers()
        grads = self.runtime.sharded_grads
        for name in names:
            is_old = sys.getrefcount(grads[name]) > _ALONE or grads[name].requires_grad
            if is_old and self.runtime.params[name].grad is not grads[name]:
                grads[name] = ShardedGrad(self.grad_shards, name)

    def publish_all(self) -> None:
        """Publishes all weights again after the masters were loaded, and waits, so that the caller may read them."""
        for each in self.optimizers:
            each.updater.publish_loaded(tuple(bucket.index for bucket in each.buckets))
        self._writes.remember()

    def take_over_writes(self) -> None:
        """Copies into the masters what the caller has written into parameters since the last update. See
        `ParamWrites`. All ranks call it."""
        self.runtime.check_names()
        self.runtime.weights.adopt_writes()
        self._writes.take_over()
        self._writes.remember()

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        self.runtime.clear(set_to_none=True)
