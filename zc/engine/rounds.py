"""What ranks tell each other around one backward: what it is going to reduce, and at its end who has a gradient.

**At its begin, stage 1** proposes all that this backward is expected to reduce, in order, as one announcement: the
buckets of the compiled graph that begins it, or of a like backward before. Where all ranks proposed the same, that is
what is reduced, on every rank, in that order; what has not come up when the backward ends is reduced then, with what
is there. Where they differ (other tasks, other branches) nothing is, and the boundary reduces the sums. So a backward
makes as many announcements as on every other rank, whatever it turns out to bring, and nobody waits inside a backward
for what another rank sends only behind a collective of the caller's: what DDP's loops may do, these may. A guess that
is wrong costs overlap, no number.

**Stage 2** has no place for a partial sum, so there it announces what is full when it is full, and a difference is an
error.

**At its end** a parameter that only another rank used gets its ``.grad`` too, as in DDP with find_unused_parameters, so
that stock clipping sums the same gradients everywhere. Nothing is exchanged for that where every rank has said at the
begin that its compiled graph brings the gradients of all parameters.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zc.planning.plan import Bucket, Plan
from zc.ranks.agreement import Agreement, Announcement

if TYPE_CHECKING:
    from zc.engine.ops import GradientOps


END = "end a backward"
Where = tuple[int, int]  # bucket, slot


def num_flags(plan: Plan) -> int:
    """What ranks tell each other: which parameters have a gradient, which buckets a partial sum, and whether a
    ``param.grad`` is asked."""
    return sum(len(bucket.slots) for bucket in plan.buckets) + len(plan.buckets) + 1


class Rounds:
    """The rounds of one compiled model, one a backward that reduces."""

    def __init__(self, plan: Plan, ops: GradientOps, agreement: Agreement) -> None:
        self.plan, self._ops, self._agreement = plan, ops, agreement
        self.known = [[False] * len(b.slots) for b in plan.buckets]  # parameters that some rank has a gradient of
        self.showed_one_set = True  # all ranks had a .grad on the same parameters when they met last
        self._habits: dict[str, list[int]] = {}  # what a backward begins with -> the buckets that were full in it
        self._source = ""
        self._full: list[int] = []  # buckets that were full in this backward, in order
        self._proposed: list[int] = []
        self._num_taken = 0  # of them, those whose reduction is issued
        self._is_astray = False  # something came in another order than proposed: the rest waits for the end
        self._made: list[Announcement] = []  # in this backward

    def grow(self, plan: Plan) -> None:
        """Takes in ``plan``, whose first buckets are the present ones."""
        self.known += [[False] * len(b.slots) for b in plan.buckets[len(self.plan.buckets) :]]
        self.plan = plan
        self._agreement.numel_flags = num_flags(plan)
        self._habits.clear()

    def begin(self, source: str, buckets: Sequence[int] | None, brings: frozenset[Where] = frozenset()) -> None:
        """The first gradient of a backward comes in by ``source``, which will reduce ``buckets`` (None: any) and
        ``brings`` these gradients for sure."""
        self._source, self._full, self._num_taken, self._is_astray = source, [], 0, False
        self._made.clear()
        self._proposed = []
        if self._agreement.defers and self.plan.world_size > 1:
            every = [bucket.index for bucket in self.plan.buckets]
            self._proposed = self._habits.get(source, list(every if buckets is None else buckets))
            self._announce(self._proposed, brings)

    def is_agreed(self, buckets: Sequence[int], brings: frozenset[Where] = frozenset()) -> Callable[[], bool] | None:
        """``buckets`` are full. What the comm stream asks before it reduces them; None: no other rank to ask."""
        if not buckets or self.plan.world_size == 1:
            return None
        if not self._agreement.defers:
            return self._announce(buckets, brings).is_same
        if not self._made:
            return _never
        self._full += buckets
        end = self._num_taken + len(buckets)
        self._is_astray = self._is_astray or self._proposed[self._num_taken : end] != list(buckets)
        if self._is_astray:
            return _never
        self._num_taken = end
        return self._made[0].is_same

    def left(self) -> list[int]:
        """The backward has ended: what all ranks have proposed and this one has not reduced."""
        if not self._made or not self._agreement.defers:
            return []
        self._habits[self._source] = self._full
        return self._proposed[self._num_taken :] if self._made[0].is_same() else []

    def end(self, *, is_boundary: bool) -> None:
        """The gradients of this backward are in. Behind one that no_sync did not hold back `known` is the same on all
        ranks."""
        made = self._made
        self._agreement.hold([each.number for each in made if each.is_same()], self.plan.num_optimizers)
        flags = self._ops.touched_flags()
        if is_boundary and self.plan.world_size > 1 and not (made and made[-1].all_flags(len(flags))):
            ended = self._agreement.announce(END, self._flags())
            ended.is_same()
            flags = ended.flags()
        self._know(flags)
        made.clear()

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        """The gradients of these buckets, all of some optimizers, were dropped, or made zeros."""
        had_any = any(any(self.known[b.index]) for b in buckets)
        self._agreement.cleared({b.optimizer for b in buckets}, had_any=had_any)
        for bucket in buckets if set_to_none else ():
            self.known[bucket.index] = [False] * len(bucket.slots)
        self._made.clear()

    def meet(self, flags: Sequence[int]) -> list[int]:
        """The boundary: the largest of ``flags`` over the ranks. Raises RankMismatchError where ranks hold sums of
        other gradients."""
        met = self._agreement.meet(flags, zlib.crc32(repr(self.known).encode()))
        self.showed_one_set = met.shows_one_set()
        self._know(met.flags())
        return met.flags()

    def _know(self, flags: Sequence[int]) -> None:
        items = iter(flags)
        self.known = [[bool(next(items)) or flag for flag in flags] for flags in self.known]

    def _announce(self, buckets: Sequence[int], brings: frozenset[Where]) -> Announcement:
        names = [self.plan.buckets[b].slots[0].name for b in buckets]
        made = self._agreement.announce(describe(buckets, names), self._flags(brings))
        self._made.append(made)
        return made

    def _flags(self, brings: frozenset[Where] = frozenset()) -> list[int]:
        flags = self._ops.touched_flags()
        if brings:
            at = list(itertools.accumulate((len(b.slots) for b in self.plan.buckets), initial=0))
            for bucket, slot in brings:
                flags[at[bucket] + slot] = 1
        return flags + [0] * (len(self.plan.buckets) + 1)


def _never() -> bool:
    return False


def describe(buckets: Sequence[int], first_params: Sequence[str]) -> str:
    """What an announcement says of a reduction: the same text on every rank that reduces the same."""
    shown = ", ".join(f"{b} ({name}, ...)" for b, name in zip(buckets, first_params, strict=True))
    return f"reduce buckets {shown}"
