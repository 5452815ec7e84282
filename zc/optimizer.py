"""The caller's own optimizer object, on this rank's slices of the master shards.

Class, groups, hyper-parameters and schedulers stay the caller's. Each group's parameter list is replaced by *slices*: for
every parameter of which this rank owns elements, a view into master_shard whose ``.grad`` is the matching view of the
accumulator. Two hooks of ``torch.optim.Optimizer`` do the rest: before a step the gradients are finished, after it the
updated masters are cast into flat_param and gathered (ZeRO, arXiv:1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.errors import PlanError
from zc.kernels import sum_of_squares, unflatten_cast
from zc.layout import flat_layout, whole_layout
from zc.plan import Layout
from zc.runtime import Runtime
from zc.schedule import COMM, HOME

# Elementwise: each element's update reads that element's gradient and state alone, so a shard may cut a parameter anywhere.
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
        self.runtime, self.optimizer = runtime, optimizer
        self.slices: dict[str, nn.Parameter] = {}
        self._acc: dict[str, Tensor] = {}
        self._make_slices(whole)
        by_id = {id(param): name for name, param in runtime.params.items()}
        for group in optimizer.param_groups:
            # frozen parameters stay: they have no gradient, and the optimizer leaves them alone
            owned = [self.slices.get(by_id[id(p)]) if id(p) in by_id else p for p in group["params"]]
            group["params"] = [p for p in owned if p is not None]
        runtime.on_final = self._hand_out
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def _make_slices(self, whole: bool) -> None:
        runtime = self.runtime
        for bucket in runtime.plan.buckets:
            start, _ = bucket.layout.shard_range(runtime.group.rank)
            master, acc = runtime.buffers.master_shard[bucket.index], runtime.buffers.acc_shard(bucket)
            for slot in bucket.slots:
                first, stop = bucket.layout.owned(slot, runtime.group.rank)
                if first == stop:
                    continue
                # a whole parameter keeps its shape: optimizers and their options may look at it
                shape = slot.shape if whole or stop - first == slot.numel else (stop - first,)
                self.slices[slot.name] = nn.Parameter(master[first - start : stop - start].view(shape))
                self._acc[slot.name] = acc[first - start : stop - start].view(shape)

    def _hand_out(self) -> None:
        """Gives each slice its gradient; None where no rank had one, and then the optimizer leaves it alone."""
        for bucket in self.runtime.plan.buckets:
            for slot, touched in zip(bucket.slots, self.runtime.ops.touched[bucket.index], strict=True):
                if slot.name in self.slices:
                    self.slices[slot.name].grad = self._acc[slot.name] if touched else None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[0] if args and callable(args[0]) else None)
        if closure is not None:
            raise PlanError(
                f"{type(optimizer).__name__}.step was given a closure: the gradients must be finished before the step "
                "starts, so call the closure yourself, then step()"
            )
        self.runtime.finish_gradients()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.publish()
        self.runtime.after_update()

    def publish(self) -> None:
        """flat_param <- all ranks' masters, cast to param_dtype, in place, before step() returns."""
        runtime = self.runtime
        streams = runtime.streams
        changed = [b for b in runtime.plan.buckets if any(runtime.ops.touched[b.index])]
        streams.record("publish", HOME)
        streams.wait("publish", COMM)
        for bucket in changed:
            streams.run_on(COMM, _publish_bucket(runtime, bucket.index))
        streams.join_home()
        # the parameters changed behind autograd's back (their storage is flat_param): a backward through a forward from
        # before this step must fail as it does in PyTorch
        for bucket in changed:
            for slot in bucket.slots:
                torch.autograd.graph.increment_version(runtime.params[slot.name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the shards; what ``model.zero_grad`` and ``optimizer.zero_grad`` both do."""
        self.runtime.clear(set_to_none=set_to_none)
        if set_to_none:
            for slice_ in self.slices.values():
                slice_.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """See `zc.clip_grad_norm_`."""
        runtime = self.runtime
        runtime.finish_gradients()
        shards = [
            runtime.buffers.acc_shard(b) for b in runtime.plan.buckets if any(runtime.ops.touched[b.index])
        ]
        device = runtime.plan.buckets[0].device
        total = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        for shard in shards:  # padding and slots without a gradient are zero
            total += sum_of_squares(shard)
        runtime.group.sum_(total)
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for shard in shards:
            shard.mul_(scale.to(shard.dtype))
        return norm.to(torch.float32)


def _publish_bucket(runtime: Runtime, index: int) -> Callable[[], None]:
    def run() -> None:
        bucket, flat = runtime.plan.buckets[index], runtime.buffers.flat_param[index]
        start, stop = bucket.layout.shard_range(runtime.group.rank)
        if bucket.has_master:
            unflatten_cast(flat[start:stop], runtime.buffers.master_shard[index])
        if runtime.group.world_size > 1:
            work = runtime.group.all_gather(flat, flat[start:stop])
            if work is not None:
                work.wait()

    return run
