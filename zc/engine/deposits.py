"""Gradients that wait for their bucket, as they came: by reference, a sum where a slot got two."""

from __future__ import annotations

from torch import Tensor

from zc.planning.plan import Bucket


class Deposits:
    """By bucket and slot. Lifetime of what is here: until its bucket is reduced, or written into a partial sum: at the
    end of its backward, or, where ranks differ (zc/engine/rounds.py), at the latest at the boundary."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Tensor]] = {}

    @property
    def buckets(self) -> set[int]:
        """Those of which something waits."""
        return set(self._waiting)

    def add(self, bucket: Bucket, slot: int, grad: Tensor) -> None:
        arrived = self._waiting.setdefault(bucket.index, {})
        grad = grad.detach()
        if slot in arrived:  # in fp32: a second part must not be rounded to the first one's dtype
            grad = arrived[slot].to(bucket.acc_dtype) + grad
        arrived[slot] = grad

    def is_full(self, bucket: Bucket) -> bool:
        return len(self._waiting.get(bucket.index, ())) == len(bucket.slots)

    def take(self, bucket: Bucket) -> list[object]:
        """A gradient a slot, None where nothing came; the bucket is empty then."""
        arrived = self._waiting.pop(bucket.index, {})
        return [arrived.get(slot) for slot in range(len(bucket.slots))]

    def own(self) -> None:
        """What stays longer than its backward is copied: it may be the caller's (``backward(gradient=...)``)."""
        for arrived in self._waiting.values():
            arrived.update({slot: grad.clone() for slot, grad in arrived.items()})

    def drop(self, bucket: int, slot: int | None = None) -> None:
        """One slot's gradient, or all of a bucket's."""
        if slot is None:
            self._waiting.pop(bucket, None)
        else:
            self._waiting.get(bucket, {}).pop(slot, None)

    def clear(self) -> None:
        self._waiting.clear()
