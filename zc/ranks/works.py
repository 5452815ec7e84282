"""What an exchange gives back: something that one can wait for, with a named error where ranks are out of step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zc.ranks.journal import Entry
from zc.ranks.watch import RankCheck, Work


class Several:
    """Sends and receives as one work. Holds them, and with them their buffers, until all are done.

    gloo can neither ask a send or a receive whether it is done nor give up waiting for it, so a wait with a timeout
    hands the works to a thread, once.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            for work in self._works:
                work.wait()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_here, name="zc waits", daemon=True)
            self._thread.start()
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError(f"timed out after {timeout}")
        if self._error is not None:
            raise self._error

    def _wait_here(self) -> None:
        try:
            self.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()


class Watched:
    """A work whose wait ends with a named error where the ranks are out of step (zc/ranks/watch.py)."""

    def __init__(self, work: Work, check: RankCheck, entry: Entry | str) -> None:
        self._work, self._check, self._entry = work, check, entry

    def wait(self) -> None:
        on_stream = threading.current_thread().name.startswith("zc ")  # the calling thread waits for that one
        self._check.wait(self._work, self._entry, interruptible=not on_stream)


def issued(work: Any) -> Any:
    assert work is not None, "this rank is a member of the group"
    return work
