"""All ranks agree on what they reduce before they reduce it.

A collective that ranks enter with different buckets does not fail, it hangs, mixes numbers up, or (gloo) ends the
process. So ranks *announce*, in a few bytes of host memory, what they are about to do, and an exchange of gradients
starts only where all announced the same. `zc/engine/rounds.py` has when a backward announces what.

An announcement is asynchronous: the comm stream looks at its answer right before the first launch. Announcements pair
by their order alone, so every rank makes the same number of them between two collectives of the caller's, whatever
tasks it sees. The boundary announces itself in the same way, so a rank that is there early answers one that has more
backwards to do.

Every row also says what a rank's sums hold: gradients that were reduced together and that a rank has dropped since (a
zero_grad of one rank alone) are a RankMismatchError at the boundary, never a part of somebody's sum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

import torch

from zc.errors import RankMismatchError
from zc.ranks.comm import Group
from zc.ranks.watch import Work

BOUNDARY = "finish the gradients of an update (optimizer.step, clipping, or reading a gradient)"
_HEAD = struct.Struct("<4I")  # digests: what is announced, the journal, what the sums hold, which .grad are shown
_WHAT, _JOURNAL, _HELD, _SHOWN = ((at, at + 4) for at in range(0, _HEAD.size, 4))


class Announcement:
    """One exchange: every rank's row of four digests and of flags (a byte each).

    Gathered, not reduced to the largest: one hop, where a ring's reduction has 2 (W - 1).
    """

    def __init__(self, agreement: Agreement, number: int, what: str, flags: Sequence[int], shown: int = 0) -> None:
        check, world_size = agreement.group.check, agreement.group.world_size
        journal = check.checksum() if check is not None and what == BOUNDARY else 0
        held = zlib.crc32(repr(sorted(agreement.held.items())).encode())
        label = f"{agreement.num_cleared}: {what}" if what != BOUNDARY else what
        self._row = bytearray(_HEAD.pack(zlib.crc32(label.encode()), journal, held, shown) + bytes(flags))
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
            if not self._is_equal(*_WHAT):
                self.agreement.differed(self)
        return self._is_equal(*_WHAT)

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
        """The largest of each over the ranks."""
        if self._is_equal(_HEAD.size, len(self._row)):
            return list(self._row[_HEAD.size :])
        rows = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, len(self._row))
        largest: list[int] = rows[:, _HEAD.size :].amax(dim=0).tolist()
        return largest

    def all_flags(self, count: int) -> bool:
        """Whether the first ``count`` flags are set on every rank."""
        size = len(self._row)
        starts = range(_HEAD.size, len(self._rows), size)
        return all(0 not in self._rows[at : at + count] for at in starts)


class Agreement:
    """The announcements of one compiled model. ``defers``: a difference leaves partial sums (stage 1), it is no
    error."""

    def __init__(self, group: Group, numel_flags: int, *, defers: bool) -> None:
        self.group, self.numel_flags, self.defers = group, numel_flags, defers
        self.has_failed = False
        # by optimizer: numbers of the announcements whose reductions the sums of its parameters hold
        self.held: dict[int, list[int]] = {}
        self.num_cleared = 0  # times that gradients were dropped since the last boundary: no pair across one
        self._failed: Announcement | None = None
        self._count = 0

    def announce(self, what: str, flags: Sequence[int] | None = None, shown: int = 0) -> Announcement:
        """Raises RankMismatchError where an earlier announcement has failed."""
        self.check()
        self._count += 1
        flags = flags if flags is not None else [0] * self.numel_flags
        return Announcement(self, self._count, what, flags, shown)

    def meet(self, flags: Sequence[int], shown: int = 0) -> Announcement:
        """The boundary: returns once all ranks are at theirs."""
        while True:
            made = self.announce(BOUNDARY, flags, shown)
            if made.is_same():
                self._compare_journals(made)
                if not made.holds_one_sum():
                    self._tell_apart()
                self.num_cleared = 0
                return made
            self.check()

    def hold(self, numbers: Sequence[int], num_optimizers: int) -> None:
        """What these announcements reduced is in the sums."""
        for optimizer in range(num_optimizers if numbers else 0):
            self.held.setdefault(optimizer, []).extend(numbers)

    def cleared(self, optimizers: Iterable[int], *, had_any: bool) -> None:
        """The gradients of these optimizers were dropped on this rank, if it ``had_any``."""
        dropped = [bool(self.held.pop(optimizer, None)) for optimizer in optimizers]
        self.num_cleared += had_any or any(dropped) or self.defers

    def _tell_apart(self) -> None:
        found = [numbers for _, numbers in sorted(self.held.items())] or [[]]
        lines = [f"{len(numbers)} reduction(s) (announcements {numbers[:8]})" for numbers in found]
        self.group.same_everywhere(
            "what the gradients hold: some rank has cleared its gradients (zero_grad, or a backward that raised) and "
            "others have not; what they hold",
            lines,
        )

    def _compare_journals(self, boundary: Announcement) -> None:
        """Raises RankMismatchError on every rank where an exchange went through that was not everyone's: a norm here,
        a largest value there (zc/ranks/watch.py)."""
        check = self.group.check
        if check is None:
            return
        if not boundary.has_one_past():
            self.group.same_everywhere("what was exchanged since the last update", check.lines())
        check.agreed()

    def differed(self, announcement: Announcement) -> None:
        """Called by whichever thread looks first; the error is raised in the program's own, by `check`."""
        if not self.defers and self._failed is None:
            assert self.group.check is not None, "with one rank nobody differs"
            self.group.check.tell(f"announced/{announcement.number}", announcement.what)
            self._failed, self.has_failed = announcement, True

    def check(self) -> None:
        """Raises RankMismatchError with what each rank was about to do where they differed."""
        failed, check = self._failed, self.group.check
        if failed is None or check is None:
            return
        check.on_failure()  # a later announcement of this rank may have no partner: its group must not be waited for
        told = check.told(f"announced/{failed.number}")
        plans = [what or "do something else, which it has not said" for what in told]
        shown = "; ".join(f"rank {rank} was about to {what}" for rank, what in enumerate(plans))
        raise RankMismatchError(
            f"stage 2 reduces in every backward, so all ranks must reduce the same buckets in the same order, and they "
            f"differ: {shown}. Give every rank the same tasks in each backward, or use stage=1, which reduces at the "
            "step"
        )
