"""The operations of one schedule, with its segments: what the generated code calls.

A run whose reductions the ranks have not agreed on gets operations that leave them away (zc/engine/rounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zc.engine.ops import GradientOps, Spans
from zc.kernels import matmul_into, rows_into, scatter_into

if TYPE_CHECKING:
    from zc.engine.program import Segment


# what stays away where ranks do not agree on a reduction
_REDUCTION = (
    "launch_reduce", "wait_reduce", "accumulate", "reduce_rows",
    "signal_full", "await_full", "signal_free", "await_free",
)  # fmt: skip
_RING = ("flatten_cast", "wgrad_into", "stage_shard", "copy_to_host", "copy_to_device")  # and what is changed there


class ProgramOps(GradientOps):
    """The operations, for schedules to be bound to."""

    def bind(self, segments: dict[str, Segment]) -> BoundOps:
        return BoundOps(self, segments)


class BoundOps:
    """The operations together with the segments of one schedule: what the generated code calls."""

    def __init__(self, ops: GradientOps, segments: dict[str, Segment]) -> None:
        self._ops, self._segments = ops, segments
        self.flatten_cast, self.accumulate_cast, self.deposit = ops.flatten_cast, ops.accumulate_cast, ops.deposit
        self.launch_reduce, self.wait_reduce, self.accumulate = ops.launch_reduce, ops.wait_reduce, ops.accumulate
        self.wgrad_into, self.stage_shard = ops.wgrad_into, ops.stage_shard
        self.copy_to_host, self.copy_to_device = ops.copy_to_host, ops.copy_to_device
        self.gather, self.publish, self.spread = ops.gather, ops.publish, ops.spread
        self.gather_net = ops.gather_net
        self.signal_full, self.await_full, self.reduce_rows = ops.signal_full, ops.await_full, ops.reduce_rows
        self.signal_free, self.await_free = ops.signal_free, ops.await_free

    def segment(self, key: str, args: list[Any]) -> Sequence[Any]:
        return self._segments[key](args)

    def reducing_if(self, is_agreed: Callable[[], bool]) -> BoundOps:
        """The same, for one run whose reductions stay away where ranks don't agree on them. ``is_agreed`` is asked on
        the comm stream, before each; where gradients pass through the ring, by the host, before the first one does."""
        if self._ops.plan.placement.shards_gradients:
            return DecidingOps(self._ops, self._segments, is_agreed)
        return AgreedOps(self._ops, self._segments, is_agreed)


class DecidingOps(BoundOps):
    """Asks where the first operation comes up that depends on the answer: what is computed before is issued by then,
    and keeps a GPU busy while the host waits for the other ranks (stage 2)."""

    def __init__(self, ops: GradientOps, segments: dict[str, Segment], is_agreed: Callable[[], bool]) -> None:
        super().__init__(ops, segments)
        self._is_agreed = is_agreed
        self._chosen: BoundOps | None = None
        for name in (*_REDUCTION, *_RING):
            setattr(self, name, partial(self._call, name))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._chosen is None:
            self._chosen = (BoundOps if self._is_agreed() else KeepingOps)(self._ops, self._segments)
        return getattr(self._chosen, name)(*args, **kwargs)


class KeepingOps(BoundOps):
    """Nothing is written into the ring, which must be free again: each gradient is deposited (stage 2)."""

    def __init__(self, ops: GradientOps, segments: dict[str, Segment]) -> None:
        super().__init__(ops, segments)
        for name in _REDUCTION:
            setattr(self, name, _nothing)
        self.stage_shard = self.copy_to_host = self.copy_to_device = _nothing
        self.flatten_cast, self.wgrad_into = self._deposit_all, self._deposit_made

    def _deposit_all(
        self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor | None], spans: Spans | None = None
    ) -> None:
        for slot, grad in zip(slots, grads, strict=True):
            if grad is not None:
                self.deposit(bucket, slot, grad)

    def _deposit_made(
        self, bucket: int, buffer: str, slot: int, start: int, stop: int, *inputs: Tensor, how: str = "mm"
    ) -> None:
        record = self._ops.plan.buckets[bucket]
        out = torch.empty(stop - start, dtype=record.reduce_dtype, device=record.device)
        make: Any = {"mm": matmul_into, "rows": rows_into, "scatter": scatter_into}[how]
        make(out, *inputs, add=False)
        self.deposit(bucket, slot, out.view(record.slots[slot].shape))


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return None


class AgreedOps(BoundOps):
    """Without agreement what a run has written stays a partial sum (stage 1), and the boundary reduces it."""

    def __init__(self, ops: GradientOps, segments: dict[str, Segment], is_agreed: Callable[[], bool]) -> None:
        super().__init__(ops, segments)
        for name in _REDUCTION:
            setattr(self, name, _if(is_agreed, getattr(ops, name)))
        if ops.buffers.acc:  # host memory takes reduced gradients only; where it has the accumulators it takes all
            self.stage_shard = _if(is_agreed, ops.stage_shard)
            self.copy_to_host = _if(is_agreed, ops.copy_to_host)


def _if(is_agreed: Callable[[], bool], operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: operation(*args) if is_agreed() else None
