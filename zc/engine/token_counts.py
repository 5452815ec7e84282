"""How many tokens the gradients of an update come from, for `zc.count`: each optimizer's gradient becomes the mean over
the tokens of all ranks and microbatches.

A backward adds a sum over tokens to the accumulators, and ``zc.count`` says how many tokens that were. Every
announcement carries this rank's totals, so that at the boundary all ranks know those of all ranks, and come to the same
verdict, before anything is reduced or scaled. The accumulators hold the mean over W ranks of the sums; times W / N, N
the tokens of all ranks, that is the mean over tokens.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from zc.errors import ZcError


class Totals(NamedTuple):
    """Of one rank and one optimizer, since its gradients were dropped. ``num_lost``: calls of ``zc.count`` that were
    dropped with them, and had no backward yet."""

    num_tokens: float = 0.0
    num_counted: int = 0
    num_backwards: int = 0
    num_lost: int = 0

    @property
    def text(self) -> str:
        return f"{self.num_counted} call(s) of zc.count and {self.num_backwards} backward(s)"


_ROW = struct.Struct("<d3I")


class TokenCounts:
    """One model's. Only the thread that issues schedules uses it."""

    def __init__(self, num_optimizers: int) -> None:
        self._totals = [Totals()] * num_optimizers
        self._is_scaled = [False] * num_optimizers  # the gradients are the mean over tokens already
        self.is_in_backward = False  # one that is counted
        self._scales: list[float | None] = []  # of the boundary that all ranks have come to

    def grow(self, num_optimizers: int) -> None:
        """There are more optimizers now."""
        added = num_optimizers - len(self._totals)
        self._totals += [Totals()] * added
        self._is_scaled += [False] * added

    # --- microbatches ---

    def count(self, num_tokens: float) -> None:
        """See `zc.count`."""
        self._totals = [
            totals._replace(num_tokens=totals.num_tokens + num_tokens, num_counted=totals.num_counted + 1)
            for totals in self._totals
        ]

    @property
    def has_any(self) -> bool:
        """Whether tokens were counted here whose gradients are not scaled yet."""
        return any(totals.num_counted for totals in self._totals)

    def begin_backward(self) -> None:
        """An outermost backward brings its first gradient. Raises ZcError if it would add a sum to a mean."""
        if any(self._is_scaled):
            raise ZcError(
                "a backward follows an update or a read of gradients that has divided them by the tokens of zc.count, "
                "and would add a sum over tokens to a mean. Call optimizer.zero_grad() before it (of every optimizer "
                "of the model), and read gradients after the last microbatch of an update alone"
            )
        self.is_in_backward = True
        self._totals = [totals._replace(num_backwards=totals.num_backwards + 1) for totals in self._totals]

    def end_backward(self) -> None:
        """The outermost backward has ended; or it has raised, and all gradients were dropped."""
        self.is_in_backward = False

    def clear(self, optimizers: Sequence[int]) -> None:
        """All gradients of these optimizers were dropped, or made zeros."""
        for k in optimizers:
            old = self._totals[k]
            num_lost = max(old.num_counted - old.num_backwards, 0)
            if old.num_backwards == 0:  # gradients were dropped twice before a backward
                num_lost += old.num_lost
            self._totals[k], self._is_scaled[k] = Totals(num_lost=num_lost), False

    # --- the boundary ---

    def row(self) -> bytes:
        """This rank's totals, of the same size on all ranks."""
        return b"".join(_ROW.pack(*totals) for totals in self._totals)

    def agree(self, rows: Sequence[bytes]) -> None:
        """All ranks are at the boundary, with these ``rows``. Raises ZcError, on all of them, where a backward of some
        rank was not counted, or was twice; nothing has changed then."""
        by_rank = [[Totals(*each) for each in _ROW.iter_unpack(row)] for row in rows]
        self._scales = [_scale([totals[k] for totals in by_rank]) for k in range(len(self._totals))]

    def take_scales(self) -> list[float | None]:
        """What the caller multiplies each optimizer's gradients by, once: the means over ranks become means over
        tokens. None: they stay."""
        scales, self._scales = self._scales, []
        for k, scale in enumerate(scales):
            if scale is not None:  # else a later microbatch may be counted, and these were not
                self._totals[k], self._is_scaled[k] = Totals(), True
        return scales


def _scale(by_rank: Sequence[Totals]) -> float | None:
    """Of one optimizer, by its totals on all ranks."""
    early = [rank for rank, one in enumerate(by_rank) if one.num_lost and one.num_counted < one.num_backwards]
    if early:
        raise ZcError(
            f"rank {early[0]} called zc.count before zero_grad, which drops counts together with gradients: call it "
            "between zero_grad and the backward, or after the backward"
        )
    if not any(totals.num_counted for totals in by_rank):
        return None
    wrong = [rank for rank, totals in enumerate(by_rank) if totals.num_counted != totals.num_backwards]
    if wrong:
        others = sorted({0, len(by_rank) - 1, wrong[0]})[:3]
        text = "; ".join(f"rank {rank}: {by_rank[rank].text}" for rank in others)
        raise ZcError(
            "zc.count must be called once for each backward of an update, on every rank that has one, or never. In "
            f"this update: {text}. For a backward without tokens call zc.count(model, 0), for one of several losses "
            "pass the tokens of all"
        )
    num_tokens = math.fsum(totals.num_tokens for totals in by_rank)
    if num_tokens == 0:
        raise ZcError(
            "the tokens of zc.count in this update add up to 0 over all ranks, and a mean over none is not defined: "
            "leave out such an update on all ranks (zero_grad drops its gradients)"
        )
    return len(by_rank) / num_tokens
