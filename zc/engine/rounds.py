"""What ranks tell each other around one backward: what it is going to reduce, and at its end who has a gradient.

**At its begin** a rank proposes all that this backward is expected to reduce, in order, as one announcement: the
buckets of the compiled graph that begins it, or of a like backward before.

- *All ranks proposed the same*: that is what is reduced, on every rank, in that order, once for each time that it was
  proposed. What has not come up in its turn when the backward ends is reduced then, with what is there.
- *They differ* (other tasks, other branches, a graph broken on one rank alone): nothing is reduced inside this
  backward.

What a rank has beyond the agreed order it *keeps*: stage 1 as a partial sum in its accumulator, for which the boundary
is early enough; stage 2, whose ring has no place for a sum, as the whole gradients, by reference. A backward whose
proposals differ has then the memory of one without ZeRO-2, so stage 2 reduces at its end, on all ranks, in plan order,
what any of them keeps; and where that end is not everyone's (ranks have different numbers of backwards), the boundary
does. A backward outside of no_sync waits at its end until all ranks are at such an end, or at the boundary: as under
DDP, they may come to it by different numbers of microbatches in no_sync.

So while ranks agree, a backward makes as many announcements as on every other rank, whatever it turns out to bring, and
nobody waits inside a backward for what another rank sends only behind a collective of the caller's: what DDP's loops
may do, these may. A guess that is wrong costs overlap, no number. In stage 1 on a CPU only the comm stream waits for
the others' proposals; in stage 2 the host does, once a backward, where it has issued all that comes before its first
write into the ring, since what is there must be reduced; and on a GPU in both stages, since there is no taking back
what was issued. `zc.explain` counts these waits.

**At its end** a parameter that only another rank used gets its ``.grad`` too, as in DDP with find_unused_parameters, so
that stock clipping sums the same gradients everywhere. Nothing is exchanged for that where every rank has said at the
begin that its compiled graph brings the gradients of all parameters.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from zc.planning.plan import Bucket, Plan
from zc.ranks.agreement import Agreement, Announcement

if TYPE_CHECKING:
    from zc.engine.ops import GradientOps


Where = tuple[int, int]  # bucket, slot


class Rounds:
    """The rounds of one compiled model, one a backward that reduces."""

    def __init__(self, plan: Plan, ops: GradientOps, agreement: Agreement) -> None:
        self.plan, self._ops, self._agreement = plan, ops, agreement
        self.known = [[False] * len(b.slots) for b in plan.buckets]  # parameters that some rank has a gradient of
        self._reduced = [[False] * len(b.slots) for b in plan.buckets]  # those that are in every rank's sums
        self.showed_one_set = True  # all ranks had a .grad on the same parameters when they met last
        self._habits: dict[str, list[int]] = {}  # what a backward begins with -> the buckets that came in it
        self._source = ""
        self._full: list[int] = []  # buckets that were full in this backward, in order
        self._proposed: list[int] = []
        self._num_taken = 0  # of them, those whose reduction is issued, or about to be
        # Reductions that this rank has issued before this backward. Some may not have started when it begins.
        self.num_issued = 0
        self._is_astray = False  # something came in another order than proposed: the rest waits for the end
        self._made: Announcement | None = None  # this backward's proposal
        self._is_boundary = True  # no_sync does not hold it back

    def grow(self, plan: Plan) -> None:
        """Takes in ``plan``, whose first buckets are the present ones."""
        for flags in (self.known, self._reduced):
            flags += [[False] * len(b.slots) for b in plan.buckets[len(self.plan.buckets) :]]
        self.plan = plan
        self._habits.clear()

    def begin(
        self,
        source: str,
        buckets: Sequence[int] | None,
        brings: frozenset[Where] = frozenset(),
        *,
        is_boundary: bool = True,
    ) -> None:
        """The first gradient of a backward comes in by ``source``, which will reduce ``buckets`` (None: any) and
        ``brings`` these gradients for sure. Not ``is_boundary``: it is in no_sync."""
        if self.plan.num_ranks == 1:
            return
        self._is_boundary = is_boundary
        self._source, self._full, self._num_taken, self._is_astray = source, [], 0, False
        every = [bucket.index for bucket in self.plan.buckets]
        self._proposed = self._habits.get(source, list(every if buckets is None else buckets))
        names = [self.plan.buckets[b].slots[0].name for b in self._proposed]
        what = describe(self._proposed, names) + ("" if is_boundary else " in a microbatch")
        self._made = self._agreement.announce(what, self._flags(brings))

    def is_agreed(self, buckets: Sequence[int]) -> Callable[[], bool] | None:
        """``buckets`` are full. What to ask before they are reduced, which waits for the other ranks' proposals; None:
        no other rank to ask."""
        if not buckets or self.plan.num_ranks == 1:
            return None
        if self._made is None:
            return _never
        self._full += buckets
        end = self._num_taken + len(buckets)
        self._is_astray = self._is_astray or self._proposed[self._num_taken : end] != list(buckets)
        if self._is_astray:
            return _never
        self._num_taken = end
        return self._made.is_same

    @property
    def is_open(self) -> bool:
        """Whether a backward that reduces has begun, and not ended."""
        return self._made is not None

    def differs(self) -> bool:
        """Whether another rank has proposed something else for this backward."""
        return self._made is not None and not self._made.is_same()

    def left(self, kept: Collection[int]) -> list[int]:
        """The backward has ended, and this rank keeps gradients of the buckets ``kept``: what all ranks have proposed
        and this one has not reduced."""
        if self._made is None:
            return []
        taken = [] if self.differs() else self._proposed[: self._num_taken]
        self.num_issued += len(taken)
        # of the next one like it, partial buckets and what came twice are a part too
        rest = [k for k in sorted(kept) if self._full.count(k) == taken.count(k)]
        self._habits[self._source] = self._full + rest
        return self._owed()

    def cut_short(self) -> list[int]:
        """The backward has raised on this rank: what all ranks have proposed and this one has not reduced. A compiled
        graph may have raised between two of its reductions, so those that have begun count. All streams are joined."""
        self._num_taken = self._ops.num_started - self.num_issued
        owed = self._owed()
        self.num_issued = self._ops.num_started
        self._made = None
        return owed

    def _owed(self) -> list[int]:
        return [] if self._made is None or self.differs() else self._proposed[self._num_taken :]

    def end(self, kept: Collection[int]) -> list[int]:
        """The gradients of this backward are in, what was `left` is reduced, and this rank keeps gradients of the
        buckets ``kept``. Returns what all ranks reduce now.

        Behind one that no_sync did not hold back `known` is the same on all ranks.
        """
        made, self._made, reduced, is_everyones = self._made, None, [], False
        flags = self._ops.touched_flags()
        if made is not None:
            if made.is_same():
                self._agreement.hold(made.number, self.plan.num_optimizers)
            is_everyones = self._is_boundary and made.all_flags(len(flags))
            if not made.is_same() or (self._is_boundary and not is_everyones):
                ended = self._ended(self._flags(kept=kept))
                flags, is_everyones = ended.flags(), self._is_boundary and ended.is_same()
                if ended.is_same():
                    reduced = [k for k, flag in enumerate(flags[-1 - len(self.plan.buckets) : -1]) if flag]
                if reduced:
                    self._agreement.hold(ended.number, self.plan.num_optimizers)
        self._know(flags, is_everyones=is_everyones)
        return reduced

    def _ended(self, flags: Sequence[int]) -> Announcement:
        if self._is_boundary:
            return self._agreement.meet_at_end(flags)
        ended = self._agreement.announce("end a microbatch", flags)
        ended.is_same()
        return ended

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        """The gradients of these buckets, all of some optimizers, were dropped, or made zeros."""
        self._agreement.cleared({b.optimizer for b in buckets})
        for bucket in buckets:
            for flags in (self._reduced, *([self.known] if set_to_none else ())):
                flags[bucket.index] = [False] * len(bucket.slots)
        self._made = None

    def drop(self, gone: Collection[Where], *, set_to_none: bool) -> None:
        """The gradients of some parameters were dropped, or made zeros. As after `clear`, no later announcement agrees
        with one that another rank made earlier. If one rank alone drops a gradient that all ranks have reduced, the
        boundary raises."""
        for bucket, slot in gone:
            optimizer, is_reduced = self.plan.buckets[bucket].optimizer, self._reduced[bucket][slot]
            self._agreement.dropped(optimizer, (bucket, slot), is_reduced=is_reduced)
            self._reduced[bucket][slot] = False
            self.known[bucket][slot] = self.known[bucket][slot] and not set_to_none

    def meet(self, kept: Collection[int], *, by_grad: bool) -> list[int]:
        """The boundary: the largest over the ranks of what they tell each other. Raises RankMismatchError where ranks
        hold sums of other gradients."""
        flags = [*self._flags(kept=kept)[:-1], int(by_grad)]
        met = self._agreement.meet(flags, zlib.crc32(repr(self.known).encode()))
        self.showed_one_set = met.shows_one_set()
        if any(met.flags()[-1 - len(self.plan.buckets) : -1]):
            self._agreement.hold(met.number, self.plan.num_optimizers)
        self.known = [[False] * len(flags) for flags in self.known]  # the ranks' flags are complete here
        self._know(met.flags(), is_everyones=True)
        return met.flags()

    def _know(self, flags: Sequence[int], *, is_everyones: bool) -> None:
        """``is_everyones``: all ranks have the same ``flags``, and the sums hold the gradients that they name."""
        items = iter(flags)
        reduced = [[bool(next(items)) for _ in flags] for flags in self.known]
        if is_everyones:
            self._reduced = reduced
        self.known = [[a or b for a, b in zip(*pair, strict=True)] for pair in zip(reduced, self.known, strict=True)]

    def _flags(self, brings: frozenset[Where] = frozenset(), kept: Collection[int] = ()) -> list[int]:
        """What ranks tell each other: which parameters have a gradient, which buckets one that is kept, and whether a
        ``param.grad`` is asked."""
        flags = self._ops.touched_flags()
        if brings:
            at = list(itertools.accumulate((len(b.slots) for b in self.plan.buckets), initial=0))
            for bucket, slot in brings:
                flags[at[bucket] + slot] = 1
        return [*flags, *(int(b.index in kept) for b in self.plan.buckets), 0]


def _never() -> bool:
    return False


def describe(buckets: Sequence[int], first_params: Sequence[str]) -> str:
    """What an announcement says of a reduction: the same text on every rank that reduces the same."""
    shown = ", ".join(f"{b} ({name}, ...)" for b, name in zip(buckets, first_params, strict=True))
    return f"reduce buckets {shown}"
