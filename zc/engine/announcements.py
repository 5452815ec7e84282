"""What ranks tell each other around one backward and before an update, so that all of them reduce the same.

A collective that ranks enter with different buckets does not fail: it hangs, mixes numbers up, or (gloo) ends the
process. So ranks *announce*, in a few bytes of host memory, what they are about to do. docs/design.md has the states.

**A backward begins.** Each rank proposes, in one announcement, the buckets that this backward should reduce, in order:
those of the compiled graph that begins it, or those of the last backward that began in the same way.

- *All ranks proposed the same*: they reduce that, in that order, each bucket as often as it was proposed. What has not
  come in its turn when the backward ends is reduced then, with what is there.
- *Proposals differ* (other tasks, other branches, a graph broken on one rank alone): this backward reduces nothing.

A rank *keeps* what it has beyond the agreed order: stage 1 as a partial sum in its accumulator, which the boundary
reduces; stage 2, whose ring has no room for a sum, as whole gradients, by reference. So stage 2 reduces at the end of
the backward, in plan order, what any rank keeps; or at the boundary, where ranks have different numbers of backwards.

**A backward ends.** A parameter that only another rank used gets its ``.grad`` too, as in DDP with
find_unused_parameters, so that stock clipping sums the same gradients everywhere. Ranks skip this exchange where all of
them said at the begin that their compiled graphs bring the gradients of all parameters. Outside of no_sync a rank waits
until all ranks are at such an end or at the boundary, since they may come there by different numbers of microbatches.

**The boundary** is the point before an update. A rank that is early answers the backwards that others still have.

The k-th announcement on one rank matches the k-th on every other, so between two of the user's collectives all ranks
make equally many. An announcement is asynchronous: ranks read its answer right before the first reduction. All ranks
see the same rows and come to the same answer: a difference is no error, and a wrong guess costs overlap, no number. In
stage 1 on a CPU only the comm stream waits for the answer; else the host does, once per backward, as late as it can.

Each row also says what a rank's sums hold: where one rank has dropped gradients that all had reduced together, the
boundary raises RankMismatchError, and no part of them enters another rank's sum.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zc.engine.ledger import Where
from zc.planning.plan import Bucket, Plan
from zc.ranks.announcement import BOUNDARY, END, Announcement, Waits, compare_pasts, plus, raise_sums_differ

if TYPE_CHECKING:
    from zc.engine.accumulators import Accumulators
    from zc.engine.binding import MayReduce
    from zc.ranks.group import Group


class State(enum.Enum):
    """Of the backward that runs on this rank."""

    IDLE = "no backward that reduces"
    IN_ORDER = "its proposal is sent, and its buckets have come in the proposed order so far"
    ASTRAY = "a bucket came out of that order: what was not reduced yet waits for the end"


class Boundary(NamedTuple):
    """The answer of all ranks before an update."""

    touched: list[int]  # flags, by parameter: some rank has a gradient
    buckets: list[int]  # some rank has yet to reduce these
    is_asked: bool  # some rank is here because a ``param.grad`` was read
    show_same: bool  # all ranks had a ``.grad`` on the same parameters
    comes_alone: bool  # no rank has announced a backward since the last boundary


class Announcements:
    """The protocol of one compiled model. Only the thread that issues schedules uses it: autograd's in a backward, the
    caller's between two. The comm stream sees the `Announcement` of its backward alone."""

    def __init__(self, plan: Plan, accs: Accumulators, group: Group) -> None:
        self.plan, self._accs, self._group = plan, accs, group
        self.has_grad = [[False] * len(b.slots) for b in plan.buckets]  # by bucket and slot: some rank has a gradient
        self._reduced = [[False] * len(b.slots) for b in plan.buckets]  # those that are in every rank's sums
        self.state = State.IDLE
        self._proposal: Announcement | None = None  # None where IDLE
        self._proposed: list[int] = []
        self._num_issued = 0  # of the proposed buckets, those whose reduction is issued, or about to be
        self._full: list[int] = []  # buckets that were full in this backward, in order
        self._is_boundary = True  # no_sync does not hold this backward back
        self._source = ""  # what the backward began with
        self._last_order: dict[str, list[int]] = {}  # by source: the buckets that came in the last backward
        self._num_announced = self._last_boundary = 0
        self._num_cleared = 0  # times that gradients were dropped since the last boundary: no match across one
        self._dropped: set[Where] = set()  # parameters whose drops count as the last one of _num_cleared
        # by optimizer: how many reductions the sums of its parameters hold, and a checksum of which announcements made
        # them and which gradients were dropped since
        self._in_sums: dict[int, tuple[int, int]] = {}
        self._waits: Waits = {"inside": [], "at its end": [], "at the boundary": []}

    def grow(self, plan: Plan) -> None:
        """Takes in ``plan``, whose first buckets are the present ones."""
        for flags in (self.has_grad, self._reduced):
            flags += [[False] * len(b.slots) for b in plan.buckets[len(self.plan.buckets) :]]
        self.plan = plan
        self._last_order.clear()

    # --- a backward ---

    def begin(self, source: str, buckets: Sequence[int] | None, brings: frozenset[Where], *, is_boundary: bool) -> None:
        """The first gradient of a backward comes by ``source``, which will reduce ``buckets`` (None: any) and
        ``brings`` these gradients for sure. Not ``is_boundary``: the backward is in no_sync."""
        if self.plan.num_ranks == 1:
            return
        self._is_boundary, self._source, self._full, self._num_issued = is_boundary, source, [], 0
        every = [bucket.index for bucket in self.plan.buckets]
        self._proposed = self._last_order.get(source, list(every if buckets is None else buckets))
        names = [self.plan.buckets[b].slots[0].name for b in self._proposed]
        what = describe(self._proposed, names) + ("" if is_boundary else " in a microbatch")
        self._proposal, self.state = self.announce(what, self._flags(brings)), State.IN_ORDER

    def may_reduce(self, buckets: Sequence[int]) -> MayReduce | None:
        """``buckets`` are full. What to ask before they are reduced, which waits for the other ranks' proposals; None:
        there is no other rank to ask."""
        if not buckets or self.plan.num_ranks == 1:
            return None
        if self._proposal is None:
            return _never
        self._full += buckets
        end = self._num_issued + len(buckets)
        if self.state is State.ASTRAY or self._proposed[self._num_issued : end] != list(buckets):
            self.state = State.ASTRAY
            return _never
        self._num_issued = end
        return self._proposal.may_reduce

    @property
    def counted(self) -> MayReduce | None:
        """For a reduction that all ranks agree to already: counts it as one of the open backward."""
        return self._proposal.may_reduce if self._proposal is not None else None

    def differs(self) -> bool:
        """Whether another rank has proposed something else for this backward."""
        return self._proposal is not None and not self._proposal.is_same()

    def left(self, unreduced: Collection[int]) -> list[int]:
        """The backward has ended, and this rank still has gradients of the buckets ``unreduced``. Returns the buckets
        that all ranks have proposed and this one has not reduced."""
        if self._proposal is None:
            return []
        issued = [] if self.differs() else self._proposed[: self._num_issued]
        # of the next backward like it, partial buckets and what came twice are a part too
        rest = [k for k in sorted(unreduced) if self._full.count(k) == issued.count(k)]
        self._last_order[self._source] = self._full + rest
        return self._not_issued()

    def end(self, unreduced: Collection[int]) -> list[int]:
        """The gradients of this backward are in, what was `left` is reduced, and this rank still has gradients of the
        buckets ``unreduced``. Returns the buckets that all ranks reduce now. After a backward outside of no_sync
        `has_grad` is the same on all ranks."""
        proposal, reduced, flags = self._proposal, list[int](), self._accs.touched_flags()
        self._close()
        is_complete = False  # the flags are those of all ranks
        if proposal is not None:
            is_same = proposal.is_same()
            if is_same:
                self._add_to_sums(proposal)
            is_complete = self._is_boundary and proposal.all_flags(len(flags))
            if not is_same or (self._is_boundary and not is_complete):
                ended = self._meet_at_end(self._flags(unreduced=unreduced))
                flags, is_complete = ended.flags(), self._is_boundary and ended.is_same()
                if ended.is_same():
                    reduced = self._unreduced_anywhere(flags)
                if reduced:
                    self._add_to_sums(ended)
        self._add_grads(flags, is_complete=is_complete)
        return reduced

    def cut_short(self) -> list[int]:
        """The backward has raised on this rank: what all ranks have proposed and this one has not begun to reduce. A
        compiled graph may have raised between two of its reductions. All streams are joined."""
        if self._proposal is None:
            return []
        self._num_issued = self._proposal.num_started
        rest = self._not_issued()
        self._close()
        return rest

    def _not_issued(self) -> list[int]:
        return [] if self.differs() else self._proposed[self._num_issued :]

    def _close(self) -> None:
        self._proposal, self.state = None, State.IDLE

    # --- between two backwards ---

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        """The gradients of these buckets, all of some optimizers, were dropped, or made zeros."""
        for optimizer in {b.optimizer for b in buckets}:
            self._in_sums.pop(optimizer, None)
        self._num_cleared += 1
        self._dropped.clear()
        for bucket in buckets:
            for flags in (self._reduced, *([self.has_grad] if set_to_none else ())):
                flags[bucket.index] = [False] * len(bucket.slots)
        self._close()

    def drop(self, gone: Collection[Where], *, set_to_none: bool) -> None:
        """The gradients of some parameters were dropped, or made zeros. As after `clear`, no later announcement matches
        one that another rank made earlier. If one rank alone drops a gradient that all ranks have reduced, the boundary
        raises. A loop over all parameters counts once, however many of them have a gradient here."""
        for bucket, slot in gone:
            if not self._dropped or (bucket, slot) in self._dropped:
                self._dropped.clear()
                self._num_cleared += 1
            self._dropped.add((bucket, slot))
            if self._reduced[bucket][slot]:
                optimizer = self.plan.buckets[bucket].optimizer
                count, checksum = self._in_sums.get(optimizer, (0, 0))
                what = f"{(bucket, slot)} is dropped after {count} reductions"
                self._in_sums[optimizer] = count, plus(checksum, what)
            self._reduced[bucket][slot] = False
            self.has_grad[bucket][slot] = self.has_grad[bucket][slot] and not set_to_none

    def meet(self, unreduced: Collection[int], *, by_grad: bool) -> Boundary:
        """The boundary: returns once all ranks are at theirs. Raises RankMismatchError where ranks hold sums of other
        gradients."""
        flags, grads = [*self._flags(unreduced=unreduced)[:-1], int(by_grad)], zlib.crc32(repr(self.has_grad).encode())
        while not (met := self.announce(BOUNDARY, flags, grads)).is_same():
            pass  # another rank has more backwards to do
        compare_pasts(self._group, met)
        if not met.has_same_sums():
            raise_sums_differ(self._group, [sums for _, sums in sorted(self._in_sums.items())])
        self._num_cleared = 0
        comes_alone = met.number == self._last_boundary + 1
        self._last_boundary = met.number
        flags = met.flags()
        buckets = self._unreduced_anywhere(flags)
        if buckets:
            self._add_to_sums(met)
        self.has_grad = [[False] * len(flags) for flags in self.has_grad]  # the ranks' flags are complete here
        self._add_grads(flags, is_complete=True)
        touched, is_asked = flags[: -1 - len(self.plan.buckets)], bool(flags[-1])
        return Boundary(touched, buckets, is_asked, met.shows_same_grads(), comes_alone)

    def take_waits(self) -> Waits:
        """Since the last call: how long the issuing thread has waited for announcements, inside of backwards, at their
        ends and at boundaries."""
        waits = {kind: list(seconds) for kind, seconds in self._waits.items()}
        for seconds in self._waits.values():
            seconds.clear()
        return waits

    # --- one exchange ---

    def announce(self, what: str, flags: Sequence[int], grads: int = 0) -> Announcement:
        """Starts the next exchange. ``grads``: a digest of the parameters that show a ``.grad``."""
        self._num_announced += 1
        self._dropped.clear()
        sums = zlib.crc32(repr(sorted(self._in_sums.items())).encode())
        return Announcement(self._group, self._num_announced, what, sums, grads, self._num_cleared, flags, self._waits)

    def _meet_at_end(self, flags: Sequence[int]) -> Announcement:
        """Outside of no_sync returns once all ranks are at the end of such a backward, or at the boundary."""
        while True:
            ended = self.announce(END if self._is_boundary else "end a microbatch", flags)
            if ended.is_same() or not self._is_boundary or ended.all_at_end():
                return ended

    def _flags(self, brings: frozenset[Where] = frozenset(), unreduced: Collection[int] = ()) -> list[int]:
        """By parameter whether this rank has a gradient, by bucket whether it keeps one; and whether a ``param.grad``
        was read."""
        flags = self._accs.touched_flags()
        if brings:
            first = list(itertools.accumulate((len(b.slots) for b in self.plan.buckets), initial=0))
            for bucket, slot in brings:
                flags[first[bucket] + slot] = 1
        return [*flags, *(int(b.index in unreduced) for b in self.plan.buckets), 0]

    def _unreduced_anywhere(self, flags: Sequence[int]) -> list[int]:
        return [k for k, flag in enumerate(flags[-1 - len(self.plan.buckets) : -1]) if flag]

    def _add_grads(self, flags: Sequence[int], *, is_complete: bool) -> None:
        """``is_complete``: all ranks have the same ``flags``, and the sums hold the gradients that they name."""
        items = iter(flags)
        grads = [[bool(next(items)) for _ in slots] for slots in self.has_grad]
        if is_complete:
            self._reduced = grads
        self.has_grad = [
            [a or b for a, b in zip(*pair, strict=True)] for pair in zip(grads, self.has_grad, strict=True)
        ]

    def _add_to_sums(self, announcement: Announcement) -> None:
        """What this announcement reduced is in the sums."""
        for optimizer in range(self.plan.num_optimizers):
            count, checksum = self._in_sums.get(optimizer, (0, 0))
            self._in_sums[optimizer] = count + 1, plus(checksum, f"announcement {announcement.number}")


def _never(*, starts: bool = False) -> bool:
    return False


def describe(buckets: Sequence[int], first_params: Sequence[str]) -> str:
    """What an announcement says of a reduction: the same text on every rank that reduces the same."""
    each = ", ".join(f"{b} ({name}, ...)" for b, name in zip(buckets, first_params, strict=True))
    return f"reduce buckets {each}"
