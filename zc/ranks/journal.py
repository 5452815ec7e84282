"""What a rank has done so far: its journal of one compiled model, with the exchanges that it has started and its waits;
and the trail of its program.

The trail has the last calls that the program has made into zc, each with the line of the program that made it.
Exchanges run on other threads, in an order that ranks may choose. The trail has what the calling thread did: one entry
for an announcement, a norm, a question to other ranks, an update. `zc.report.diverged` writes it when ranks differ.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

from zc.errors import RankLostError, RankMismatchError, ZcError
from zc.log import log

if TYPE_CHECKING:
    from zc.planning.plan import Plan
    from zc.ranks.exchanges import Step
    from zc.ranks.watch import Watch

FOLD = 4096  # exchanges of one update that a rank can still name
TICK_S = 1.0  # between two looks of the watch; an exchange that takes longer is stalled
STANDS_S = 20.0  # ranks that wait in different exchanges for longer are out of step
SLICE_S = 0.5  # how often a waiting thread looks for a verdict of the watch
Entry = tuple[str, int]  # what is exchanged, and its number
# The exchanges of a bucket, whose number is the entry's. On CPU the position in this list is part of the message's tag.
EXCHANGES = ("reduce", "gather weights", "gather gradient", "to owners", "from owners", "gather sums")
REDUCE, GATHER, GATHER_GRADIENT, TO_OWNERS, FROM_OWNERS, GATHER_SUMS = EXCHANGES
SUM, LARGEST = "sum", "largest"  # over ranks, of so many values
LOADED = "load_state_dict"  # no exchange, but all ranks must do the same: 1 if the state was loaded, 0 if refused
_ERRORS = {"RankLostError": RankLostError, "RankMismatchError": RankMismatchError}


class Record(NamedTuple):
    """The exchanges since the last of ``epoch`` updates: ``folded`` ones, of which only the checksum ``sums`` is left,
    and then ``entries``. All ranks have agreed on the updates."""

    epoch: int
    entries: list[Entry]
    folded: int = 0
    sums: int = 0

    @property
    def total(self) -> int:
        return self.folded + len(self.entries)

    def with_entry(self, entry: Entry) -> Record:
        """Adds an entry. The older half of a full list is folded, at the same entries on every rank, so that a loop
        without updates does not fill the memory."""
        self.entries.append(entry)
        if len(self.entries) < 2 * FOLD:
            return self
        sums = zlib.crc32(repr(self.entries[:FOLD]).encode(), self.sums)
        return Record(self.epoch, self.entries[FOLD:], self.folded + FOLD, sums)


class Wait(NamedTuple):
    """A wait for an exchange since this time. ``is_call``: for all of a function of zc's that the program has called,
    such as zc.save."""

    entry: Entry | str
    since: float
    is_call: bool


class Journal:
    """The journal of one model on one rank. The watch of the process reads it (zc/ranks/watch.py).

    ``ranks``: those that train the model, by their numbers in the default group. ``number``: counts the models that
    these ranks have compiled.
    """

    def __init__(self, watch: Watch, ranks: Sequence[int], number: int, timeout: float) -> None:
        self.ranks, self.number, self.timeout = tuple(ranks), number, timeout
        self.plan: Plan | None = None  # with the buckets of the entries; None while the model is compiled
        self.name = f"{'_'.join(map(str, ranks))}/{number}"  # the same on all ranks
        # replaced as a whole by the thread that starts an exchange; the watch reads it, never an epoch with old entries
        self.record = Record(0, [])
        self.waits: dict[int, Wait] = {}  # by thread, which adds and removes its own; the watch copies it
        self.long_wait: Wait | None = None  # the last one that the watch has put into the log
        # whether a backward has raised, and the program has called nothing of zc since; the watch calls it
        self.has_raised: Callable[[], bool] = bool
        # writes this rank's file when ranks differ (zc.report.diverged), and says where it is
        self.report: Callable[[BaseException], str | None] = lambda _: None
        self._place: str | None = None  # what `report` has said of the verdict; set before the event
        self.exposed_s = 0.0  # the calling thread's: how long it has waited for exchanges since the last update
        self.network_error: str | None = None  # a waiting thread sets and resets it, the watch reads it
        self._verdict: tuple[str, str] | None = None  # set by the watch, or a thread in `fail`, before the event
        self._has_failed = threading.Event()
        self.on_failure: list[Callable[[], None]] = []  # filled by the calling thread, before the first exchange
        self.watch = watch  # lifetime: the watch ends with the last journal
        self._forget = weakref.finalize(self, watch.forget, self.name)
        self._forget.atexit = False
        watch.add(self)

    def close(self) -> None:
        """The model is closed. The watch ends with the last one."""
        self._forget()
        self.watch.end()

    # --- the record ---

    def enter(self, kind: str, index: int) -> None:
        """Records that an exchange starts."""
        self.record = self.record.with_entry((kind, index))
        if kind in (SUM, LARGEST, LOADED):  # others are entered by streams, and belong to a backward or an update
            self.watch.trail.add(self.name, (kind, index), shared=True)

    def checksum(self) -> int:
        return zlib.crc32(repr(self.record.entries).encode(), self.record.sums)

    def lines(self) -> list[str]:
        return [self.words(entry) for entry in self.record.entries]

    def begin_update(self) -> None:
        """All ranks have made the same calls so far and have the same record, so the next one begins."""
        self.record = Record(self.record.epoch + 1, [])
        self.watch.trail.agreed = self.watch.trail.num_shared

    def words(self, entry: Entry | str) -> str:
        """What is exchanged, and of which parameters. Announcements are words already."""
        if isinstance(entry, str):
            return entry
        kind, index = entry
        if kind == LOADED:
            return f"optimizer.load_state_dict, {'taken' if index else 'refused'}"
        if kind in (SUM, LARGEST):
            return f"the {kind} over ranks of {index} values (norms of gradients, or whether any is infinite)"
        if self.plan is None:
            return str(entry)
        bucket = self.plan.bucket(index)
        first, last = bucket.slots[0].name, bucket.slots[-1].name
        return f"{kind} of bucket {index} ({first} ... {last}, {bucket.numel} elements)"

    # --- waiting ---

    def wait(self, step: Step, entry: Entry | str, *, is_call: bool = False) -> None:
        """Waits for an exchange. Raises the verdict of the watch, or the network's own error if there is none.

        On a stream's thread a wait for messages ends by errors of the network alone. The calling thread waits for that
        thread with `wait_event`, and raises there.
        """
        started, thread = time.monotonic(), threading.get_ident()
        outer = self.waits.get(thread)  # which a signal's handler has interrupted, to wait here itself
        is_on_stream = threading.current_thread().name.startswith("zc ")
        self.waits[thread] = Wait(entry, started, is_call)
        try:
            if is_on_stream:
                step(None)
            else:
                while not step(SLICE_S):
                    self.raise_verdict()
        except RuntimeError as error:
            if isinstance(error, ZcError):
                raise
            raise self.explained(error) from error
        finally:
            if outer is None:
                del self.waits[thread]
            else:
                self.waits[thread] = outer
            if not is_on_stream:
                self.exposed_s += time.monotonic() - started

    def wait_event(self, event: threading.Event) -> None:
        """Waits for a stream's thread, on the calling thread. Raises the verdict of the watch."""
        started = time.monotonic()
        while not event.wait(SLICE_S):
            self.raise_verdict()
        self.exposed_s += time.monotonic() - started

    def explained(self, error: RuntimeError) -> Exception:
        """The error to raise for ``error`` of the network: the verdict of the watch, if it comes to one. A broken
        connection names an address; the watch names the rank, or the error that the rank has raised."""
        self.network_error = str(error)
        try:
            seconds = 0.0 if self.watch.has_ended else min(self.timeout, STANDS_S) + 2 * TICK_S
            if self._has_failed.wait(seconds):
                return self.error()
            return error
        finally:
            self.network_error = None  # if all ranks are well, only this exchange has failed

    def is_stalled(self, now: float) -> bool:
        """Whether a wait takes long, or the network has failed."""
        waits = list(self.waits.values())
        return self.network_error is not None or any(now - wait.since >= TICK_S for wait in waits)

    # --- the verdict ---

    @property
    def has_failed(self) -> bool:
        """Whether there is a verdict: no exchange completes any more."""
        return self._has_failed.is_set()

    def error(self) -> ZcError:
        assert self._verdict is not None
        kind, text = self._verdict
        return with_note(_ERRORS[kind](text), self._place)

    def reported(self, error: ZcError) -> ZcError:
        """``error``, of which all ranks know without the watch, with a note that says where this rank's file is."""
        return with_note(error, self.report(error))

    def fail(self, kind: type[ZcError], text: str) -> ZcError:
        """Publishes a verdict of this rank. Returns it, or the one that another rank has published before."""
        self.watch.fail([self.name], kind, text)
        return self.error()

    def accept(self, verdict: str) -> None:
        """Takes a verdict of the watch over: from here on it ends every wait, but for one in gloo. The first counts."""
        if not self.has_failed:
            kind, text = json.loads(verdict)
            self._verdict = kind, text
            for call in self.on_failure:
                call()
            self._place = self.report(_ERRORS[kind](text))
            self._has_failed.set()

    def raise_verdict(self) -> None:
        if self._has_failed.is_set():
            raise self.error()


