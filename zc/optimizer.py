"""The caller's own optimizer object, on this rank's slices of the master shards.

Class, groups, hyper-parameters and schedulers stay the caller's. Each group's parameter list is replaced by *slices*:
for every parameter of which this rank owns elements, a view into master_shard whose ``.grad`` is the matching view of
the accumulator. Two hooks of ``torch.optim.Optimizer`` do the rest: before a step the gradients are finished, after it
the updated masters are cast into flat_param and gathered (ZeRO, arXiv:1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.disk import DiskState
from zc.errors import PlanError
from zc.kernels import sum_of_squares
from zc.layout import Slot, flat_layout, whole_layout
from zc.offload import HostStep
from zc.param_writes import ParamWrites
from zc.passes.tag_gradients import slot_of
from zc.plan import Bucket, Layout
from zc.runtime import Runtime
from zc.sharded_grad import ShardedGrad, SliceGrad

# Elementwise: each element's update reads that element's gradient and state alone, so a shard may cut a parameter
# anywhere.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD",
)  # fmt: skip
REFUSED = {
    "LBFGS": "it needs a closure, and one history over all parameters",
    "SparseAdam": "it takes sparse gradients, zc reduces dense ones",
}


def choose_layout(optimizer: Optimizer) -> tuple[Layout, str | None]:
    """The layout that the optimizer's update allows, and a note where that is not the tight one.

    Raises PlanError for optimizers that can't work on shards at all. An optimizer that zc does not know keeps whole
    parameters, each on one rank: right for every update that treats parameters one by one.
    """
    name = type(optimizer).__name__
    if name in REFUSED:
        raise PlanError(f"optimizer {name} can't work on shards: {REFUSED[name]}")
    if type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE:
        return flat_layout, None
    return whole_layout, f"{name} may read whole parameters, so each parameter stays whole on one rank (more padding)"


class ShardedOptimizer:
    """What zc keeps beside the caller's optimizer: the slices, and the hooks' handles."""

    def __init__(self, runtime: Runtime, optimizer: Optimizer, whole: bool) -> None:
        self.runtime, self.optimizer, self._whole = runtime, optimizer, whole
        self.slices: dict[str, nn.Parameter] = {}
        self.grads: dict[str, ShardedGrad] = {}
        self._slice_grads: dict[str, SliceGrad] = {}
        self._where: dict[str, tuple[int, int]] = {}
        self._acc: dict[str, Tensor] = {}  # what the slices' gradients are
        self._copies: dict[str, list[Tensor]] = {}  # each part of a gradient wherever it is kept, ``_acc`` among them
        self._writes = ParamWrites(runtime)
        # each group's parameters, the same on every rank, trainable ones by name: for checkpoints
        self.members: list[list[str | Tensor]] = []
        self.adopt(runtime.plan.buckets)
        self._norms: dict[float, dict[str, Tensor]] = {}  # order -> norms, since the gradients last changed
        runtime.on_final = self._hand_out
        runtime.on_backward = self._after_backward
        runtime.is_shown = lambda name, grad: grad is self.grads[name]
        self._offload = HostStep(runtime, optimizer, self.slices, by_bucket=not whole) if runtime.plan.offload else None
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
    def layout(self) -> Layout:
        """What `choose_layout` chose."""
        return whole_layout if self._whole else flat_layout

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """The optimizer's parameters in these buckets become slices. Frozen ones stay: they have no gradient, and the
        optimizer leaves them alone."""
        params = self.runtime.params
        names = {id(params[slot.name]): slot.name for bucket in buckets for slot in bucket.slots}
        slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        for name, (bucket, slot) in slots.items():
            self._make_slice(name, bucket, slot)
        if not self.slices and not self._whole:
            # torch's GradScaler fails where an optimizer has no gradient at all, as a rank that owns nothing
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
        self._where = slot_of(self.runtime.plan)
        self.grads.update({name: ShardedGrad(self, name, params[name]) for name in slots})
        self._slice_grads.update({n: SliceGrad(self, n, self.slices[n]) for n in slots if n in self.slices})
        self._writes.adopt(buckets)

    def _make_slice(self, name: str, bucket: Bucket, slot: Slot, is_empty: bool = False) -> None:
        rank, buffers = self.runtime.group.rank, self.runtime.buffers
        start, _ = bucket.layout.shard_range(rank)
        first, stop = (start, start) if is_empty else bucket.layout.owned(slot, rank)
        if first == stop and not is_empty:
            return
        # a whole parameter keeps its shape: optimizers and their options may look at it
        shape = slot.shape if self._whole or stop - first == slot.numel else (stop - first,)
        master = buffers.master_shard[bucket.index]
        self.slices[name] = nn.Parameter(master[first - start : stop - start].view(shape))
        self._copies[name] = [c[first - start : stop - start].view(shape) for c in buffers.acc_copies(bucket)]
        self._acc[name] = self._copies[name][0]

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

    def _hand_out(self) -> None:
        """Gives each slice its gradient; None where no rank had one, and then the optimizer leaves it alone."""
        for bucket in self.runtime.plan.buckets:
            for slot, touched in zip(bucket.slots, self.runtime.ops.touched[bucket.index], strict=True):
                if slot.name in self.slices:
                    self.slices[slot.name].grad = self._acc[slot.name] if touched else None
        self._show()

    def _after_backward(self) -> None:
        """Whatever a GradScaler does to the optimizer's slices before the boundary has to come to us."""
        for name, shown in self._slice_grads.items():
            self.slices[name].grad = shown
        self._show()

    def _show(self) -> None:
        """``param.grad`` of every parameter with a gradient becomes its ShardedGrad."""
        self._norms.clear()
        self._writes.check_places()
        for bucket in self.runtime.plan.buckets:
            for slot, touched in zip(bucket.slots, self.runtime.ops.touched[bucket.index], strict=True):
                param = self.runtime.params[slot.name]
                if touched and param.grad is None:
                    param.grad = self.grads[slot.name]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is not None:
            raise PlanError(
                f"{type(optimizer).__name__}.step was given a closure: the gradients must be finished before the step "
                "starts, so call the closure yourself, then step()"
            )
        self.runtime.finish_gradients()
        self._writes.take_over()
        if self._offload is not None:
            self._offload.before(self._changed(), self._handles[0])

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._offload is not None:
            self._offload.after(self._changed())
        else:
            self.runtime.weights.publish(self._changed())
        self._writes.remember()
        self.runtime.after_update()

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
        self._norms.clear()
        self.runtime.clear(set_to_none=set_to_none)
        if set_to_none:
            for tensor in (*self.slices.values(), *self.runtime.params.values()):
                tensor.grad = None

    # --- what a ShardedGrad asks for ---

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """See `zc.clip_grad_norm_`."""
        norms = list(self._all_norms(2.0).values())
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for bucket in self.runtime.plan.buckets:
            if any(self.runtime.ops.touched[bucket.index]):
                for shard in self.runtime.buffers.acc_copies(bucket):
                    shard.mul_(scale.to(device=shard.device, dtype=shard.dtype))
        self._norms.clear()
        return norm.to(torch.float32)

    def _all_norms(self, order: float) -> dict[str, Tensor]:
        """Norms of all gradients, fp64 on CPU and fp32 elsewhere, with one collective; kept until a gradient
        changes."""
        self.runtime.finish_gradients()
        if order not in self._norms:
            self.runtime.wait_for_host_memory()
            names = [s.name for b in self.runtime.plan.buckets for s in b.slots if self._is_touched(s.name)]
            wide = torch.float64 if self._norm_device.type == "cpu" else torch.float32
            parts = [self._local_norm(name, order, wide) for name in names]
            if not parts:
                return {}
            joint = torch.stack(parts).to(self.runtime.plan.buckets[0].device)
            if order == float("inf"):
                self.runtime.group.max_(joint)
            else:
                self.runtime.group.sum_(joint)
                joint = joint.pow(1.0 / order)
            self._norms[order] = dict(zip(names, joint.unbind(), strict=True))
        return self._norms[order]

    @property
    def _norm_device(self) -> torch.device:
        """Where the gradients are that the update reads."""
        return self.runtime.buffers.acc_shard(self.runtime.plan.buckets[0]).device

    def _is_touched(self, name: str) -> bool:
        bucket, k = self._where[name]
        return self.runtime.ops.touched[bucket][k]

    def _local_norm(self, name: str, order: float, wide: torch.dtype) -> Tensor:
        shard = self._acc.get(name)
        if shard is None or shard.numel() == 0:
            return torch.zeros((), dtype=wide, device=self._norm_device)
        if order == 2.0:
            return sum_of_squares(shard.view(-1)).to(wide)
        if order == float("inf"):
            return shard.abs().max().to(wide)
        return shard.abs().to(wide).pow(order).sum()

    def grad_norm(self, name: str, order: float) -> Tensor:
        """0-d, fp32: the norm of one parameter's whole gradient. ``order`` > 0, or inf."""
        if not order > 0:
            raise ValueError(f"the norm of a sharded gradient takes an order above 0, got {order}")
        return self._all_norms(order)[name].to(torch.float32)

    def scale_grad(self, name: str, factor: Tensor | float) -> None:
        """In place. Scaling every gradient by one factor keeps the cached norms of none."""
        self.runtime.finish_gradients()
        self.runtime.wait_for_host_memory()
        self._norms.clear()
        for shard in self._copies.get(name, ()):
            shard.mul_(factor.to(device=shard.device, dtype=shard.dtype) if isinstance(factor, Tensor) else factor)

    def zero_grad_of(self, name: str) -> None:
        self.runtime.finish_gradients()
        self.runtime.wait_for_host_memory()
        self._norms.clear()
        for shard in self._copies.get(name, ()):
            shard.zero_()

    def full_grad_of(self, name: str) -> Tensor:
        grad = self.runtime.full_grad(self._where[name][0]).get(name)
        assert grad is not None, f"{name} has a ShardedGrad and no gradient"
        return grad

    def unscale(self, names: Sequence[str], found_inf: Tensor, inverse: Tensor) -> None:
        """torch.amp.GradScaler: gradients times ``inverse``; ``found_inf`` becomes 1 where any rank has an infinity or
        NaN, so that all ranks step or none."""
        self.runtime.finish_gradients()
        self.runtime.wait_for_host_memory()
        self._norms.clear()
        grads = [copy for name in names if self._is_touched(name) for copy in self._copies[name]]
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        self.runtime.group.max_(found_inf)
        if found_inf.item():
            self.runtime.num_skipped += 1
            self.runtime.say_once(
                "a GradScaler found inf or NaN in the gradients: no rank takes that step, nothing changes"
            )

    def add_grad(self, name: str, grad: Tensor) -> None:
        self.runtime.receive(*self._where[name], grad)
