"""Ranks that get out of step: found, named on every rank, never waited for without end.

What may differ, and whether that is an error, `zc/ranks/agreement.py` decides before the ranks reduce anything: an
exchange of gradients starts where all have announced it. This file is for the rest, for ranks that come to different
exchanges or never come. Every rank keeps a *journal*: the exchanges that zc has started since the last update, in
order. As gradients are agreed on, ranks in step have the same journal, whatever tasks each of them sees. Two things
find a difference:

- **The watch**, a thread a rank. It looks at the store once a second. When this rank, or another, has stood in an
  exchange for a second, all ranks put their journals into the store. Two journals that differ at one place can never
  meet again: RankMismatchError on every rank. A rank that does not answer for ``timeout`` seconds is gone:
  RankLostError, by name. One that answers and is only late (it compiles, it reads data) is waited for; one that keeps
  Python's lock can't answer, so the timeout is long. A rank that was killed is named sooner: the network reports it,
  or, to a rank of the same host, the kernel.
  A wait of NCCL's is the stream's, not the host's, and is not watched: a lost rank shows at the next announcement or
  boundary, which are waits of the host.
- **The checksum** of the journal, which travels with the exchange before each update, for what happens to go through.

A mismatch must not do harm before it is found: exchanges on CPU are sends and receives whose tag names the bucket. gloo
matches collectives by their number alone, and *aborts the process* where sizes differ (pair.cc, "Received data size
doesn't match expected size").
"""

from __future__ import annotations

import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from zc.errors import RankLostError, RankMismatchError, ZcError
from zc.ranks.journal import Entry, Journal, collective_of_the_caller
from zc.ranks.process import Store, has_ended, tell_process

TICK_S = 1.0  # between two looks at the store; an exchange that takes longer is a stall
STANDS_S = 20.0  # after which ranks that stand, each in another exchange, are said to be out of step
SLICE_S = 0.5  # how often a waiting thread looks whether the watch has found something
LOST_CONNECTION_S = 6.0  # patience with a silent rank that has ended, or once the network has reported an error


class Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> Any: ...
    def is_completed(self) -> bool: ...


