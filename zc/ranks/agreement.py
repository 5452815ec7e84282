"""All ranks agree on what they reduce before they reduce it.

A collective that ranks enter with different buckets does not fail, it hangs, mixes numbers up, or (gloo) ends the
process. So ranks *announce*, in a few bytes of host memory, what they are about to do, and an exchange of gradients
starts only where all announced the same. `zc/engine/rounds.py` has when a backward announces what.

An announcement is asynchronous: its answer is looked at right before the first launch. Announcements pair by their
order alone, so every rank makes the same number of them between two collectives of the caller's, whatever tasks it
sees. The boundary announces itself in the same way, so a rank that is there early answers one that has more backwards
to do. All ranks see the same rows, so they come to the same answer: a difference is no error, it leaves what was
announced undone on all of them.

Every row also says what a rank's sums hold: gradients that were reduced together and that a rank has dropped since (a
zero_grad of one rank alone) are a RankMismatchError at the boundary, never a part of somebody's sum.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Iterable, Sequence

import torch

from zc.ranks.comm import Group
from zc.ranks.work import Work

Waits = dict[str, list[float]]  # where -> seconds of each
BOUNDARY = "finish the gradients of an update (optimizer.step, clipping, or reading a gradient)"
END = "end a backward"  # that no_sync does not hold back
# digests of what is announced, of the journal, of what the sums hold and of which .grad are shown; how many times
# gradients were dropped; 2 for BOUNDARY, 1 for END, 0 for others
_HEAD = struct.Struct("<5IB")
_WHAT, _JOURNAL, _HELD, _SHOWN, _CLEARED = ((at, at + 4) for at in range(0, 20, 4))
_MEETS = 20


class Announcement:
    """One exchange: every rank's row of four digests and of flags (a byte each).

    Gathered, not reduced to the largest: one hop, where a ring's reduction has 2 (W - 1).
    """

    def __init__(self, agreement: Agreement, number: int, what: str, flags: Sequence[int], shown: int = 0) -> None:
        record, world_size = agreement.group.journal, agreement.group.world_size
        journal = record.checksum() if record is not None and what == BOUNDARY else 0
        held = zlib.crc32(repr(sorted(agreement.held.items())).encode())
        label = f"{agreement.num_cleared}: {what}" if what != BOUNDARY else what
        meets = {BOUNDARY: 2, END: 1}.get(what, 0)
        head = _HEAD.pack(zlib.crc32(label.encode()), journal, held, shown, agreement.num_cleared, meets)
        self._row = bytearray(head + bytes(flags))
        self.number = number
        self._waits, self._kind = agreement.waits, {BOUNDARY: "at the boundary", END: "at its end"}.get(what, "inside")
        self._rows = self._row  # of all ranks, one after another; read as bytes: they are few
        self._work: Work | None = None
        if world_size > 1:
            self._rows = bytearray(world_size * len(self._row))
            row, rows = (torch.frombuffer(part, dtype=torch.uint8) for part in (self._row, self._rows))
            self._work = agreement.group.gather_on_host(rows, row, what)

    def is_same(self) -> bool:
        """Whether all ranks announced the same; waits for the slowest."""
        work = self._work
        if work is not None:  # two threads may be here
            started = time.monotonic()
            work.wait()
            self._work = None
            if not threading.current_thread().name.startswith("zc "):  # a stream's
                self._waits[self._kind].append(time.monotonic() - started)
        return self._is_equal(*_WHAT)

    def all_meet(self) -> bool:
        """Whether every rank is at a boundary, or at the end of a backward that no_sync does not hold back."""
        return all(self._rows[_MEETS :: len(self._row)])

    def has_one_past(self) -> bool:
        """Whether all ranks have had the same exchanges before this one."""
        return self._is_equal(*_JOURNAL)

    def holds_one_sum(self) -> bool:
        """Whether what was reduced together is still in every rank's sum, or in none."""
        return self._is_equal(*_HELD)

    def shows_one_set(self) -> bool:
        """Whether all ranks had a ``.grad`` on the same parameters."""
        return self._is_equal(*_SHOWN)

    def _is_equal(self, start: int, stop: int) -> bool:
        mine, size = self._row[start:stop], len(self._row)
        return all(self._rows[at + start : at + stop] == mine for at in range(0, len(self._rows), size))

    def flags(self) -> list[int]:
        """The largest of each over the ranks whose gradients will be summed with this one's.

        At the end of a backward a rank may differ in how often it has dropped gradients. It has yet to drop those that
        it announces here, or this rank has: their flags count no earlier than at the boundary.
        """
        size, (start, stop) = len(self._row), _CLEARED
        if self._is_equal(start, stop) and self._is_equal(_HEAD.size, size):
            return list(self._row[_HEAD.size :])
        rows = (self._rows[at : at + size] for at in range(0, len(self._rows), size))
        counts = [row[_MEETS] == 2 or row[start:stop] == self._row[start:stop] for row in rows]
        flags = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, size)[:, _HEAD.size :]
        largest: list[int] = flags[torch.tensor(counts)].amax(dim=0).tolist()
        return largest

    def all_flags(self, count: int) -> bool:
        """Whether the first ``count`` flags are set on every rank."""
        size = len(self._row)
        starts = range(_HEAD.size, len(self._rows), size)
        return all(0 not in self._rows[at : at + count] for at in starts)