LENGTH = 200  # calls that a trail keeps
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(_LIBRARY + name + os.sep for name in ("site-packages", "dist-packages"))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, os.path.dirname(torch.__file__) + os.sep
_TYPED = ("<stdin>", "<string>", "<ipython", "<python-input")  # a program that lies in no file
_is_programs: dict[str, bool] = {}  # by the name of a code object's file


@dataclass
class TrailEntry:
    """``number``: that of the next call in which all ranks take part, or this call's own. ``shared``: it is one."""

    number: int
    shared: bool
    model: str  # the name of its journal
    what: str | tuple[str, int]  # as in the journal, which has words for it
    code: CodeType | None  # of the program; None: no line of it was on the stack
    line: int
    times: int = 1


class Trail:
    """The trail of one process. Only the thread that calls zc adds to it; the watch's copies it."""

    def __init__(self) -> None:
        self.entries: deque[TrailEntry] = deque(maxlen=LENGTH)
        self.num_shared = 0  # calls so far in which all ranks take part
        self.agreed = 0  # how many of them had been when all ranks last agreed on an update

    def add(self, model: str, what: str | tuple[str, int], *, shared: bool) -> None:
        """``shared``: all ranks make this call, so its number is the same on all of them. Others, of which ranks may
        make different ones, count as one while the same line repeats them."""
        frame = frame_of_program(sys._getframe(2))
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        if shared:
            self.num_shared += 1
        elif self.entries:
            last = self.entries[-1]
            if (last.what, last.line, last.code, last.model) == (what, line, code, model):
                last.times += 1
                return
        self.entries.append(TrailEntry(self.num_shared + (not shared), shared, model, what, code, line))


def frame_of_program(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, that is neither zc's nor torch's nor the standard library's.
    Autograd's own thread has none, so there it is the main thread's."""
    found = _innermost(frame)
    if found is None and threading.current_thread() is not threading.main_thread():
        found = _innermost(sys._current_frames().get(threading.main_thread().ident or 0))
    return found


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_code.co_filename
        is_programs = _is_programs.get(name)
        if is_programs is None:
            is_programs = _is_programs[name] = is_of_program(name)
        if is_programs:
            return frame
        frame = frame.f_back
    return None


def is_of_program(file: str) -> bool:
    """Whether this file belongs to the program, or to a library that it uses beside torch."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    return not file.startswith(_OURS) and (not file.startswith(_LIBRARY) or file.startswith(_PACKAGES))


def with_note(error: ZcError, note: str | None) -> ZcError:
    """Python 3.10 has no notes; there the log has it."""
    if note is not None and hasattr(error, "add_note"):
        error.add_note(note)
    elif note is not None:
        log.error("%s", note)
    return error
