"""What a rank has done among the others since the last update, and the collective of the caller's that it stands in."""

from __future__ import annotations

import os
import sys
import threading
import zlib
from typing import NamedTuple

FOLD = 4096  # exchanges of one update that a rank can still name
Entry = tuple[str, int]
# What is exchanged under a bucket's number. On CPU the position in this list is part of the message's tag.
EXCHANGES = ("reduce", "gather weights", "gather gradient", "to owners", "from owners", "gather sums")


class Journal(NamedTuple):
    """``epoch``: updates that all ranks have agreed on; what was started since: ``folded`` entries, of which only the
    checksum ``sums`` is left, and ``entries``."""

    epoch: int
    entries: list[Entry]
    folded: int = 0
    sums: int = 0

    @property
    def total(self) -> int:
        return self.folded + len(self.entries)

    def with_entry(self, entry: Entry) -> Journal:
        """One more. The older half of a full list is folded, at the same entries on every rank: a loop that never steps
        must not fill the memory."""
        self.entries.append(entry)
        if len(self.entries) < 2 * FOLD:
            return self
        sums = zlib.crc32(repr(self.entries[:FOLD]).encode(), self.sums)
        return Journal(self.epoch, self.entries[FOLD:], self.folded + FOLD, sums)


def collective_of_the_caller() -> str | None:
    """The call into torch.distributed that the main thread is in, and the line that made it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = None
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
            inside = inside if frame.f_code.co_name == "wrapper" else frame.f_code.co_name  # a decorator of torch's
        elif inside is not None:
            return f"torch.distributed.{inside} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        frame = frame.f_back
    return None