def _plus(checksum: int, what: str) -> int:
    """A checksum that does not depend on the order of what is added."""
    return (checksum + zlib.crc32(what.encode())) % 2**32


class Agreement:
    """The announcements of one compiled model."""

    def __init__(self, group: Group) -> None:
        self.group = group
        # by optimizer: how many reductions the sums of its parameters hold, and a checksum of which announcements made
        # them and which gradients were dropped since
        self.held: dict[int, tuple[int, int]] = {}
        self.num_cleared = 0  # times that gradients were dropped since the last boundary: no pair across one
        self._dropped: set[tuple[int, int]] = set()  # parameters whose drops count as the last one of num_cleared
        self._count = 0
        self.waits: Waits = {"inside": [], "at its end": [], "at the boundary": []}

    def take_waits(self) -> Waits:
        """Since it was last asked: how long the calling thread has waited for announcements, inside of backwards, at
        their ends and at boundaries."""
        found = {kind: list(seconds) for kind, seconds in self.waits.items()}
        for seconds in self.waits.values():
            seconds.clear()
        return found

    def announce(self, what: str, flags: Sequence[int], shown: int = 0) -> Announcement:
        self._count += 1
        self._dropped.clear()
        return Announcement(self, self._count, what, flags, shown)

    def meet(self, flags: Sequence[int], shown: int = 0) -> Announcement:
        """The boundary: returns once all ranks are at theirs."""
        while not (made := self.announce(BOUNDARY, flags, shown)).is_same():
            pass  # another rank has more backwards to do
        self._compare_journals(made)
        if not made.holds_one_sum():
            self._tell_apart()
        self.num_cleared = 0
        return made

    def meet_at_end(self, flags: Sequence[int]) -> Announcement:
        """The end of a backward that no_sync does not hold back: returns once all ranks are at such an end, or at the
        boundary."""
        while True:
            made = self.announce(END, flags)
            if made.is_same() or made.all_meet():
                return made

    def hold(self, number: int, num_optimizers: int) -> None:
        """What this announcement reduced is in the sums."""
        for optimizer in range(num_optimizers):
            count, checksum = self.held.get(optimizer, (0, 0))
            self.held[optimizer] = count + 1, _plus(checksum, f"announcement {number}")

    def cleared(self, optimizers: Iterable[int]) -> None:
        """All gradients of these optimizers were dropped on this rank."""
        for optimizer in optimizers:
            self.held.pop(optimizer, None)
        self.num_cleared += 1
        self._dropped.clear()

    def dropped(self, optimizer: int, where: tuple[int, int], *, is_reduced: bool) -> None:
        """One gradient of this optimizer was dropped on this rank; ``is_reduced``: after all ranks had reduced it. A
        loop over all parameters counts once, however many of them have a gradient here."""
        if not self._dropped or where in self._dropped:
            self._dropped.clear()
            self.num_cleared += 1
        self._dropped.add(where)
        if is_reduced:
            count, checksum = self.held.get(optimizer, (0, 0))
            self.held[optimizer] = count, _plus(checksum, f"{where} is dropped after {count} reductions")

    def _tell_apart(self) -> None:
        held = [count_and_sum for _, count_and_sum in sorted(self.held.items())] or [(0, 0)]
        lines = [f"{count} reduction(s), checksum {checksum:08x}" for count, checksum in held]
        self.group.same_everywhere(
            "what the gradients hold: some rank has cleared its gradients (zero_grad, param.grad = None or .zero_(), "
            "or a backward that raised) and others have not; what they hold",
            lines,
            "Clear them on all ranks or on none, whatever each rank's own loss says",
        )

    def _compare_journals(self, boundary: Announcement) -> None:
        """Raises RankMismatchError on every rank where an exchange went through that was not everyone's: a norm here,
        a largest value there (zc/ranks/watch.py)."""
        journal = self.group.journal
        if journal is None:
            return
        if not boundary.has_one_past():
            so = "Let every rank make the same calls between two updates (norms, step, loading of states), in one order"
            self.group.same_everywhere("what was exchanged since the last update", journal.lines(), so)
        journal.agreed()
