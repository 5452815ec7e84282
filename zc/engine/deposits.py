"""Gradients that wait for their bucket, by reference; a sum where a slot got two.

Hooks may bring the gradients of one bucket on several streams: eager branches run their backward on the stream of their
forward. Each gradient keeps a mark of the stream that made it, and whoever reads it waits for that mark first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from zc.engine.streams import Streams
from zc.planning.plan import Bucket


class _Deposit(NamedTuple):
    grad: Tensor
    mark: object  # `Streams.mark` of the stream that made it


class Deposits:
    """By bucket and slot. Lifetime: until the bucket is reduced, or written into a partial sum, at the end of the
    backward; where ranks differ (zc/engine/rounds.py), at the latest at the boundary."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._waiting: dict[int, dict[int, _Deposit]] = {}

    @property
    def buckets(self) -> set[int]:
        """Those that have a gradient here."""
        return set(self._waiting)

    def add(self, bucket: Bucket, slot: int, grad: Tensor) -> bool:
        """Called on the stream that made ``grad``. Returns whether the slot has a part of its gradient already."""
        deposits = self._waiting.setdefault(bucket.index, {})
        grad = grad.detach()
        has_part = slot in deposits
        if has_part:  # in fp32: a second part must not be rounded to the first one's dtype
            first = deposits[slot]
            self._order([first])
            grad = first.grad.to(bucket.acc_dtype) + grad
        deposits[slot] = _Deposit(grad, self._streams.mark())
        return has_part

    def is_full(self, bucket: Bucket) -> bool:
        return len(self._waiting.get(bucket.index, ())) == len(bucket.slots)

    def take(self, bucket: Bucket) -> list[object]:
        """One gradient per slot, None where nothing came, ready for the main stream. The bucket is empty then."""
        deposits = self._waiting.pop(bucket.index, {})
        self._order(deposits.values())
        return [deposits[slot].grad if slot in deposits else None for slot in range(len(bucket.slots))]

    def own(self) -> None:
        """Copies what stays longer than its backward: it may be the caller's (``backward(gradient=...)``)."""
        for deposits in self._waiting.values():
            self._order(deposits.values())
            for slot, deposit in deposits.items():
                deposits[slot] = _Deposit(deposit.grad.clone(), self._streams.mark())

    def _order(self, deposits: Iterable[_Deposit]) -> None:
        """The caller's current stream may read these from here on."""
        deposits = list(deposits)
        self._streams.take([d.grad for d in deposits], [d.mark for d in deposits])

    def drop(self, bucket: int, slot: int | None = None, *, set_to_none: bool = False) -> None:
        """One slot's gradient, or all of a bucket's. The bucket still waits, to be reduced with zeros, unless
        ``set_to_none``."""
        if slot is not None:
            self._waiting.get(bucket, {}).pop(slot, None)
        elif set_to_none:
            self._waiting.pop(bucket, None)
        elif bucket in self._waiting:
            self._waiting[bucket] = {}

    def clear(self) -> None:
        self._waiting.clear()
