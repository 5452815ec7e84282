"""What ranks tell each other around one backward and before an update, so that all of them reduce the same.

A collective that ranks enter with different buckets does not fail: it hangs, mixes numbers up, or (gloo) ends the
process. So ranks *announce*, in a few bytes of host memory, what they are about to do. docs/design.md has a diagram.

**A backward begins.** Each rank proposes, in one announcement, the buckets that this backward should reduce, in order:
those of the compiled graph that begins it, or those of the last backward that began in the same way.

- *All ranks proposed the same*: they reduce these buckets in that order, each as often as it was proposed. Buckets that
  are incomplete when the backward ends are reduced then, with zeros where no gradient came.
- *Proposals differ* (other tasks, other branches, a graph broken on one rank alone): nothing is reduced while this
  backward runs.

Gradients beyond the agreed order are reduced later. Stage 1 adds them to the partial sum in its accumulator, which the
boundary reduces. Stage 2 deposits whole gradients, by reference, and reduces them in plan order at the end of the
backward; if ranks have different numbers of backwards, at the boundary.

**A backward ends.** Ranks exchange which parameters have a gradient. One that only another rank used gets its
``.grad``, too, as in DDP with find_unused_parameters. Ranks skip this if all of them said at the beginning that their
compiled graphs bring all gradients. Outside of no_sync a rank waits until all ranks are at such an end or at the
boundary: they may reach it after different numbers of microbatches.

**The boundary** is the point before an update. A rank that is early answers the backwards that others still have.

The k-th announcement on one rank matches the k-th on every other, so between two of the user's collectives all ranks
make equally many. An announcement is asynchronous: ranks read its answer right before the first reduction. All ranks
see the same rows and come to the same answer: a difference is no error, and a wrong guess costs overlap, no number. In
stage 1 on a CPU only the streams of reductions wait for the answer; else the host does, once per backward, as late as
it can.

Each row also says what a rank's sums hold. If one rank has dropped gradients that all had reduced together, the
boundary raises RankMismatchError, and no part of them enters another rank's sum.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from zc.engine import param_checks
from zc.engine.agreement import BOUNDARY, END, Agreement
from zc.engine.ledger import Where
from zc.errors import ZcError
from zc.planning.plan import Bucket, Plan

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.engine.operations import MayReduce
    from zc.ranks.exchanges import Work
    from zc.ranks.group import Group


# Five numbers: checksums of the text, of the journal, of which gradients the sums contain and of which parameters show
# a .grad; and how often gradients were dropped. One byte: 2 for BOUNDARY, 1 for END, 0 for others. Behind it the totals
# of zc.count (zc/engine/agreement.py).
_HEAD = struct.Struct("<5IB")
_WHAT, _PAST, _SUMS, _GRADS, _NUM_CLEARED = ((at, at + 4) for at in range(0, 20, 4))
_IS_END = 20


@dataclass
class _Proposal:
    """What this rank has announced for the backward that runs, and how far that backward is."""

    announcement: Announcement
    source: str  # a program or "hooks": what brought the first gradient
    buckets: list[int]  # in the order in which they are to be reduced
    is_boundary: bool  # no_sync does not hold this backward back
    full: list[int] = field(default_factory=list)  # buckets that were full so far, in order
    num_issued: int = 0  # of `buckets`, those whose reduction is issued, or about to be

    def not_issued(self) -> list[int]:
        """The buckets that all ranks have proposed and this one has not reduced."""
        return self.buckets[self.num_issued :] if self.announcement.is_same() else []


class Announcements(Agreement):
    """The protocol of one compiled model on several ranks. The streams of reductions, comm and comm.host, see the
    `Announcement` of their backward alone."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._group, self._ledger = core.group, core.ledger
        self._reduced = self._no_grads()  # those that are in every rank's sums
        self.proposal: _Proposal | None = None
        self._last_order: dict[str, list[int]] = {}  # by source: the buckets that came in the last backward
        self._names: tuple[Plan, list[int], str] | None = None  # of the buckets of the last proposal, in that plan
        self._first = self._firsts()
        self._num_announced = self._last_boundary = 0
        # by optimizer: how many reductions the sums of its parameters hold, and a checksum of which announcements made
        # them and which gradients were dropped since
        self._in_sums: dict[int, tuple[int, int]] = {}

    def grow(self) -> None:
        super().grow()
        self._reduced += self._no_grads()[len(self._reduced) :]
        self._last_order.clear()
        self._first = self._firsts()

    def _firsts(self) -> list[int]:
        """By bucket: the number of its first parameter, in the order of the plan."""
        return list(itertools.accumulate(map(len, self.has_grad), initial=0))

    # --- a backward ---

    def begin(self, source: str, buckets: Sequence[int] | None, grads: frozenset[Where], *, is_boundary: bool) -> None:
        records = self._accs.plan.buckets
        proposed = self._last_order.get(source, list(range(len(records)) if buckets is None else buckets))
        if self._names is None or self._names[0] is not self._accs.plan or self._names[1] != proposed:
            names = (f"{b} ({records[b].slots[0].name}, ...)" for b in proposed)
            self._names = self._accs.plan, proposed, ", ".join(names)
        what = f"reduce buckets {self._names[2]}{'' if is_boundary else ' in a microbatch'}"
        self.proposal = _Proposal(self.announce(what, self._flags(grads)), source, proposed, is_boundary)

    def permission(self, buckets: Sequence[int]) -> MayReduce | None:
        """What waits for the other ranks' proposals."""
        if not buckets:
            return None
        proposal = self.proposal
        if proposal is None:
            return _never
        is_in_order = proposal.num_issued == len(proposal.full)  # so far
        proposal.full += buckets
        if not is_in_order or proposal.full != proposal.buckets[: len(proposal.full)]:
            return _never
        proposal.num_issued += len(buckets)
        return proposal.announcement.may_reduce

    @property
    def agreed(self) -> MayReduce | None:
        """It counts reductions in the open backward, so that `cut_short` knows them."""
        return self.proposal.announcement.may_reduce if self.proposal is not None else None

    def differs(self) -> bool:
        return self.proposal is not None and not self.proposal.announcement.is_same()

    def rest(self, unreduced: Collection[int]) -> list[int]:
        """What all ranks have proposed and this one has not reduced. The next backward that begins in the same way
        proposes what this one had."""
        proposal = self.proposal
        if proposal is None:
            return []
        issued = proposal.buckets[: proposal.num_issued] if proposal.announcement.is_same() else []
        # partial buckets, and what came again after its reduction
        late = [k for k in sorted(unreduced) if proposal.full.count(k) == issued.count(k)]
        self._last_order[proposal.source] = proposal.full + late
        return proposal.not_issued()

    def end(self, unreduced: Collection[int]) -> list[int]:
        """After a backward outside of no_sync `has_grad` is the same on all ranks."""
        proposal, self.proposal = self.proposal, None
        reduced, flags = list[int](), self._accs.touched_flags()
        in_sums: Collection[int] = ()  # buckets whose gradients are all in every rank's sums
        is_complete = False  # the flags are those of all ranks
        if proposal is not None:
            begun = proposal.announcement
            is_agreed = begun.is_same()
            if is_agreed:
                self._note_in_sums(f"announcement {begun.number}")
                in_sums = set(range(len(self._accs.plan.buckets))).difference(unreduced)
            is_complete = proposal.is_boundary and begun.all_flags(len(flags))
            if not is_agreed or (proposal.is_boundary and not is_complete):
                ended = self._announce_end(self._flags(unreduced=unreduced), is_boundary=proposal.is_boundary)
                flags, is_complete = ended.flags(), proposal.is_boundary and ended.is_same()
                if ended.is_same():
                    reduced, _ = self._split(flags)
                if reduced:
                    self._note_in_sums(f"announcement {ended.number}")
                    in_sums = {*in_sums, *reduced}
        if is_complete:  # all ranks have the same flags, and the sums hold the gradients that they name
            self._reduced = self._by_bucket(flags, self._reduced)
        self._add_grads(flags)
        is_told = self._reduced == self.has_grad
        for bucket in () if is_told else in_sums:  # inside no_sync another rank's are there, too, and not known here
            pairs = zip(self._reduced[bucket], self.has_grad[bucket], strict=True)
            self._reduced[bucket] = [before or has_grad for before, has_grad in pairs]
        return reduced

    def cut_short(self) -> list[int]:
        """A compiled graph may have raised between two of its reductions."""
        proposal, self.proposal = self.proposal, None
        if proposal is None:
            return []
        proposal.num_issued = proposal.announcement.num_started
        return proposal.not_issued()

    # --- between two backwards ---

    def clear(self, buckets: Sequence[Bucket], *, set_to_none: bool) -> None:
        super().clear(buckets, set_to_none=set_to_none)
        for bucket in buckets:
            self._in_sums.pop(bucket.optimizer, None)
            self._reduced[bucket.index] = [False] * len(bucket.slots)
        self.proposal = None

    def drop(self, dropped: Collection[Where], *, set_to_none: bool) -> list[int]:
        """As after `clear`, no later announcement matches one that another rank made earlier. If one rank alone drops a
        gradient that all ranks have reduced, the boundary raises."""
        for bucket, slot in dropped:
            if self._reduced[bucket][slot]:
                self._note_in_sums(f"{(bucket, slot)} is dropped", bucket)
            self._reduced[bucket][slot] = False
        return super().drop(dropped, set_to_none=set_to_none)

    def assign(self, assigned: Collection[Where]) -> None:
        """A rank that does so alone is named at the next boundary."""
        for bucket, slot in assigned:
            self._note_in_sums(f"{(bucket, slot)} is assigned", bucket)
        super().assign(assigned)

    def _note_in_sums(self, what: str, bucket: int | None = None) -> None:
        """The sums of an optimizer's gradients hold something else: that of a parameter in ``bucket`` is not what the
        reductions made of it, and other ranks are to do the same. None: an announcement has reduced into all sums."""
        plan, is_reduced = self._accs.plan, bucket is None
        for optimizer in range(plan.num_optimizers) if bucket is None else (plan.buckets[bucket].optimizer,):
            count, checksum = self._in_sums.get(optimizer, (0, 0))
            added = zlib.crc32(f"{what} after {count} reductions".encode())
            self._in_sums[optimizer] = count + is_reduced, (checksum + added) % 2**32

    def boundary(self, unreduced: Collection[int], *, by_grad: bool, is_last: bool) -> tuple[list[int], bool]:
        """From then on the accumulators know which parameters have a gradient on any rank. Raises RankMismatchError if
        the sums of some ranks hold other gradients; ZcError if a rank has read a ``param.grad``, and not all had one on
        the same parameters."""
        own_grads, own_flags = self.has_grad, self._flags(unreduced=unreduced)
        own_flags[-1] = by_grad
        grads = zlib.crc32(bytes(itertools.chain.from_iterable(own_grads)))
        while not (announcement := self.announce(BOUNDARY, own_flags, grads)).is_same():
            pass  # another rank has more backwards to do
        self._compare_pasts(announcement)
        flags = announcement.flags()
        buckets, is_by_grad = self._split(flags)
        if is_by_grad and not announcement.is_equal(_GRADS):  # on all ranks, and nothing has changed
            raise ZcError(param_checks.grads_differ(self._accs.plan, own_grads, self._by_bucket(flags, own_grads)))
        if is_last:
            self.token_counts.agree(announcement.totals())
        self._num_cleared = 0
        is_alone = announcement.number == self._last_boundary + 1
        self._last_boundary = announcement.number
        if buckets:
            self._note_in_sums(f"announcement {announcement.number}")
        # the flags are those of all ranks here
        self.has_grad = self._by_bucket(flags, self.has_grad)
        self._reduced = self._by_bucket(flags, self._reduced)
        self._accs.touched = self._by_bucket(flags, self._accs.touched)
        return buckets, is_alone

    def _compare_pasts(self, boundary: Announcement) -> None:
        """Raises RankMismatchError on every rank if exchanges completed although ranks made different ones: one a norm,
        another a largest value (zc/ranks/watch.py); or if the sums of some ranks hold other gradients."""
        journal = self._group.journal
        if journal is not None and not boundary.is_equal(_PAST):
            self._group.same_everywhere(
                "what was exchanged since the last update",
                journal.lines(),
                "Let every rank make the same calls between two updates (norms, step, loading of states), in one order",
            )
        if not boundary.is_equal(_SUMS):
            raise_sums_differ(self._group, [sums for _, sums in sorted(self._in_sums.items())])
        if journal is not None:
            journal.begin_update()

    # --- one exchange ---

    def announce(self, what: str, flags: bytearray, grads: int = 0) -> Announcement:
        """Starts the next exchange. ``grads``: a digest of the parameters that show a ``.grad``."""
        self._num_announced += 1
        self._dropped.clear()
        self._group.record_call(what)
        sums = zlib.crc32(repr(sorted(self._in_sums.items())).encode())
        return Announcement(
            self._group, self._num_announced, what, sums, grads, self._num_cleared, flags,
            self._ledger.step.waits, self.token_counts.row(),
        )  # fmt: skip

    def _announce_end(self, flags: bytearray, *, is_boundary: bool) -> Announcement:
        """Outside of no_sync returns once all ranks are at the end of such a backward, or at the boundary."""
        while True:
            ended = self.announce(END if is_boundary else "end a microbatch", flags)
            if ended.is_same() or not is_boundary or ended.all_at_end():
                return ended

    def _flags(self, grads: Collection[Where] = (), unreduced: Collection[int] = ()) -> bytearray:
        """By parameter whether this rank has a gradient; by bucket whether it still has to reduce one; and whether a
        ``param.grad`` was read."""
        num = self._first[-1]
        has_all = len(grads) == num
        flags = bytearray((b"\1" * num if has_all else self._accs.touched_flags()) + bytes(len(self.has_grad) + 1))
        for bucket, slot in () if has_all else grads:
            flags[self._first[bucket] + slot] = 1
        for bucket in unreduced:
            flags[num + bucket] = 1
        return flags

    def _split(self, flags: bytes) -> tuple[list[int], bool]:
        """What `_flags` has behind the parameters: the buckets that some rank still has to reduce, by number, and
        whether a ``param.grad`` was read. (`_by_bucket` has the parameters.)"""
        start = -1 - len(self._accs.plan.buckets)
        return [k for k, flag in enumerate(flags[start:-1]) if flag], bool(flags[-1])


