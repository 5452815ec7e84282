"""One exchange in which ranks tell each other what they will do next. `zc.engine.announcements` has the protocol."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zc.ranks.exchanges import Work
    from zc.ranks.group import Group

BOUNDARY = "finish the gradients of an update (optimizer.step, clipping, or reading a gradient)"
END = "end a backward"  # outside of no_sync
# Five numbers: checksums of the text, of the journal, of which gradients the sums contain and of which parameters show
# a .grad; and how often gradients were dropped. One byte: 2 for BOUNDARY, 1 for END, 0 for others. Behind it the totals
# of zc.count (zc/engine/token_counts.py).
_HEAD = struct.Struct("<5IB")
_WHAT, _PAST, _SUMS, _GRADS, _NUM_CLEARED = ((at, at + 4) for at in range(0, 20, 4))
_IS_END = 20


class Announcement:
    """One exchange: the rows of all ranks, each a few checksums and then flags of one byte.

    Rows are gathered, not reduced to the largest: that is one hop, where a ring's reduction has 2 (W - 1).
    """

    def __init__(
        self, group: Group, number: int, text: str, sums: int, grads: int, num_cleared: int, flags: Sequence[int],
        waits: dict[str, list[float]], totals: bytes = b"",
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
        self.number, self._row = number, bytearray(head + totals + bytes(flags))
        self._at_flags = len(head) + len(totals)
        self._kind = {BOUNDARY: "at the boundary", END: "at its end"}.get(text, "inside")
        self._waits = waits  # only the thread that issues schedules adds to it
        # The exchange fills the rows of all ranks until `_work` is done. Then both threads read them.
        self._rows = self._row
        # The issuing thread and the comm stream's may both wait for it, and then set it to None.
        self._work: Work | None = None
        self._is_same: bool | None = None  # not known before that
        # Reductions of this backward. The comm stream's thread counts; the issuing thread reads it after joining the
        # streams.
        self.num_started = 0
        if group.world_size > 1:
            self._rows = bytearray(group.world_size * len(self._row))
            sent, received = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (self._row, self._rows))
            self._work = group.gather_on_host(received, sent, text)

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
            self._work = None
            if not threading.current_thread().name.startswith("zc "):  # a stream's
                self._waits[self._kind].append(time.monotonic() - started)
        if self._is_same is None:
            self._is_same = self._is_equal(*_WHAT)
        return self._is_same

    def all_at_end(self) -> bool:
        """Whether every rank is at the boundary, or at the end of a backward outside of no_sync."""
        return all(self._rows[_IS_END :: len(self._row)])

    def flags(self) -> list[int]:
        """The largest of each flag over the ranks whose gradients will be summed with this one's.

        At the end of a backward a rank may have dropped gradients more or less often than this one. Then one of the two
        has yet to drop the gradients that it announces here, so such a rank's flags do not count before the boundary.
        """
        size, (start, stop) = len(self._row), _NUM_CLEARED
        if self._is_equal(start, stop) and self._is_equal(self._at_flags, size):
            return list(self._row[self._at_flags :])
        rows = (self._rows[at : at + size] for at in range(0, len(self._rows), size))
        counts = [row[_IS_END] == 2 or row[start:stop] == self._row[start:stop] for row in rows]
        flags = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, size)[:, self._at_flags :]
        largest: list[int] = flags[torch.tensor(counts, device="cpu")].amax(dim=0).tolist()
        return largest

    def totals(self) -> list[bytes]:
        """The totals of all ranks."""
        starts = range(_HEAD.size, len(self._rows), len(self._row))
        return [bytes(self._rows[at : at + self._at_flags - _HEAD.size]) for at in starts]

    def all_flags(self, count: int) -> bool:
        """Whether the first ``count`` flags are set on every rank."""
        starts = range(self._at_flags, len(self._rows), len(self._row))
        return all(0 not in self._rows[at : at + count] for at in starts)

    def has_same_past(self) -> bool:
        """Whether all ranks have had the same exchanges before this one."""
        return self._is_equal(*_PAST)

    def has_same_sums(self) -> bool:
        """Whether the gradients that were reduced together are still in every rank's sum, or in none."""
        return self._is_equal(*_SUMS)

    def shows_same_grads(self) -> bool:
        """Whether all ranks had a ``.grad`` on the same parameters."""
        return self._is_equal(*_GRADS)

    def _is_equal(self, start: int, stop: int) -> bool:
        """Whether these bytes are the same in the rows of all ranks."""
        expected, size = self._row[start:stop], len(self._row)
        return all(self._rows[at + start : at + stop] == expected for at in range(0, len(self._rows), size))


def compare_pasts(group: Group, boundary: Announcement) -> None:
    """Raises RankMismatchError on every rank if exchanges completed although ranks made different ones: one a norm,
    another a largest value (zc/ranks/watch.py)."""
    if group.journal is None:
        return
    if not boundary.has_same_past():
        advice = "Let every rank make the same calls between two updates (norms, step, loading of states), in one order"
        group.same_everywhere("what was exchanged since the last update", group.journal.lines(), advice)
    group.journal.begin_update()


def raise_sums_differ(group: Group, sums: Sequence[tuple[int, int]]) -> None:
    """Raises RankMismatchError. ``sums``: of each optimizer, the number of reductions in its sums, and a checksum."""
    group.same_everywhere(
        "what the gradients hold: some rank has cleared its gradients (zero_grad, param.grad = None or .zero_(), "
        "or a backward that raised) and others have not; what they hold",
        [f"{count} reduction(s), checksum {checksum:08x}" for count, checksum in sums or [(0, 0)]],
        "Clear them on all ranks or on none, and by optimizer.zero_grad(): where a rank had no gradient yet, zc can't "
        "see that its .grad was set to None",
    )


def plus(checksum: int, text: str) -> int:
    """``checksum`` with ``text`` added, in whatever order texts are added."""
    return (checksum + zlib.crc32(text.encode())) % 2**32
