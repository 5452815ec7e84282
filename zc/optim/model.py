"""zc's state for a compiled model: its optimizers' slices, the ``param.grad`` of its parameters, and writes to these.

    ShardedModel          gradients of all parameters (param.grad, norms, clipping), and writes to weights
      ShardedOptimizer    one of the caller's optimizers on its slices, with the buckets of its own parameters
      ShardedOptimizer    ...

Gradients are finished for all parameters together, at the first ``step()``. An update installs, updates and publishes
the buckets of one optimizer. Gradients that another optimizer has not used yet keep adding up, as in PyTorch.

The caller may change parameters between updates: writes are kept, moved parameters are refused.

The parameters' memory is flat_param. If masters are separate tensors (narrower parameters, offload), the next update
would overwrite a value that the caller wrote into the parameter: ``load_state_dict``, a re-initialised layer, a clamp
or an exchange of weights through ``p.data``. Autograd counts writes, but not those through ``.data``. So before an
update each rank compares the elements that it owns with their masters. An element that equals its rounded master was
not written. Weights that travel as differences stay a little behind their masters, so there the comparison is with a
copy of what the last update has left.

``param.data = other`` is a write, too, if ``other`` has the parameter's shape, dtype and device (SAM restores weights
so): its values are copied into the bucket, and the parameter is given its memory there again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import eq
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.engine.core import Listener
from zc.engine.memory_order import in_shape
from zc.engine.param_checks import is_shared
from zc.errors import ZcError
from zc.kernels import copy_writes
from zc.optim.assignment import Assignment
from zc.optim.flat_slices import ALONE
from zc.optim.grad_shards import IN_NO_SYNC, GradShards, ShardedGrad
from zc.optim.optimizer import ShardedOptimizer
from zc.optim.sharded_value import ShardedValue
from zc.planning.layout import Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.engine.runtime import Runtime
    from zc.optim.optimizer import MakeUpdater


_SET_TO_NONE = (
    "the .grad of {} was set to None inside of a backward that adds to it, so nobody can say which part was to go: "
    "clear gradients between backwards"
)


class ShardedModel(Listener):
    """The state of one model on one rank."""

    def __init__(self, runtime: Runtime, assignment: Assignment, make_updater: MakeUpdater) -> None:
        self.runtime, self.container = runtime, assignment.container
        self.at_close: list[Callable[[nn.Module], None]] = []  # take off the model what zc has put there
        self.grad_shards = GradShards(runtime)
        self._writes = ParamWrites(runtime)
        self._shown: set[str] = set()  # parameters whose .grad was set here, and not dropped since
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
        self._shown.difference_update(params)

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
                        if shown is None and slot.name in self._shown:
                            raise ZcError(_SET_TO_NONE.format(self.runtime.name_now(slot.name)))
                        try:
                            param.grad = grad
                            self._shown.add(slot.name)
                        except RuntimeError:  # it has another shape, dtype or device now
                            self._writes.check_places()
                            raise

    def gradients_change(self) -> None:
        self.grad_shards.drop_norms()

    def is_value(self, name: str, grad: Tensor) -> bool:
        if not isinstance(grad, ShardedValue) or grad.is_live or grad.part != self.grad_shards.part(name):
            return False
        if grad.nonlinear is not None:
            raise ZcError(IN_NO_SYNC.format(f"{self.runtime.name_now(name)}.grad = {grad.nonlinear}"))
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
        self.runtime.with_graph.difference_update(names)
        self._shown.difference_update(names)
        grads = self.runtime.sharded_grads
        for name in names:
            is_old = sys.getrefcount(grads[name]) > ALONE or grads[name].requires_grad
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


class ParamWrites:
    """Compares the parameters with their places, and with the masters."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # of each parameter that has elements
        self._addresses: dict[str, int] = {}
        self._places: dict[str, tuple[Bucket, Slot]] = {}
        self._versions: dict[str, int] = {}

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Records the addresses of these buckets' parameters in flat_param, which never moves. In stage 3 they have
        none, and `zc.whole_parameters` takes writes over."""
        for bucket in buckets if not self._core.plan.placement.shards_weights else ():
            flat = self._core.buffers.flat_param[bucket.index]
            for slot in bucket.slots:
                if slot.numel > 0:
                    self._addresses[slot.name] = flat.data_ptr() + slot.offset * flat.element_size()
                    self._places[slot.name] = bucket, slot
        self.remember()

    def leave(self, names: Iterable[str]) -> None:
        """These parameters have left their buckets."""
        for name in names:
            self._addresses.pop(name, None)
            self._places.pop(name, None)
            self._versions.pop(name, None)

    def remember(self) -> None:
        """Records that parameters and masters agree now."""
        if self._core.plan.offload is None:
            return  # the masters are on the parameters' device, and are compared with them
        self._versions = {name: torch_private.version(param) for name, param in self._core.params.items()}

    def check_places(self) -> None:
        """Brings parameters back whose ``.data`` was set to another tensor like it. Raises ZcError for any other that
        has left its bucket. What has not moved costs one call for each parameter: no code of ours runs for it."""
        of_name = self._core.params.__getitem__
        if all(map(eq, map(Tensor.data_ptr, map(of_name, self._addresses)), self._addresses.values())):
            return
        for name, (bucket, slot) in self._places.items():
            param = of_name(name)
            if param.data_ptr() != self._addresses[name] and not self._bring_back(param, bucket, slot):
                so = (
                    "Was the model moved, cast or given other tensors (model.to, .half, param.data = ...) after "
                    "zc.compile? Move it before. For bf16 weights don't cast it: param_dtype=torch.bfloat16 keeps fp32 "
                    "masters. Write values in place (param.copy_, load_state_dict)"
                )
                if is_shared(param):
                    so = (
                        "share_memory, or a queue between processes, has moved it into memory that they share: put "
                        "clones into the queue, or copy into a second model that is shared"
                    )
                raise ZcError(
                    f"parameter {self._core.name_now(name)} has left its bucket, so no update would reach it: it is "
                    f"{param.dtype} on {param.device}, the bucket {bucket.param_dtype} on {bucket.device}. {so}"
                )

    def _bring_back(self, param: nn.Parameter, bucket: Bucket, slot: Slot) -> bool:
        """Copies the values of a parameter that lies elsewhere into its bucket, and makes that its memory."""
        values = param.data
        is_like = tuple(values.shape) == slot.shape and values.dtype == bucket.param_dtype
        if not is_like or values.device != bucket.device or values.layout != torch.strided or is_shared(values):
            return False
        place = self._core.buffers.flat_param[bucket.index][slot.offset : slot.stop]
        param.data = in_shape(torch_private.own_storage(place), slot)
        param.data.copy_(values)  # as where ``.data`` is set, autograd does not count it
        self._versions[slot.name] = -1
        self._core.say_once(
            f"param.data of {self._core.name_now(slot.name)} was set to another tensor: zc copies its values into the "
            "parameter's own memory, so later writes to that tensor change nothing. param.copy_(tensor) saves a copy"
        )
        return True

    def take_over(self) -> None:
        """Right before an update: copies writes into parameters since the last update into this rank's masters.

        Raises ZcError for a parameter that has left its bucket; nothing has changed.
        """
        self.check_places()
        buffers = self._core.buffers
        masters: list[Tensor] = []
        weights: list[Tensor] = []
        before: list[Tensor] = []  # where weights travel as differences, which all buckets do or none
        for bucket in self._core.plan.with_masters_apart:
            master: Tensor = buffers.master_shard[bucket.index]
            own = buffers.owned(buffers.flat_param[bucket.index], bucket)
            if own.device == master.device or self._is_counted(bucket):
                masters.append(master)
                weights.append(own)
                if bucket.sends_differences:
                    before.append(buffers.published[bucket.index])
        if masters:
            self._core.wait_for_host_memory()  # the last update may still copy from the masters
            copy_writes(masters, [own.to(masters[0].device) for own in weights], before or None)
        if torch_private.copies_before_writes():  # it does not see updates, which write flat_param
            with torch.no_grad(), torch_private.without_torch_function():
                for name in self._places:
                    self._core.params[name].mul_(1)

    def weights_apart(self) -> list[Tensor]:
        """The flat_param of each bucket whose masters lie elsewhere."""
        return [self._core.buffers.flat_param[bucket.index] for bucket in self._core.plan.with_masters_apart]

    def _is_counted(self, bucket: Bucket) -> bool:
        """Whether autograd has seen a write since `remember`."""
        params = self._core.params
        names = (slot.name for slot in bucket.slots if not slot.is_left)
        return any(torch_private.version(params[name]) != self._versions[name] for name in names)