def _never(*, starts: bool = False) -> bool:
    return False


class Announcement:
    """One exchange: the rows of all ranks, each a few checksums and then flags of one byte.

    Rows are gathered, not reduced to the largest: that is one hop, where a ring's reduction has 2 (W - 1).
    """

    def __init__(
        self, group: Group, number: int, text: str, sums: int, grads: int, num_cleared: int, flags: bytearray,
        waits: dict[str, list[float]], totals: bytes,
    ) -> None:  # fmt: skip
        """Starts it.

        Args:
            text: in words, what this rank announces; equal on all ranks that announce the same.
            sums, grads: checksums of which gradients the sums contain, and of the parameters that show a ``.grad``.
            num_cleared: how often gradients were dropped since the last boundary.
            waits: gets the seconds for which the issuing thread waits for the answer, by kind of announcement.
            totals: of zc.count; as many bytes on all ranks.
        """
        past = group.journal.checksum() if group.journal is not None and text == BOUNDARY else 0
        label = text if text == BOUNDARY else f"{num_cleared}: {text}"
        kind = {BOUNDARY: 2, END: 1}.get(text, 0)
        head = _HEAD.pack(zlib.crc32(label.encode()), past, sums, grads, num_cleared, kind)
        self.number, self._row = number, head + totals + flags
        self._at_flags = len(head) + len(totals)
        self._kind = {BOUNDARY: "at the boundary", END: "at its end"}.get(text, "inside")
        self._waits = waits  # only the thread that issues schedules adds to it
        # Not known before the answer: whether all ranks announced the same, and whether their rows are equal in all.
        self._is_same = self._is_alike = False
        # Reductions of this backward. The thread of the stream that starts them counts; the issuing thread reads it
        # after joining the streams.
        self.num_started = 0
        # The exchange fills the rows of all ranks until `_work` is done. Then both threads read them.
        self._rows = bytearray(group.world_size * len(self._row))
        # The issuing thread and that of a stream may both wait for it, and then set it to None.
        self._work: Work | None = group.gather_on_host(self._rows, self._row, text)

    def may_reduce(self, *, starts: bool = False) -> bool:
        """`zc.engine.operations.MayReduce`."""
        is_same = self.is_same()
        self.num_started += is_same and starts
        return is_same

    def is_same(self) -> bool:
        """Whether all ranks announced the same; waits for the slowest."""
        work = self._work
        if work is not None:
            started = time.monotonic()
            work.wait()
            # one comparison where nothing differs, as in most steps; both threads come to the same result
            self._is_alike = self._rows == self._row * (len(self._rows) // len(self._row))
            self._is_same = self.is_equal(_WHAT)
            self._work = None
            if not threading.current_thread().name.startswith("zc "):  # a stream's
                self._waits[self._kind].append(time.monotonic() - started)
        return self._is_same

    def all_at_end(self) -> bool:
        """Whether every rank is at the boundary, or at the end of a backward outside of no_sync."""
        return all(self._rows[_IS_END :: len(self._row)])

    def flags(self) -> bytes:
        """The largest of each flag over the ranks whose gradients will be summed with this one's.

        At the end of a backward a rank may have dropped gradients more or less often than this one. Then one of the two
        has yet to drop the gradients that it announces here, so such a rank's flags do not count before the boundary.
        """
        size, (start, stop) = len(self._row), _NUM_CLEARED
        if self.is_equal(_NUM_CLEARED) and self.is_equal((self._at_flags, size)):
            return self._row[self._at_flags :]
        rows = (self._rows[at : at + size] for at in range(0, len(self._rows), size))
        counts = [row[_IS_END] == 2 or row[start:stop] == self._row[start:stop] for row in rows]
        flags = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, size)[:, self._at_flags :]
        return bytes(flags[torch.tensor(counts, device="cpu")].amax(dim=0).tolist())

    def totals(self) -> list[bytes]:
        """The totals of all ranks."""
        starts = range(_HEAD.size, len(self._rows), len(self._row))
        return [bytes(self._rows[at : at + self._at_flags - _HEAD.size]) for at in starts]

    def all_flags(self, count: int) -> bool:
        """Whether the first ``count`` flags are set on every rank."""
        starts = range(self._at_flags, len(self._rows), len(self._row))
        return all(0 not in self._rows[at : at + count] for at in starts)

    def is_equal(self, part: tuple[int, int]) -> bool:
        """Whether these bytes are the same in the rows of all ranks: `_PAST`, and so on. After `is_same`."""
        (start, stop), size = part, len(self._row)
        expected = self._row[start:stop]
        return self._is_alike or all(
            self._rows[at + start : at + stop] == expected for at in range(0, len(self._rows), size)
        )


def raise_sums_differ(group: Group, sums: Sequence[tuple[int, int]]) -> None:
    """Raises RankMismatchError. ``sums``: of each optimizer, the number of reductions in its sums, and a checksum."""
    group.same_everywhere(
        "what the gradients hold: some rank has cleared its gradients (zero_grad, param.grad = None or .zero_(), "
        "or a backward that raised) and others have not; what they hold",
        [f"{count} reduction(s), checksum {checksum:08x}" for count, checksum in sums or [(0, 0)]],
        "Clear them on all ranks or on none, and by optimizer.zero_grad(): where a rank had no gradient yet, zc can't "
        "see that its .grad was set to None",
    )
