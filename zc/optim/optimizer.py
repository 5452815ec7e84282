"""The caller's own optimizer object, on this rank's slices of the master shards.

Class, groups, hyper-parameters and schedulers stay the caller's. Each group's parameter list is replaced by *slices*:
for every parameter of which this rank owns elements, a view into master_shard whose ``.grad`` is the matching view of
the accumulator. Two hooks of ``torch.optim.Optimizer`` do the rest: before a step the gradients are finished, after it
the updated masters are cast into flat_param and gathered (ZeRO, arXiv:1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.errors import PlanError, ZcError
from zc.offload.disk import DiskState
from zc.offload.host_step import HostStep
from zc.optim.closures import Arguments, Closures
from zc.optim.grad_shards import GradShards
from zc.optim.kinds import is_elementwise
from zc.optim.param_writes import ParamWrites
from zc.optim.sharded_grad import ShardedGrad, SliceGrad
from zc.planning.layout import Rule, Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


class ShardedOptimizer:
    """What zc keeps beside the caller's optimizer: the slices, and the hooks' handles."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer, rule: Rule) -> None:
        self.runtime, self.optimizer, self.rule = runtime, optimizer, rule
        self.slices: dict[str, nn.Parameter] = {}
        self.grads: dict[str, ShardedGrad] = {}
        self._slice_grads: dict[str, SliceGrad] = {}
        self._given: dict[str, Tensor | None] = {}  # what each slice has as .grad, by zc
        self.grad_shards = GradShards(runtime)
        self._writes = ParamWrites(runtime)
        self._closures = Closures(optimizer)
        # each group's parameters, the same on every rank, trainable ones by name: for checkpoints
        self.members: list[list[str | Tensor]] = []
        self.adopt(runtime.plan.buckets)
        runtime.on_final = self._show
        runtime.on_backward = self._after_backward
        runtime.on_cleared = self._let_go
        runtime.slices_cleared, runtime.may_be_cleared = self._are_cleared, self._is_one_cleared
        runtime.is_shown = lambda name, grad: grad is self.grads[name]
        by_bucket = is_elementwise(optimizer)
        self._offload = HostStep(runtime, optimizer, self.slices, by_bucket=by_bucket) if runtime.plan.offload else None
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    @property
    def disk(self) -> DiskState | None:
        """Where the state is, with offload="disk"."""
        return self._offload.disk if self._offload is not None else None

    def flush_state(self) -> None:
        """See `zc.flush_state`."""
        if self.disk is None:
            raise PlanError("zc.flush_state is for offload='disk', and this model was compiled without")
        self.runtime.streams.synchronize()
        self.disk.flush(self._writes.take_over)

    @property
    def keeps_whole(self) -> bool:
        """Whether the update may read whole parameters, each of which is on one rank then."""
        return self.rule.whole

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """The optimizer's parameters in these buckets become slices. Frozen ones stay: they have no gradient, and the
        optimizer leaves them alone."""
        params = self.runtime.params
        names = {id(params[slot.name]): slot.name for bucket in buckets for slot in bucket.slots}
        slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        for name, (bucket, slot) in slots.items():
            self._make_slice(name, bucket, slot)
        if not self.slices:
            # torch's GradScaler fails where an optimizer has no gradient at all, as a rank that owns nothing; and who
            # clears the optimizer's own tensors is seen by theirs
            name, (bucket, slot) = next(iter(slots.items()))
            self._make_slice(name, bucket, slot, is_empty=True)
        groups = self.optimizer.param_groups
        self.members += [list(group["params"]) for group in groups[len(self.members) :]]
        self.members = [[names.get(id(m), m) for m in members] for members in self.members]
        for group in groups:
            kept = []
            for param in group["params"]:
                name = names.get(id(param), "")
                if name in self.slices:
                    kept.append(self.slices[name])
                elif not name:
                    kept.append(param)
                state = self.optimizer.state.pop(param, None) if name else None
                if state and name in self.slices:  # a fresh one, made by the optimizer's __init__ (Adagrad)
                    self.optimizer.state[self.slices[name]] = self._slice_state(*slots[name], state)
            group["params"] = kept
        shards = self.grad_shards
        shards.adopt()
        self.grads.update({name: ShardedGrad(shards, name, params[name]) for name in slots})
        self._slice_grads.update({n: SliceGrad(shards, n, self.slices[n]) for n in slots if n in self.slices})
        self._writes.adopt(buckets)

    def _make_slice(self, name: str, bucket: Bucket, slot: Slot, is_empty: bool = False) -> None:
        rank, buffers = self.runtime.group.rank, self.runtime.buffers
        start, _ = bucket.layout.shard_range(rank)
        first, stop = (start, start) if is_empty else bucket.layout.owned(slot, rank)
        if first == stop and not is_empty:
            return
        # a whole parameter keeps its shape: optimizers and their options may look at it
        shape = slot.shape if stop - first == slot.numel else (stop - first,)
        master = buffers.master_shard[bucket.index]
        self.slices[name] = nn.Parameter(master[first - start : stop - start].view(shape))
        self.grad_shards.add(name, bucket, first - start, stop - start, shape)

    def _slice_state(self, bucket: Bucket, slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
        """What the optimizer knows of a parameter, cut as the parameter was."""
        first, stop = bucket.layout.owned(slot, self.runtime.group.rank)
        like = self.slices[slot.name]
        return {
            key: item.reshape(-1)[first - slot.offset : stop - slot.offset].view(like.shape).to(like)
            if isinstance(item, Tensor) and tuple(item.shape) == slot.shape and item.dim() > 0
            else item
            for key, item in state.items()
        }

    def _install(self) -> None:
        """Gives each slice its gradient for the update; None where no rank had one, and then the optimizer leaves it
        alone."""
        for bucket in self.runtime.plan.buckets:
            flags = self.runtime.ops.touched[bucket.index]
            parts = self.grad_shards.of(bucket) if any(flags) else {}
            for slot, touched in zip(bucket.slots, flags, strict=True):
                if slot.name in self.slices:
                    is_there = touched and not (self.rule.whole and self.slices[slot.name].numel() < slot.numel)
                    self._give(slot.name, parts[slot.name][0] if is_there else None)

    def _stand_in(self) -> None:
        """Outside of an update whatever is done to the optimizer's own gradients has to come to us."""
        for name, shown in self._slice_grads.items():
            self._give(name, shown)

    def _give(self, name: str, grad: Tensor | None) -> None:
        self.slices[name].grad = self._given[name] = grad

    def _are_cleared(self) -> bool:
        """Whether the caller has set ``.grad`` of the optimizer's own tensors to None: by the zero_grad of its class,
        or by hand. Raises ZcError where it did so to some, or gave them another."""
        given = [name for name, grad in self._given.items() if grad is not None]
        found = [self.slices[name].grad for name in given]
        if given and all(grad is None for grad in found):
            return True
        for name, grad in zip(given, found, strict=True):
            if grad is not self._given[name]:
                raise ZcError(
                    f"the optimizer's own tensor of {name} has {'no' if grad is None else 'another'} .grad, others "
                    "have theirs: it is this rank's slice, and ranks have other ones. Use optimizer.zero_grad() to "
                    "clear all, or param.grad = None and .mul_() on the model's parameters"
                )
        return False

    def _is_one_cleared(self) -> bool:
        name = next(iter(self._given), "")
        return self._given.get(name) is not None and self.slices[name].grad is None

    def _after_backward(self) -> None:
        self._stand_in()
        self._show()

    def _let_go(self) -> None:
        """No gradient is left, wherever somebody could look for one. Autograd may be adding to a ``param.grad`` at this
        moment: inside a backward those go at its end."""
        self.grad_shards.changed()
        self._given.clear()
        params = self.runtime.params.values() if torch_private.current_graph_task() == -1 else ()
        with torch_private.without_torch_function():  # sooner done: parameters may be watched (engine/pending.py)
            for tensor in (*self.slices.values(), *params):
                tensor.grad = None

    def _show(self) -> None:
        """``param.grad`` of every parameter with a gradient becomes its ShardedGrad."""
        self.grad_shards.changed()
        self._writes.check_places()
        for bucket in self.runtime.plan.buckets:
            for slot, is_known in zip(bucket.slots, self.runtime.rounds.known[bucket.index], strict=True):
                param = self.runtime.params[slot.name]
                if is_known and param.grad is None:
                    param.grad = self.grads[slot.name]
                elif not is_known and param.grad is self.grads[slot.name]:
                    param.grad = None  # of gradients that were dropped when this backward had begun

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        found = self._closures.run(optimizer, args, kwargs)
        self.runtime.finish_gradients()
        self._writes.take_over()
        self._install()
        if self._offload is not None:
            self._offload.before(self._changed(), self._handles[0])
        return found

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._offload is not None:
            self._offload.after(self._changed())
        else:
            self.runtime.weights.publish(self._changed())
        self._writes.remember()
        if self._changed():
            self._stand_in()
        self.runtime.after_update()
        self.runtime.weights.watch()

    def _changed(self) -> tuple[int, ...]:
        """Buckets of which some parameter has a gradient on some rank."""
        return tuple(b.index for b in self.runtime.plan.buckets if any(self.runtime.ops.touched[b.index]))

    def publish_all(self) -> None:
        """All weights anew from all masters, after these were loaded; the caller may read them."""
        everything = tuple(b.index for b in self.runtime.plan.buckets)
        if self._offload is not None:
            self._offload.publish_all(everything)
        else:
            self.runtime.weights.publish(everything)
            self.runtime.weights.synchronize()
        self._writes.remember()

    def take_over_writes(self) -> None:
        """What the caller has written into parameters since the last update is in the masters. See `ParamWrites`."""
        self._writes.take_over()
        self._writes.remember()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the shards; what ``model.zero_grad`` and ``optimizer.zero_grad`` both do."""
        self.grad_shards.changed()
        self.runtime.clear(set_to_none=set_to_none)

    def let_go(self) -> None:
        """The optimizer has no parameter, no state and no hook of ours any more."""
        for handle in self._handles:
            handle.remove()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
