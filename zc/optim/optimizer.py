"""The caller's own optimizer object, on this rank's slices of the master shards.

Class, groups, hyper-parameters and schedulers stay the caller's. Each group's parameter list is replaced by *slices*:
for every parameter of which this rank owns elements, a view into master_shard whose ``.grad`` is the matching view of
the accumulator. Two hooks of ``torch.optim.Optimizer`` do the rest: before a step the gradients are finished, after it
the updated masters are cast into flat_param and gathered (ZeRO, arXiv:1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine.memory_order import flattened, in_shape
from zc.engine.owners import gather_whole
from zc.errors import ZcError
from zc.offload.host_step import HostStep
from zc.optim.closures import Arguments, Closures
from zc.optim.grad_shards import GradShards
from zc.optim.groups import without_empty_groups
from zc.optim.kinds import is_elementwise, is_known
from zc.optim.param_writes import ParamWrites
from zc.optim.sharded_grad import SliceGrad
from zc.optim.trials import keeps_state_by_parameter, takes_empty_groups
from zc.planning.layout import Rule, Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime
    from zc.offload.disk_file import StateFile


class ShardedOptimizer:
    """zc's state for one of the caller's optimizers: its slices, and the hooks on it."""

    def __init__(
        self,
        number: int,
        runtime: Runtime,
        optimizer: Optimizer,
        rule: Rule,
        grad_shards: GradShards,
        writes: ParamWrites,
    ) -> None:
        self.number, self.runtime, self.optimizer, self.rule = number, runtime, optimizer, rule
        self.slices: dict[str, nn.Parameter] = {}
        self._places: dict[str, int] = {}  # addresses of the slices
        self._slice_grads: dict[str, SliceGrad] = {}
        self._grads: dict[str, Tensor | None] = {}  # the .grad of each slice, as zc has set it
        self.grad_shards, self._writes = grad_shards, writes
        self._closures = Closures(optimizer)
        self._was_unscaled = False  # by a GradScaler, which has not called step() since
        self._zeroed: set[str] = set()  # slices that a loop over all of them has made zeros so far
        # each group's parameters, the same on every rank, trainable ones by name: for checkpoints
        self.members: list[list[str | Tensor]] = []
        # False: its state can be loaded only where the same parameters are updated together (zc/checkpoint/together.py)
        self.has_state_by_parameter = True
        self._stepper: Optimizer | None = None  # what its step runs on, where that is not the optimizer itself
        self.offload: HostStep | None = None
        self._handles: tuple[RemovableHandle, ...] = ()

    def start(self, file: StateFile | None) -> None:
        """Registers the hooks, by which the caller's ``step()`` updates the slices. ``file``: with offload="disk"."""
        if self.runtime.plan.offload is not None:
            by_bucket = is_elementwise(self.optimizer)
            self.offload = HostStep(self.runtime, self.number, self.optimizer, self.slices, file, by_bucket=by_bucket)
        self._handles = (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of its parameters."""
        return self.runtime.plan.of_optimizer(self.number)

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Replaces the optimizer's parameters in these buckets by slices. Frozen ones stay: they have no gradient, so
        the optimizer skips them."""
        slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        names = {id(self.runtime.params[name]): name for name in slots}
        for name, (bucket, slot) in slots.items():
            self._make_slice(name, bucket, slot)
        # Every rank needs one slice per dtype, empty if need be: GradScaler needs a gradient, and unscales per dtype on
        # all ranks. Clearing the optimizer's own tensors is noticed by the gradients of its slices.
        for name, (bucket, slot) in slots.items():
            if all(own_slice.dtype != bucket.acc_dtype for own_slice in self.slices.values()):
                self._make_slice(name, bucket, slot, is_empty=True)
        groups = self.optimizer.param_groups
        self._try(groups[len(self.members) :])
        self.members += [list(group["params"]) for group in groups[len(self.members) :]]
        self.members = [[names.get(id(m), m) for m in members] for members in self.members]
        for group in groups:
            params = []
            for param in group["params"]:
                name = names.get(id(param), "")
                if name in self.slices:
                    params.append(self.slices[name])
                elif not name:
                    params.append(param)
                state = self.optimizer.state.pop(param, None) if name else None
                if state and name in self.slices:  # a fresh one, made by the optimizer's __init__ (Adagrad)
                    self.optimizer.state[self.slices[name]] = self._slice_state(*slots[name], state)
            group["params"] = params
        self._slice_grads.update({n: SliceGrad(self, n, self.slices[n]) for n in slots if n in self.slices})

    def _try(self, groups: Sequence[dict[str, Any]]) -> None:
        """Tries how an unknown optimizer treats these groups, while they still have their parameters."""
        if is_known(self.optimizer):
            return
        plan, ranks = self.runtime.plan, self.runtime.group.shard
        device = plan.buckets[0].device if plan.offload is None else torch.device("cpu")
        if not keeps_state_by_parameter(self.optimizer, groups, device):
            self.has_state_by_parameter = False
        if ranks.world_size > 1 and not takes_empty_groups(self.optimizer, groups, device):
            self._stepper = without_empty_groups(self.optimizer)

    def _make_slice(self, name: str, bucket: Bucket, slot: Slot, is_empty: bool = False) -> None:
        rank, buffers = self.runtime.group.shard.rank, self.runtime.buffers
        inside, _ = bucket.layout.owned_part(slot, rank)
        master = buffers.master_shard[bucket.index][slice(0) if is_empty else inside]
        if is_empty or master.numel():
            self.slices[name] = nn.Parameter(in_shape(master, slot))
            self._places[name] = self.slices[name].data_ptr()

    def _check_places(self, when: str) -> None:
        """Raises ZcError where a slice has left its master: updates would go to memory that nobody reads."""
        if self.offload is not None:  # it moves slices itself
            return
        for name, own_slice in self.slices.items():
            if own_slice.data_ptr() != self._places[name]:
                raise ZcError(
                    f"{when} the .data of the optimizer's {name} was set to another tensor, and zc reads the one that "
                    "it gave: write weights in place, through model.parameters(); an optimizer has to update in place"
                )

    def _slice_state(self, bucket: Bucket, slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state of a parameter, cut like the parameter."""
        _, elements = bucket.layout.owned_part(slot, self.runtime.group.shard.rank)
        like = self.slices[slot.name]
        return {  # of a 0-d parameter all state is 0-d; torch's "step" alone is a number of its own
            key: in_shape(flattened(item, slot)[elements], slot).to(like)
            if key != "step" and isinstance(item, Tensor) and tuple(item.shape) == slot.shape
            else item
            for key, item in state.items()
        }

    def _install(self) -> None:
        """Gives each slice its gradient for the update. It is None if no rank had one; then the optimizer skips it."""
        runtime = self.runtime
        whole: dict[int, Tensor] = {}
        if self.rule.whole:
            runtime.wait_for_host_memory()
            whole = gather_whole(runtime.plan, runtime.buffers, runtime.group.shard, self._changed())
        for bucket in self.buckets:
            flags = runtime.accumulators.touched[bucket.index]
            parts = self.grad_shards.of(bucket) if any(flags) and not self.rule.whole else {}
            for slot, touched in zip(bucket.slots, flags, strict=True):
                if slot.name not in self.slices:
                    continue
                own, grad = self.slices[slot.name], None
                if touched and not self.rule.whole:
                    grad = parts[slot.name][0] if slot.name in parts else torch.zeros_like(own)  # owns no element
                elif touched and own.numel() == slot.numel:
                    first = slot.offset - bucket.layout.owned_range(runtime.group.shard.rank)[0]
                    grad = in_shape(whole[bucket.index][first : first + slot.numel], slot)
                self._set_grad(slot.name, grad)

    def stand_in(self) -> None:
        """Gives the slices their SliceGrads, so that zc sees all operations on them between updates."""
        for name, slice_grad in self._slice_grads.items():
            self._set_grad(name, slice_grad)

    def _set_grad(self, name: str, grad: Tensor | None) -> None:
        self.slices[name].grad = self._grads[name] = grad

    def are_cleared(self) -> bool:
        """Whether the caller has set ``.grad`` of the optimizer's own tensors to None: by the zero_grad of its class,
        or by hand. Raises ZcError if only some are None, or some have another ``.grad``."""
        names = [name for name, grad in self._grads.items() if grad is not None]
        grads = [self.slices[name].grad for name in names]
        if names and all(grad is None for grad in grads):
            return True
        for name, grad in zip(names, grads, strict=True):
            if grad is not self._grads[name]:
                raise ZcError(
                    f"the optimizer's own tensor of {name} has {'no' if grad is None else 'another'} .grad, others "
                    "have theirs: it is this rank's slice, and other ranks have other slices. Use "
                    "optimizer.zero_grad() to clear all, or param.grad = None and .mul_() on the model's parameters"
                )
        return False

    def is_one_cleared(self) -> bool:
        """Whether the first of them is None: as `are_cleared` where all are cleared together, without a loop."""
        name = next(iter(self._grads), "")
        return self._grads.get(name) is not None and self.slices[name].grad is None

    def forget_grads(self) -> None:
        """Called when gradients are cleared: the slices have none of zc's until the next backward."""
        self._grads.clear()
        self._zeroed.clear()
        self._say_if_skipped()

    # --- called by the slices' SliceGrads ---

    def unscale(self, names: Sequence[str], found_inf: Tensor, inverse: Tensor) -> None:
        """Called by torch's GradScaler with the slices of one dtype. Gradients are still where they were reduced, so
        this rank unscales its shards of all the optimizer's parameters of that dtype, whichever rank updates them."""
        dtypes = {self.slices[name].dtype for name in names}
        together = [s.name for b in self.buckets if b.acc_dtype in dtypes for s in b.slots]
        self.grad_shards.unscale(together, found_inf, inverse)
        self._was_unscaled = True

    def _say_if_skipped(self) -> None:
        """Called at the end of an update. Unscaled gradients that no step used were probably not finite. Only then is
        it worth waiting for the device to check."""
        if self._was_unscaled:
            self._was_unscaled = False
            self.grad_shards.say_skipped()

    def zero_slices(self, names: Sequence[str]) -> None:
        """Called by zero_grad(set_to_none=False) of the optimizer's class, with all slices or one at a time."""
        self._zeroed.update(names)
        if self._zeroed >= self.slices.keys():
            self._zeroed.clear()
            self.zero_grad(set_to_none=False)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if torch_private.is_nested_step(optimizer):
            return None
        self._was_unscaled = False
        self._check_places("before step()")
        arguments = self._closures.run(args, kwargs)
        if self._zeroed:
            name = next(name for name in self.slices if name not in self._zeroed)
            raise ZcError(
                f"some of the optimizer's own gradients were made zeros, and that of {name} was not: they are this "
                "rank's slices, and ranks have other ones. Use optimizer.zero_grad(), or param.grad.zero_() of the "
                "model's parameters"
            )
        self.runtime.finish_gradients()
        self.runtime.weights.before_writes()
        self._writes.take_over()
        self._install()
        if self.offload is not None:
            self.offload.before(self._changed(), self._handles[0])
        if self._stepper is not None:
            args, kwargs = arguments or (args, kwargs)
            return (self._stepper, *args[1:]), kwargs
        return arguments

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch_private.is_nested_step(optimizer):
            return
        self._check_places("in step()")
        if self.offload is not None:
            self.offload.after(self._changed())
            self.runtime.weights.published(self._changed())
        else:
            self.runtime.weights.publish(self._changed())
        self._writes.remember()
        if self._changed():
            self.stand_in()
        self.runtime.after_update(self.number)
        self.runtime.weights.watch()

    def _changed(self) -> tuple[int, ...]:
        """Its buckets of which some parameter has a gradient on some rank."""
        return tuple(b.index for b in self.buckets if any(self.runtime.accumulators.touched[b.index]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears its shards: the optimizer's own zero_grad."""
        self._say_if_skipped()
        if not set_to_none:
            self.grad_shards.drop_norms()
        self.runtime.clear(set_to_none=set_to_none, optimizer=self.number)

    def let_go(self) -> None:
        """Removes zc's hooks, the parameters and the state from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
