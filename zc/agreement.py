"""All ranks agree on what they reduce before they reduce it (INVARIANTS I7).

A collective that ranks enter with different buckets does not fail, it hangs, mixes numbers up, or (gloo) ends the
process. So before the reductions of a schedule each rank *announces* their buckets, in a few bytes of host memory, and
the exchange that carries them starts only where all announced the same. The announcement is asynchronous: the comm
stream looks at its answer right before the first launch, the backward's compute does not wait for it.

Where announcements differ, as when ranks see different tasks in one iteration, stage 1 goes on: its sums stay partial
and the boundary reduces them. The boundary announces itself in the same way, so a rank that is there early waits for
one that has more backwards to do. Stage 2 has no place for a partial sum, so there a difference is a RankMismatchError
on every rank, with what each was about to do.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch

from zc.comm import Group
from zc.errors import RankMismatchError
from zc.rank_check import Work

BOUNDARY = "finish the gradients of an update (optimizer.step, clipping, or reading a gradient)"


class Announcement:
    """One exchange: every rank's row of digest, journal (4 bytes each) and flags (a byte each); ``journal`` is the
    checksum of what this rank has exchanged before.

    Gathered, not reduced to the largest: one hop, where a ring's reduction has 2 (W - 1).
    """

    def __init__(self, agreement: Agreement, number: int, what: str, flags: Sequence[int]) -> None:
        check, world_size = agreement.group.check, agreement.group.world_size
        journal = check.checksum() if check is not None and what == BOUNDARY else 0
        self._row = bytearray(struct.pack("<II", zlib.crc32(what.encode()), journal) + bytes(flags))
        self.agreement, self.number, self.what = agreement, number, what
        self._rows = self._row  # of all ranks, one after another; read as bytes: they are few
        self._work: Work | None = None
        if world_size > 1:
            self._rows = bytearray(world_size * len(self._row))
            row, rows = (torch.frombuffer(part, dtype=torch.uint8) for part in (self._row, self._rows))
            self._work = agreement.group.gather_on_host(rows, row, what)

    def is_same(self) -> bool:
        """Whether all ranks announced the same; waits for the slowest. False, without a wait, once stage 2 has
        failed."""
        if self.agreement.has_failed:
            return False
        if self._work is not None:
            self._work.wait()
            self._work = None
            if not self._is_equal(0, 4):
                self.agreement.differed(self)
        return self._is_equal(0, 4)

    def has_one_past(self) -> bool:
        """Whether all ranks have had the same exchanges before this one."""
        return self._is_equal(4, 8)

    def _is_equal(self, start: int, stop: int) -> bool:
        mine, size = self._row[start:stop], len(self._row)
        return all(self._rows[at + start : at + stop] == mine for at in range(0, len(self._rows), size))

    def flags(self) -> list[int]:
        """The largest of each over the ranks."""
        if self._is_equal(8, len(self._row)):
            return list(self._row[8:])
        rows = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, len(self._row))
        largest: list[int] = rows[:, 8:].amax(dim=0).tolist()
        return largest


class Agreement:
    """The announcements of one compiled model. ``defers``: a difference leaves partial sums (stage 1), it is no
    error."""

    def __init__(self, group: Group, numel_flags: int, *, defers: bool) -> None:
        self.group, self.numel_flags, self._defers = group, numel_flags, defers
        self.has_failed = False
        self._failed: Announcement | None = None
        self._count = 0

    def announce(self, what: str, flags: Sequence[int] | None = None) -> Announcement:
        """Raises RankMismatchError where an earlier announcement has failed."""
        self.check()
        self._count += 1
        return Announcement(self, self._count, what, flags if flags is not None else [0] * self.numel_flags)

    def meet(self, flags: Sequence[int]) -> list[int]:
        """The boundary: returns once all ranks are at theirs. The largest of each flag over the ranks."""
        while True:
            made = self.announce(BOUNDARY, flags)
            if made.is_same():
                self._compare_journals(made)
                return made.flags()
            self.check()

    def _compare_journals(self, boundary: Announcement) -> None:
        """Raises RankMismatchError on every rank where an exchange went through that was not everyone's: a norm here,
        a largest value there (zc/rank_check.py)."""
        check = self.group.check
        if check is None:
            return
        if not boundary.has_one_past():
            self.group.same_everywhere("what was exchanged since the last update", check.lines())
        check.agreed()

    def differed(self, announcement: Announcement) -> None:
        """Called by whichever thread looks first; the error is raised in the program's own, by `check`."""
        if not self._defers and self._failed is None:
            assert self.group.check is not None, "with one rank nobody differs"
            self.group.check.tell(f"announced/{announcement.number}", announcement.what)
            self._failed, self.has_failed = announcement, True

    def check(self) -> None:
        """Raises RankMismatchError with what each rank was about to do where they differed."""
        failed, check = self._failed, self.group.check
        if failed is None or check is None:
            return
        told = check.told(f"announced/{failed.number}")
        plans = [what or "do something else, which it has not said" for what in told]
        shown = "; ".join(f"rank {rank} was about to {what}" for rank, what in enumerate(plans))
        raise RankMismatchError(
            f"stage 2 reduces in every backward, so all ranks must reduce the same buckets in the same order, and they "
            f"differ: {shown}. Give every rank the same tasks in each backward, or use stage=1, which reduces at the "
            "step"
        )


def describe(buckets: Sequence[int], first_params: Sequence[str]) -> str:
    """What an announcement says of a reduction: the same text on every rank that reduces the same."""
    shown = ", ".join(f"{b} ({name}, ...)" for b, name in zip(buckets, first_params, strict=True))
    return f"reduce buckets {shown}"