class RankCheck:
    """One rank's journal, and its watch. ``describe`` turns a journal entry into words; what is announced comes in
    words."""

    def __init__(self, rank: int, world_size: int, store: Store, describe: Callable[[Entry], str], timeout: float):
        self.rank, self.world_size = rank, world_size
        self._store, self.describe = store, describe
        self.timeout, self._soon = timeout, min(timeout, STANDS_S)
        self._journal = Journal(0, [])  # one object: the watch's thread must not see a new epoch with old entries
        self._failed = threading.Event()
        self._failure: tuple[str, str] | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._network_error: str | None = None
        self._waits: dict[int, tuple[Entry | str, float]] = {}  # thread -> what it waits for, since when
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when we saw it change
        self._elsewhere: tuple[str, float] | None = None  # the caller's own collective, and since when
        self._beat = 0
        self._alarmed = False
        self.exposed_s = 0.0  # seconds that the calling thread stood still for exchanges, since the last update
        tell_process(store, rank)
        stop = threading.Event()
        tick = TICK_S * max(1.0, world_size / 64)  # the store answers W ranks that each read W states
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), stop, tick), name="zc watch", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, stop.set)

    # --- the journal ---

    def enter(self, kind: str, index: int) -> None:
        """An exchange starts here."""
        self._journal = self._journal.with_entry((kind, index))

    def checksum(self) -> int:
        return zlib.crc32(repr(self._journal.entries).encode(), self._journal.sums)

    def lines(self) -> list[str]:
        return [self._words(entry) for entry in self._journal.entries]

    def agreed(self) -> None:
        """All ranks have had this journal: the next one begins."""
        self._journal = Journal(self._journal.epoch + 1, [])

    def _words(self, entry: Entry | str) -> str:
        return entry if isinstance(entry, str) else self.describe(entry)

    # --- waiting ---

    def wait(self, work: Work, entry: Entry | str, *, interruptible: bool) -> None:
        """Waits for an exchange. Raises what the watch finds, or the network's own error where it finds nothing.

        Without ``interruptible`` (a stream's thread) only errors of the network end the wait; the calling thread, which
        waits for the stream with `wait_event`, is the one that raises.
        """
        started = time.monotonic()
        self._waits[threading.get_ident()] = (entry, started)
        try:
            self._wait(work, interruptible)
        except RuntimeError as error:
            if isinstance(error, ZcError):
                raise
            raise self.explained(error) from error
        finally:
            del self._waits[threading.get_ident()]
            if interruptible:
                self.exposed_s += time.monotonic() - started

    def _wait(self, work: Work, interruptible: bool) -> None:
        if not interruptible:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError as error:
                if self._failed.is_set():
                    raise self.error() from None
                if work.is_completed() or "timed out" not in str(error):
                    raise

    def wait_event(self, event: threading.Event) -> None:
        """Waits for a stream's thread, on the calling thread. Raises what the watch finds."""
        started = time.monotonic()
        while not event.wait(SLICE_S):
            if self._failed.is_set():
                raise self.error()
        self.exposed_s += time.monotonic() - started

    @property
    def has_failed(self) -> bool:
        """Whether the watch has found something: no exchange comes to its end any more."""
        return self._failed.is_set()

    def found(self) -> ZcError | None:
        """What the watch has found, if anything."""
        return self.error() if self._failed.is_set() else None

    def fail(self, kind: type[ZcError], text: str) -> ZcError:
        """This rank has found what all are to hear. Returns it, or what another rank has found before."""
        self._fail(kind, text)
        return self.error()

    def error(self) -> ZcError:
        assert self._failure is not None
        kind, text = self._failure
        return {"RankLostError": RankLostError, "RankMismatchError": RankMismatchError}[kind](text)

    def explained(self, error: RuntimeError) -> Exception:
        """A broken connection says an address; the watch says which rank, or what it has raised."""
        self._network_error = str(error)
        if self._failed.wait(self._soon + 2 * TICK_S):
            return self.error()
        return error

    # --- the watch ---

    def look(self) -> None:
        """One tick of the watch."""
        now = time.monotonic()
        stalled = any(now - since >= TICK_S for _, since in list(self._waits.values()))
        stalled = stalled or self._network_error is not None
        if self._failed.is_set() or not (stalled or self._alarmed or self._store.check(["alarm"])):
            return
        if self._store.check(["failure"]):
            self._take(self._store.get("failure").decode())
            return
        self._publish()
        if stalled:
            self._store.set("alarm", str(self.rank))
            self._compare(now)
        elif self._alarmed:
            self._store.delete_key("alarm")  # whoever still stands sets it again
            self._seen.clear()
        self._alarmed = stalled

    def _publish(self) -> None:
        self._beat += 1
        now, place = time.monotonic(), None if self._waits else collective_of_the_caller()
        if place is None or self._elsewhere is None or self._elsewhere[0] != place:
            self._elsewhere = None if place is None else (place, now)
        journal = self._journal
        state = {
            "beat": self._beat,
            "epoch": journal.epoch,
            "journal": [list(journal.entries), journal.folded, journal.sums],
            "waits": {self._words(entry): now - since for entry, since in list(self._waits.values())},
            "elsewhere": self._elsewhere and [self._elsewhere[0], now - self._elsewhere[1]],
        }
        self._store.set(f"state/{self.rank}", json.dumps(state))

    def _compare(self, now: float) -> None:
        states, silent = dict[int, dict[str, Any]](), dict[int, float]()
        soon = min(self.timeout, LOST_CONNECTION_S)
        patience = self.timeout if self._network_error is None else soon
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            key = f"state/{rank}"
            state: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {"beat": 0}
            states[rank] = state
            beat, seen = self._seen.get(rank, (-1, now))
            if beat != state["beat"]:
                self._seen[rank] = (state["beat"], now)
            elif now - seen > patience or (now - seen > soon and has_ended(self._store, rank)):
                silent[rank] = now - seen
            if "journal" in state and self._differs(rank, Journal(state["epoch"], *state["journal"])):
                return
        if silent:
            self._fail(RankLostError, self._lost(silent))
        else:
            self._find_deadlock(states)

    def _find_deadlock(self, states: dict[int, dict[str, Any]]) -> None:
        """Every rank stands in an exchange of zc's, or in a collective that its script has called, and no two in the
        same: a rank that has left the loop early (fewer batches) and stands in a barrier is no reason to wait, nor is
        one that has passed the boundary of an update at which the others have yet to arrive."""
        now = time.monotonic()
        places = {self.rank: {self._words(entry): now - since for entry, since in list(self._waits.values())}}
        for rank, state in states.items():
            places[rank] = state.get("waits") or dict([state["elsewhere"]] if state.get("elsewhere") else [])
        stands = all(place and min(place.values()) > self._soon for place in places.values())
        if stands and not set.intersection(*(set(place) for place in places.values())):
            shown = "; ".join(f"rank {rank} stands in {', '.join(place)}" for rank, place in places.items())
            self._fail(
                RankMismatchError,
                f"ranks are out of step, for {self._soon:.0f} s now: {shown} (rank {self.rank} after "
                f"{self._journal.total} exchanges since the last update). Ranks with more batches than others: zc.join",
            )

    def _differs(self, rank: int, theirs: Journal) -> bool:
        mine = self._journal
        if theirs.epoch != mine.epoch:
            return False
        start = max(mine.folded, theirs.folded)  # entries that both can name
        here_on, there_on = mine.entries[start - mine.folded :], theirs.entries[start - theirs.folded :]
        for k, (here, (kind, index)) in enumerate(zip(here_on, there_on, strict=False)):
            if here != (kind, index):
                self._fail(
                    RankMismatchError,
                    f"ranks are out of step: exchange {start + k + 1} since the last update is, on rank {rank}: "
                    f"{self._words((kind, index))}; on rank {self.rank}: {self._words(here)}",
                )
                return True
        return False

    def _lost(self, silent: dict[int, float]) -> str:
        waits = [self._words(entry) for entry, _ in list(self._waits.values())]
        who = f"rank {next(iter(silent))} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
        return (
            f"{who} not answered for {min(silent.values()):.0f} s (ended, was killed, or stands still), and rank "
            f"{self.rank} waits for it in: {', '.join(waits) or 'an exchange'}"
            + (f"; the network says: {self._network_error}" if self._network_error else "")
        )

    def store_is_gone(self, error: Exception) -> None:
        """Whoever held the store has ended. Not an error by itself: a rank may be done. One that waits is told."""
        text = f"the store that the ranks share is gone (the process that held it, most often rank 0, ended): {error}"
        self._failed_with("RankLostError", text)

    def _fail(self, kind: type[ZcError], text: str) -> None:
        """The first verdict is everyone's."""
        self._take(self._store.compare_set("failure", "", json.dumps([kind.__name__, text])).decode())

    def _take(self, verdict: str) -> None:
        kind, text = json.loads(verdict)
        self._failed_with(kind, text)

    def _failed_with(self, kind: str, text: str) -> None:
        self._failure = (kind, text)
        self.on_failure()
        self._failed.set()


def _watch(check: weakref.ref[RankCheck], stop: threading.Event, tick: float) -> None:
    while not stop.wait(tick):
        found = check()
        if found is None:
            return
        try:
            found.look()
        except Exception as error:  # noqa: BLE001  (a thread of its own: the store is gone, and with it who held it)
            found.store_is_gone(error)
            return
        del found
