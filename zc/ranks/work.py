"""Work: an exchange that has started, to wait for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zc.errors import ZcError
from zc.ranks import ending
from zc.ranks.waits import note_wait

if TYPE_CHECKING:
    from zc.ranks.journal import Entry, Journal

# Waits for at most so many seconds (None: without end). Returns whether it is done, and raises only its own errors: a
# time limit that passes is no error, so a step that completes at that very moment is not mistaken for a failed one.
Step = Callable[[float | None], bool]


class Work:
    """One exchange, as steps that the waiting threads do in order. It holds the steps, and with them their buffers,
    until they are done. With a ``journal`` a wait raises an error that names ranks which are lost or out of step."""

    def __init__(self, entry: Entry | str, *steps: Step, journal: Journal | None = None) -> None:
        self.entry, self.journal = entry, journal
        self._steps = deque(steps)  # for any thread that waits, under the lock
        self._lock = threading.Lock()

    def wait(self) -> None:
        """A stream's thread and the calling one may both wait."""
        if self.journal is None:
            self.advance(None)
        else:
            self.journal.wait(self.advance, self.entry)

    def advance(self, seconds: float | None) -> bool:
        """Does steps for at most ``seconds``. Returns whether all of them are done."""
        end = None if seconds is None else time.monotonic() + seconds
        if not self._lock.acquire(blocking=False):  # another thread does the steps
            started = time.perf_counter_ns()
            if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
                return False
            note_wait(None, started)
        try:
            while self._steps:
                if not self._steps[0](None if end is None else max(0.0, end - time.monotonic())):
                    return False
                self._steps.popleft()
            return True
        finally:
            self._lock.release()


class Call:
    """``run()`` in a thread of its own, which may be abandoned: a step for a call that blocks until others answer.
    ``device``: the current one of that thread. ``group``: the group in which it waits, if that is the caller's."""

    def __init__(
        self,
        run: Callable[[], Any],
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._is_done = threading.Event()
        self._result: Any = None  # the thread writes it and the error before it sets the event; others read them after
        self._error: BaseException | None = None
        self._thread = ending.start_thread(self._work, (run, device), "zc call", group)

    def _work(self, run: Callable[[], Any], device: torch.device | None) -> None:
        try:
            if device is not None and device.type != "cpu":
                torch.accelerator.set_device_index(device)  # a thread begins on device 0
            self._result = run()
        except BaseException as error:  # noqa: BLE001  (DCP's is no Exception; the waiting thread raises it)
            self._error = error
        self._is_done.set()

    def __call__(self, seconds: float | None = None) -> bool:
        """Raises errors of the network. `result` raises all others, which concern this rank alone."""
        if not self._is_done.wait(seconds):
            return False
        # the thread frees tensors as it ends: in C++, while the process ends, that would abort (zc/ranks/ending.py)
        self._thread.join()
        if isinstance(self._error, RuntimeError) and not isinstance(self._error, ZcError):
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def collective(work: dist.Work | None) -> Step:
    """A collective of torch.distributed."""
    assert work is not None, "this rank is a member of the group"

    def step(seconds: float | None) -> bool:
        started = time.perf_counter_ns()
        try:
            return wait(seconds)
        finally:
            note_wait(None, started)

    def wait(seconds: float | None) -> bool:
        if seconds is None:
            work.wait()
            return True
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            if not work.is_completed():
                return False
            work.wait()  # it completed after the time limit: returns at once, or raises the work's own error
        return True

    return step


def messages(
    works: Sequence[dist.Work | None],
    group: dist.ProcessGroup | None = None,
    stream: torch.Stream | None = None,
    ranks: Sequence[int | None] = (),
) -> Step:
    """Sends and receives; ``group``: theirs, if it is the caller's. gloo can't tell whether one is done, nor stop
    waiting for it, so a wait with a time limit hands them to a thread, once. ``stream``: the one on which they were
    issued, if they are of a device's tensors: gloo's wait queues copies on the waiting thread's current stream.
    ``ranks``: to or from whom each of ``works`` is, for `zc.ranks.waits`."""
    call: Call | None = None

    def wait_for_all() -> None:
        with stream or contextlib.nullcontext():
            for work, rank in zip(works, ranks or [None] * len(works), strict=True):
                assert work is not None, "this rank is a member of the group"
                started = time.perf_counter_ns()
                work.wait()
                note_wait(rank, started)

    def step(seconds: float | None) -> bool:
        nonlocal call
        if seconds is None and call is None:
            wait_for_all()
            return True
        if call is None:
            call = Call(wait_for_all, group=group)
        started = time.perf_counter_ns()
        is_done = call(seconds)
        note_wait(None, started)
        return is_done

    return step
