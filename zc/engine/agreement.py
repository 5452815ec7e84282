"""What ranks have to agree on: which parameters have a gradient, which buckets a backward reduces, and by how many
tokens an update divides. Here all ranks do the same, the same backwards, which bring the same gradients. One rank alone
does. Nobody is asked then.

Ranks that may differ announce what they do (`zc.engine.announcements`), a wing that `zc.compile` hands over: its class
answers the same questions after it has heard the others.
"""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zc.engine.ledger import Where
from zc.errors import ZcError

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.engine.operations import MayReduce
    from zc.planning.plan import Bucket

# what a rank does next, in announcements and in the files that `zc diff` reads
BOUNDARY = "finish the gradients of an update (optimizer.step, clipping, or reading a gradient)"
END = "end a backward"  # outside of no_sync


class Agreement:
    """Of one compiled model. Only the thread that issues schedules uses it: autograd's in a backward, the caller's
    between two."""

    def __init__(self, core: Core) -> None:
        self._accs = core.accumulators
        self.has_grad = self._no_grads()  # by bucket and slot: some rank has a gradient
        self.token_counts = TokenCounts(self._accs.plan.num_optimizers)
        self.proposal: object | None = None  # of the backward that runs; None: none that reduces and others know of
        self._dropped: set[Where] = set()  # parameters whose gradients were dropped one by one, each once
        self._num_cleared = 0  # times that gradients were dropped since the last boundary: a loop counts once

    def grow(self) -> None:
        """The plan has more buckets now; the first ones are those of before."""
        self.has_grad += self._no_grads()[len(self.has_grad) :]
        self.token_counts.grow(self._accs.plan.num_optimizers)

    # --- a backward ---

    def begin(self, source: str, buckets: Sequence[int] | None, grads: frozenset[Where], *, is_boundary: bool) -> None:
        """A backward begins with ``source``, a program or "hooks", which will reduce ``buckets`` (None: any) and surely
        has the gradients ``grads``. Not ``is_boundary``: the backward is inside no_sync."""

    def permission(self, buckets: Sequence[int]) -> MayReduce | None:
        """Called before ``buckets`` are written, or reduced. Returns what to ask before they are reduced. None: nobody
        has to be asked."""
        return None

    @property
    def agreed(self) -> MayReduce | None:
        """The permission for reductions to which all ranks have agreed already."""
        return None

    def differs(self) -> bool:
        """Whether another rank has proposed something else for this backward."""
        return False

    def rest(self, unreduced: Collection[int]) -> list[int]:
        """The backward has ended, and this rank still has gradients of the buckets ``unreduced``. Returns the buckets
        that all ranks reduce now as a part of it. One rank has no later point: its boundary reduces nothing."""
        return sorted(unreduced)

    def end(self, unreduced: Collection[int]) -> list[int]:
        """The gradients of this backward are in, the `rest` is reduced, and this rank still has gradients of the
        buckets ``unreduced``. Returns the buckets that all ranks reduce now."""
        self._add_grads(self._accs.touched_flags())
        return []

    def cut_short(self) -> list[int]:
        """The backward has raised on this rank: the buckets that others wait for, and this one has not begun to reduce.
        All streams are joined."""
        return []

    # --- between two backwards ---

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        """The gradients of these buckets, all of some optimizers, were dropped, or made zeros."""
        self.token_counts.clear(sorted({b.optimizer for b in buckets}))
        self._begin_drops()
        for bucket in buckets if set_to_none else ():
            self.has_grad[bucket.index] = [False] * len(bucket.slots)

    def drop(self, dropped: Collection[Where], *, set_to_none: bool) -> list[int]:
        """The gradients of some parameters were dropped, or made zeros. Returns the optimizers of which this was the
        last gradient that this rank knows of: with them go those of other ranks."""
        had_one = {self._accs.plan.buckets[bucket].optimizer for bucket, slot in dropped if self.has_grad[bucket][slot]}
        for bucket, slot in dropped:
            if not self._dropped or (bucket, slot) in self._dropped:
                self._begin_drops()
            self._dropped.add((bucket, slot))
            self.has_grad[bucket][slot] = self.has_grad[bucket][slot] and not set_to_none
        return [k for k in sorted(had_one) if self._has_dropped_all_of(k)]

    def _begin_drops(self) -> None:
        """Gradients are dropped all together, or the first one in a loop over parameters is, however many of them have
        one here."""
        self._dropped.clear()
        self._num_cleared += 1

    def _has_dropped_all_of(self, optimizer: int) -> bool:
        """Whether each gradient of this optimizer is among those that were dropped, or made zeros, one by one."""
        for bucket in self._accs.plan.of_optimizer(optimizer):
            for slot, has_grad in enumerate(self.has_grad[bucket.index]):
                if has_grad and (bucket.index, slot) not in self._dropped:
                    return False
        return True

    def assign(self, assigned: Collection[Where]) -> None:
        """The caller has assigned values to these parameters' ``.grad``."""
        for bucket, slot in assigned:
            self.has_grad[bucket][slot] = True

    def boundary(self, unreduced: Collection[int], *, by_grad: bool, is_last: bool) -> tuple[list[int], bool]:
        """Returns once all ranks are at the boundary: the buckets that all ranks reduce now, and whether no rank had a
        backward since the last boundary.

        ``unreduced``: buckets whose gradients this rank still has. ``by_grad``: a ``param.grad`` was read here.
        ``is_last``: no gradient is to come before the update. Raises ZcError where `zc.count` was not called once for
        each backward."""
        if is_last:
            self.token_counts.agree([self.token_counts.row()] * self._accs.plan.num_ranks)
        return [] if self._accs.plan.num_ranks == 1 else sorted(unreduced), False

    # --- flags ---

    def _no_grads(self) -> list[list[bool]]:
        return [[False] * len(bucket.slots) for bucket in self._accs.plan.buckets]

    def _add_grads(self, flags: bytes) -> None:
        """``flags``: one byte a parameter, in the order of the plan, and perhaps more behind."""
        known = itertools.chain.from_iterable(self.has_grad)
        self.has_grad = self._by_bucket(bytes(map(operator.or_, flags, known)), self.has_grad)

    def _by_bucket(self, flags: bytes, known: list[list[bool]]) -> list[list[bool]]:
        """``flags``, as `_add_grads` has them, by bucket and slot; ``known`` itself where it says the same, which is so
        in most steps."""
        if flags.startswith(bytes(itertools.chain.from_iterable(known))):
            return known
        items = iter(flags)
        return [list(map(bool, itertools.islice(items, len(slots)))) for slots in known]


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
    """How many tokens the gradients of an update come from, for `zc.count`: each optimizer's gradient becomes the mean
    over the tokens of all ranks and microbatches. Only the thread that issues schedules uses it.

    A backward adds a sum over tokens to the accumulators, and ``zc.count`` says how many tokens that were. Every
    announcement carries this rank's totals, so that at the boundary all ranks know those of all ranks, and come to the
    same verdict, before anything is reduced or scaled. The accumulators hold the mean over W ranks of the sums; times
    W / N, N the tokens of all ranks, that is the mean over tokens.
    """

    def __init__(self, num_optimizers: int) -> None:
        self._totals = [Totals()] * num_optimizers
        self._is_scaled = [False] * num_optimizers  # the gradients are the mean over tokens already
        self.is_in_backward = False  # an outermost one, which is counted; until it ends, or all gradients are dropped
        # by optimizer, of the boundary that all ranks have come to; empty where none of them has counted
        self.scales: list[float | None] = []

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
        scales = [_scale([totals[k] for totals in by_rank]) for k in range(len(self._totals))]
        self.scales = [] if scales.count(None) == len(scales) else scales

    def take_scales(self) -> list[float | None]:
        """What the caller multiplies each optimizer's gradients by, once: the means over ranks become means over
        tokens. None: they stay."""
        scales, self.scales = self.scales, []
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
