"""This rank's shards of the gradients, by parameter: what `zc.optim.sharded_grad` asks for, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zc import torch_private
from zc.engine.memory_order import flattened, in_shape
from zc.errors import ZcError
from zc.kernels import sums_of_squares
from zc.planning.layout import Slot
from zc.planning.plan import Bucket
from zc.ranks.journal import GATHER_GRADIENT

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


_IS_GONE = "the gradient of {} was set to None (zero_grad) since: take param.grad anew"


class GradShards:
    """The accumulators' parts, one per parameter of which this rank owns elements.

    A loop over all parameters, as stock clipping is, asks for each one by itself: what is asked then costs no loop over
    the others.
    """

    def __init__(self, runtime: Runtime, may_be_cleared: Callable[[], bool]) -> None:
        """``may_be_cleared``: whether the caller may have set gradients of an optimizer's own tensors to None."""
        self.runtime, self._may_be_cleared = runtime, may_be_cleared
        self._where: dict[str, tuple[int, int]] = {}  # bucket and slot
        # by bucket and name: elements of S
        self._parts: dict[int, dict[str, tuple[int, int, Slot]]] = {}
        self._norms: dict[float, Tensor] = {}  # order -> norms [touched parameters], since the gradients last changed
        self._norm_of: dict[float, dict[str, Tensor]] = {}  # the same by name, 0-d, fp32

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Adds the parameters of these buckets. This rank's part of each is elements [start, stop) of the bucket's
        shard."""
        self._where = self.runtime.plan.slot_of()
        for bucket in buckets:
            rank = self.runtime.group.shard.rank
            parts = self._parts.setdefault(bucket.index, {})
            for slot in bucket.slots:
                inside, _ = bucket.layout.shard_part(slot, rank)
                if inside.start < inside.stop:
                    parts[slot.name] = inside.start, inside.stop, slot

    def of(self, bucket: Bucket) -> dict[str, list[Tensor]]:
        """Views of this rank's parts of the gradients, by parameter name; the accumulator must be allocated. A part has
        one view, or two where both device and host have an accumulator; the update reads the first. Views are made once
        and last as long as the accumulator."""
        cuts = self.runtime.buffers.cuts
        if bucket.index not in cuts:
            shards = self.runtime.buffers.acc_copies(bucket)
            parts = self._parts.get(bucket.index, {})
            by_shard = [_cut(shard, list(parts.values())) for shard in shards]
            cuts[bucket.index] = dict(zip(parts, (list(copies) for copies in zip(*by_shard, strict=True)), strict=True))
        return cuts[bucket.index]

    def copies(self, name: str) -> list[Tensor]:
        """The views of one parameter's part, as `of` has them; empty where this rank owns no element of it."""
        return self.of(self.runtime.plan.buckets[self._where[name][0]]).get(name, [])

    def _finish(self, name: str) -> None:
        """Waits until the gradient of ``name`` is reduced. Raises ZcError if it has been set to None."""
        runtime = self.runtime
        grad = runtime.params[name].grad
        if not runtime.is_finished or grad is None or grad is not runtime.sharded_grads[name] or self._may_be_cleared():
            runtime.finish_gradients(by_grad=True)
        if not self._is_touched(name):
            raise ZcError(_IS_GONE.format(name))

    def drop_norms(self) -> None:
        """To be called wherever a gradient changes."""
        self._norms.clear()
        self._norm_of.clear()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """See `zc.clip_grad_norm_`."""
        self.runtime.finish_gradients()
        norm: Tensor = torch.linalg.vector_norm(self._all_norms(2.0))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for bucket in self.runtime.plan.buckets:
            if any(self.runtime.accumulators.touched[bucket.index]):
                for shard in self.runtime.buffers.acc_copies(bucket):
                    shard.mul_(scale.to(device=shard.device, dtype=shard.dtype))
        self.drop_norms()
        return norm.to(torch.float32)

    def are_finite(self) -> bool:
        """See `zc.grads_are_finite`. A sum of squares may overflow where a sum of magnitudes does not."""
        self.runtime.finish_gradients()
        return any(bool(self._all_norms(order).isfinite().all()) for order in (2.0, 1.0))

    def _all_norms(self, order: float) -> Tensor:
        """[touched parameters] fp64: the norms of all gradients, which are finished, with one collective; kept until a
        gradient changes."""
        if order in self._norms:  # another stream may have made them
            self.runtime.streams.hand_to_main([self._norms[order]])
        else:
            self.runtime.wait_for_host_memory()
            parts = [self._part(bucket, name) for bucket, name in self._touched()]
            if not parts:
                return torch.zeros(0, dtype=torch.float64)
            joint = _sums(parts, order).to(self.runtime.plan.buckets[0].device)
            if order == float("inf"):
                self.runtime.group.max_(joint)
            else:
                replicas = self.runtime.group.replicas
                if replicas is not None and replicas.rank > 0:
                    joint.zero_()  # counted once, by the first; among all, so that all have the same bits
                self.runtime.group.sum_(joint)
                joint = joint ** (1.0 / order)
            self._norms[order] = joint
        return self._norms[order]

    def _touched(self) -> list[tuple[Bucket, str]]:
        """Every parameter with a gradient on some rank, in the same order on all."""
        flags = self.runtime.accumulators.touched
        pairs = ((b, k, slot) for b in self.runtime.plan.buckets for k, slot in enumerate(b.slots))
        return [(bucket, slot.name) for bucket, k, slot in pairs if flags[bucket.index][k]]

    def _part(self, bucket: Bucket, name: str) -> Tensor:
        """[n]: what this rank owns of one gradient, on the device where the update reads it; n may be 0."""
        copies = self.of(bucket).get(name)
        if not copies:
            return self.runtime.buffers.acc_shard(bucket)[:0]
        return flattened(copies[0], self._parts[bucket.index][name][2])

    def _is_touched(self, name: str) -> bool:
        bucket, k = self._where[name]
        return self.runtime.accumulators.touched[bucket][k]

    def grad_norm(self, name: str, order: float) -> Tensor:
        """0-d, fp32: the norm of one parameter's whole gradient. ``order`` > 0, or inf."""
        if not order > 0:
            raise ValueError(f"the norm of a sharded gradient takes an order above 0, got {order}")
        self._finish(name)
        if order in self._norm_of:
            self.runtime.streams.hand_to_main([self._norm_of[order][name]])
        else:
            norms = self._all_norms(order).to(torch.float32).unbind()
            self._norm_of[order] = {n: norm for (_, n), norm in zip(self._touched(), norms, strict=True)}
        return self._norm_of[order][name]

    def scale_grad(self, name: str, factor: Tensor | float) -> None:
        """In place. ``factor``: a number, or a tensor that broadcasts to the parameter's shape, such as a mask; this
        rank takes its part of it."""
        self._finish(name)
        self.runtime.wait_for_host_memory()
        self.drop_norms()
        copies = self.copies(name)
        if isinstance(factor, Tensor) and factor.numel() != 1:
            bucket, k = self._where[name]
            slot, rank = self.runtime.plan.buckets[bucket].slots[k], self.runtime.group.shard.rank
            _, elements = self.runtime.plan.buckets[bucket].layout.shard_part(slot, rank)
            whole = flattened(factor.expand(slot.shape), slot)
            factor = in_shape(whole[elements], slot) if copies else whole
        elif isinstance(factor, Tensor):
            factor = factor.reshape(())  # a shard may have fewer dimensions
        for shard in copies:
            shard.mul_(factor.to(device=shard.device, dtype=shard.dtype) if isinstance(factor, Tensor) else factor)

    def zero_grad_of(self, name: str) -> None:
        """Exchanges nothing: a rank may have more backwards than others between this and the update."""
        runtime = self.runtime
        if runtime.params[name].grad is not runtime.sharded_grads[name]:
            raise ZcError(_IS_GONE.format(name))
        self.drop_norms()
        runtime.drop([self._where[name]], set_to_none=False)

    def full_grad_of(self, name: str) -> Tensor:
        self._finish(name)
        grad = self.full_grads(self.runtime.plan.buckets[self._where[name][0]])[name]
        assert grad is not None
        return grad

    def full_grads(self, bucket: Bucket) -> dict[str, Tensor | None]:
        """The whole gradients [shape] of one bucket's parameters, in acc_dtype, on every rank; None where none came."""
        runtime, ranks = self.runtime, self.runtime.group.shard
        runtime.finish_gradients()
        runtime.wait_for_host_memory()
        runtime.buffers.allocate(bucket)  # one without a gradient has no memory, and is gathered all the same
        shard = runtime.buffers.acc_shard(bucket).to(bucket.device)
        flat = shard
        if ranks.world_size > 1:
            flat = torch.empty(bucket.numel, dtype=shard.dtype, device=shard.device)
            work = ranks.all_gather(flat, shard.contiguous(), GATHER_GRADIENT, bucket.index)
            if work is not None:
                work.wait()
        pairs = zip(bucket.slots, runtime.accumulators.touched[bucket.index], strict=True)
        return {s.name: in_shape(flat[s.offset : s.stop], s).clone() if touched else None for s, touched in pairs}

    def unscale(self, names: Sequence[str], found_inf: Tensor, inverse: Tensor) -> None:
        """torch.amp.GradScaler: gradients times ``inverse``. ``found_inf`` becomes 1 if any rank has an infinity or a
        NaN, so all ranks step or none. The host does not wait for the device."""
        self.runtime.finish_gradients()
        self.runtime.wait_for_host_memory()
        self.drop_norms()
        device = self.runtime.plan.buckets[0].device
        before = found_inf.to(device, copy=True)  # with offload it is on the CPU, and NCCL takes no CPU tensor
        infinite = before.clone()
        copies: dict[torch.device, list[Tensor]] = {}
        for name in names:
            for copy in self.copies(name) if self._is_touched(name) else ():
                copies.setdefault(copy.device, []).append(copy)
        for where, grads in copies.items():  # host memory and, with offload_accumulate="device", the device
            own = found_inf.to(where, copy=True)
            torch_private.unscale_(grads, own, inverse.to(where))
            torch.maximum(infinite, own.to(device), out=infinite)
        self.runtime.group.max_(infinite)
        found_inf.copy_(infinite)
        num_skipped = self.runtime.buffers.num_skipped  # counted on the device
        if not num_skipped:
            num_skipped.append(torch.zeros_like(infinite))
        num_skipped[0] += infinite - before  # it is called once for each dtype, with one ``found_inf``

    def say_skipped(self) -> None:
        """Notes that a GradScaler left out steps, if it did. The host waits for the device."""
        if any(count.item() for count in self.runtime.buffers.num_skipped):
            self.runtime.say_once(
                "a GradScaler found inf or NaN in the gradients: no rank takes that step, nothing changes"
            )

    def add_grad(self, name: str, grad: Tensor) -> None:
        self.runtime.receive(*self._where[name], grad)


def _cut(shard: Tensor, parts: Sequence[tuple[int, int, Slot]]) -> list[Tensor]:
    """Views [start, stop) of ``shard`` [S], `in_shape` of their slots; parts ascend and are disjoint. One call into C++
    cuts all, in place of two a part: a model has hundreds."""
    sizes: list[int] = []
    places, at = [], 0
    for start, stop, _ in parts:
        if start > at:
            sizes.append(start - at)
        places.append(len(sizes))
        sizes.append(stop - start)
        at = stop
    cut = shard.split_with_sizes([*sizes, shard.numel() - at])
    return [in_shape(cut[k], slot) for k, (_, _, slot) in zip(places, parts, strict=True)]


def _sums(parts: list[Tensor], order: float) -> Tensor:
    """[len(parts)] fp64: of each the sum of magnitudes to the power ``order``; the largest magnitude for inf."""
    if order == 2.0:
        return sums_of_squares(parts)
    zero = torch.zeros((), dtype=torch.float64, device=parts[0].device)  # of a part without elements
    joint = torch.stack([torch.linalg.vector_norm(p, order, dtype=zero.dtype) if p.numel() else zero for p in parts])
    return joint if order == float("inf") else joint.pow(order)
