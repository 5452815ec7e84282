"""This rank's shards of the gradients, by parameter: what `zc.sharded_grad` asks for, and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zc.errors import ZcError
from zc.kernels import sum_of_squares
from zc.passes.tag_gradients import slot_of
from zc.plan import Bucket
from zc.runtime import Runtime


class GradShards:
    """The accumulators' parts, one a parameter of which this rank owns elements. Implements `GradOwner`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._where: dict[str, tuple[int, int]] = {}  # bucket and slot
        self._parts: dict[str, tuple[Bucket, int, int, tuple[int, ...]]] = {}  # elements of S, and the slice's shape
        self._norms: dict[float, dict[str, Tensor]] = {}  # order -> norms, since the gradients last changed

    def adopt(self) -> None:
        """The plan's parameters are those that can be asked for."""
        self._where = slot_of(self.runtime.plan)

    def add(self, name: str, bucket: Bucket, start: int, stop: int, shape: tuple[int, ...]) -> None:
        """This rank's part of one gradient: elements [start, stop) of the bucket's shard, as ``shape``."""
        self._parts[name] = (bucket, start, stop, shape)

    def copies(self, name: str) -> list[Tensor]:
        """Every tensor that holds this rank's part of one gradient, which is there; none where it owns no element. The
        update reads the first. Views, made anew: accumulators come and go with the gradients."""
        if name not in self._parts:
            return []
        bucket, start, stop, shape = self._parts[name]
        return [shard[start:stop].view(shape) for shard in self.runtime.buffers.acc_copies(bucket)]

    def _finished(self, name: str) -> None:
        """The gradient of ``name`` is complete, and there. Raises ZcError where it has been set to None."""
        self.runtime.finish_gradients()
        if not self._is_touched(name):
            raise ZcError(f"the gradient of {name} was set to None (zero_grad) since: take param.grad anew")

    def changed(self) -> None:
        """The gradients are not what they were: no norm of them holds."""
        self._norms.clear()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """See `zc.clip_grad_norm_`."""
        norms = list(self._all_norms(2.0).values())
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for bucket in self.runtime.plan.buckets:
            if any(self.runtime.ops.touched[bucket.index]):
                for shard in self.runtime.buffers.acc_copies(bucket):
                    shard.mul_(scale.to(device=shard.device, dtype=shard.dtype))
        self.changed()
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
        shard = next(iter(self.copies(name)), None)
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
        self._finished(name)
        return self._all_norms(order)[name].to(torch.float32)

    def scale_grad(self, name: str, factor: Tensor | float) -> None:
        """In place. Scaling every gradient by one factor keeps the cached norms of none."""
        self._finished(name)
        self.runtime.wait_for_host_memory()
        self.changed()
        for shard in self.copies(name):
            shard.mul_(factor.to(device=shard.device, dtype=shard.dtype) if isinstance(factor, Tensor) else factor)

    def zero_grad_of(self, name: str) -> None:
        self._finished(name)
        self.runtime.wait_for_host_memory()
        self.changed()
        for shard in self.copies(name):
            shard.zero_()

    def full_grad_of(self, name: str) -> Tensor:
        self._finished(name)
        grad = self.runtime.full_grad(self._where[name][0]).get(name)
        assert grad is not None
        return grad

    def unscale(self, names: Sequence[str], found_inf: Tensor, inverse: Tensor) -> None:
        """torch.amp.GradScaler: gradients times ``inverse``; ``found_inf`` becomes 1 where any rank has an infinity or
        NaN, so that all ranks step or none."""
        self.runtime.finish_gradients()
        self.runtime.wait_for_host_memory()
        self.changed()
        grads = [copy for name in names if self._is_touched(name) for copy in self.copies(name)]
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
