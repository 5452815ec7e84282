"""Which parameters have a gradient, and which buckets a backward reduces, of a model whose ranks all do the same: the
same backwards, which bring the same gradients. One rank alone does. Nobody is asked then.

Ranks that may differ announce what they do (`zc.engine.announcements`), a wing that `zc.compile` hands over: its class
answers the same questions after it has heard the others.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from zc.engine.ledger import Waits, Where
from zc.engine.token_counts import TokenCounts

if TYPE_CHECKING:
    from zc.engine.buffers import Accumulators
    from zc.engine.operations import MayReduce
    from zc.planning.plan import Bucket, Plan
    from zc.ranks.group import Group


class Agreement:
    """Of one compiled model. Only the thread that issues schedules uses it: autograd's in a backward, the caller's
    between two."""

    def __init__(self, accs: Accumulators, _: Group) -> None:
        """Nobody is asked, so the group is for those that ask (`zc.engine.features.Features.make_agreement`)."""
        self._accs = accs
        self.has_grad = self._no_grads()  # by bucket and slot: some rank has a gradient
        self.token_counts = TokenCounts(self.plan.num_optimizers)
        self._dropped: set[Where] = set()  # parameters whose gradients were dropped one by one, each once

    @property
    def plan(self) -> Plan:
        return self._accs.plan

    def grow(self) -> None:
        """The plan has more buckets now; the first ones are those of before."""
        self.has_grad += self._no_grads()[len(self.has_grad) :]
        self.token_counts.grow(self.plan.num_optimizers)

    # --- a backward ---

    @property
    def has_proposal(self) -> bool:
        """Whether a backward that reduces runs on this rank, and other ranks know of it."""
        return False

    def begin(self, source: str, buckets: Sequence[int] | None, grads: frozenset[Where], *, is_boundary: bool) -> None:
        """A backward begins with ``source``, a program or "hooks", which will reduce ``buckets`` (None: any) and surely
        has the gradients ``grads``. Not ``is_boundary``: the backward is inside no_sync."""

    def permission(self, buckets: Sequence[int]) -> MayReduce | None:
        """Called when ``buckets`` are full. Returns what to ask before they are reduced. None: nobody has to be
        asked."""
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
        had_one = {self.plan.buckets[bucket].optimizer for bucket, slot in dropped if self.has_grad[bucket][slot]}
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

    def _has_dropped_all_of(self, optimizer: int) -> bool:
        """Whether each gradient of this optimizer is among those that were dropped, or made zeros, one by one."""
        for bucket in self.plan.of_optimizer(optimizer):
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
            self.token_counts.agree([self.token_counts.row()] * self.plan.num_ranks)
        return [] if self.plan.num_ranks == 1 else sorted(unreduced), False

    def pop_waits(self) -> Waits:
        """Since the last call: how long the issuing thread has waited for other ranks' answers, inside of backwards, at
        their ends and at boundaries."""
        return {}

    # --- flags ---

    def _no_grads(self) -> list[list[bool]]:
        return [[False] * len(bucket.slots) for bucket in self.plan.buckets]

    def _add_grads(self, flags: Sequence[int]) -> None:
        """``flags``: by parameter, in the order of the plan, and perhaps more behind."""
        both = zip(self._grads_in(flags), self.has_grad, strict=True)
        self.has_grad = [list(map(operator.or_, new, old)) for new, old in both]

    def _grads_in(self, flags: Sequence[int]) -> list[list[bool]]:
        items = iter(flags)
        return [list(map(bool, itertools.islice(items, len(slots)))) for slots in self.has_grad]
