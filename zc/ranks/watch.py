"""The watch: finds ranks that are out of step or lost, and names them on every rank, so that every wait ends.

`zc/engine/announcements.py` decides what ranks may do differently: they exchange gradients only if all of them have
announced the same. The watch covers everything else: ranks that start different exchanges, or never start one. Every
rank keeps one journal per compiled model (zc/ranks/journal.py). Two things find a difference:

- **The watch**, one thread per process, looks at the store once a second. When a rank has waited for a second, all
  ranks publish the journals and the waits of all their models. Every rank raises RankMismatchError if two journals
  differ, or if all ranks wait in different exchanges, perhaps of different models. A rank that does not answer for
  ``timeout`` seconds is lost, and the others raise RankLostError. A rank that answers but is late (it compiles, it
  reads data) is waited for, and the log names it after ``timeout`` seconds. It is lost if it has left a backward by an
  error and has called nothing of zc for so long. Its program may have dropped the model, so it collects garbage
  meanwhile. The timeout is long because a rank that keeps Python's lock can't answer. A killed rank is named sooner:
  the network reports it, or the kernel does to a rank of the same host. With NCCL the stream waits, not the host, so
  the watch does not see it: a lost rank shows at the next announcement or boundary, where the host waits.
- **The checksum** of the journal travels with the announcement before each update. It finds exchanges that complete
  although they differ.

A mismatch must do no harm before it is found. gloo matches collectives by their number alone, and *aborts the process*
if their sizes differ (pair.cc, "Received data size doesn't match expected size"), so with gloo exchanges on CPU are
sends and receives whose tag names the bucket. Ranks that read each other's memory signal under keys that name it
(zc/ranks/neighbours.py). Exchanges of other backends are collectives, which match as the backend does it.

What ranks publish in the store is a `RankState`. `difference`, `deadlock` and `late` are the verdicts on it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch.distributed as dist

from zc import torch_private
from zc.errors import RankLostError, RankMismatchError, ZcError
from zc.log import log
from zc.machine import machine_id
from zc.ranks import process
from zc.ranks.journal import STANDS_S, TICK_S, Journal, Record, Trail, Wait

IDLE_S = 3.0  # others wait and this rank does not: then it collects garbage, and after twice as long again
LOST_CONNECTION_S = 6.0  # patience with a silent rank that has ended, or after the network has reported an error
_CLOSED = "it closed or dropped its compiled model"
_AT_ITS_END = "its program came to its end"
_LEFT = "its program has called torch.distributed.destroy_process_group()"
_RAISED = "a backward raised there, and its program has called nothing of zc's since"
_WATCHES: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[Watch]] = weakref.WeakKeyDictionary()
_ALL: weakref.WeakSet[Watch] = weakref.WeakSet()  # also of groups that the program has destroyed


class Store(Protocol):
    """The methods of torch.distributed's stores that never block."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Watch:
    """The watch of one process. ``rank`` is that of the default group."""

    def __init__(self, rank: int, store: Store, *, has_own_connection: bool = True) -> None:
        self.rank, self.store, self.has_own_connection = rank, store, has_own_connection
        self._journals: dict[str, weakref.ref[Journal]] = {}  # any thread adds and removes; the watch's copies it
        self._tick = TICK_S
        self._stop = threading.Event()
        self._farewell = [_CLOSED]  # what the thread tells the others at its end
        self._pid = os.getpid()
        self.trail = Trail()  # the calling thread's
        # the same on all ranks: names the files that they write when they differ
        self.run = store.compare_set("run", "", secrets.token_hex(6)).decode()
        self._newest: dict[str, int] = {}  # by ranks, the number of their newest model; the calling thread's
        # only the watch's thread uses these
        self._own_state = RankState()  # as this rank has published it last
        self._beats: dict[tuple[int, str], tuple[int, float]] = {}  # by rank and journal: its beat, and since when
        self._stopped: dict[int, float] = {}  # by rank: since when its program has left a backward by an error
        self._own_collective: tuple[str, float] | None = None  # the program's own, and since when
        self._has_set_alarm = False
        self._has_verdict = False  # since its last look this rank has published one
        self._idle_since: float | None = None  # others wait, and this rank does not
        self._collects_after = IDLE_S
        self._broken_since: float | None = None
        # tells this watch's farewell from that of an earlier one, whose thread may end later
        token = str(time.time_ns())
        store.set(f"watch/{rank}", token)
        publish_process(store, rank)
        arguments = weakref.ref(self), self._stop, self._farewell, f"left/{rank}/{token}"
        self._thread = process.start_thread(_run, arguments, "zc watch")
        _ALL.add(self)

    @classmethod
    def of_this_process(cls) -> Watch:
        """The watch that belongs to the present default group. The first model makes it; it ends with the last one."""
        world = dist.group.WORLD
        assert world is not None, "a process group is initialised"
        running = _WATCHES.get(world)
        watch = None if running is None else running()
        if watch is None or watch._stop.is_set():
            store, is_own = torch_private.own_store()
            prefixed = dist.PrefixStore("zc", store)  # type: ignore[attr-defined]
            watch = cls(dist.get_rank(), prefixed, has_own_connection=is_own)
            _WATCHES[world] = weakref.ref(watch)
        return watch

    def add(self, journal: Journal) -> None:
        self._journals[journal.name] = weakref.ref(journal)
        self._newest = {**self._newest, journal.name.partition("/")[0]: journal.number}
        self._tick = TICK_S * max(1.0, len(journal.ranks) / 64)  # the store answers W ranks that each read W states
        self.store.delete_key(f"failure/{journal.name}")  # of an earlier default group with the same store

    def forget(self, name: str) -> None:
        """Takes no lock: the garbage collector may call it in any thread."""
        self._journals.pop(name, None)

    @property
    def has_ended(self) -> bool:
        """Whether it comes to no further verdict."""
        return self._stop.is_set()

    def end(self, farewell: str | None = None, seconds: float = 2.0) -> None:
        """Ends the thread if no model is left, or if the process ends with this ``farewell``."""
        if farewell is not None:
            self._farewell[0] = farewell
        if farewell is not None or not self._journals:
            self._stop.set()
            self._thread.join(seconds)

    def _open(self) -> list[Journal]:
        journals = [reference() for reference in list(self._journals.values())]
        return [journal for journal in journals if journal is not None and not journal.has_failed]

    # --- one tick ---

    def tick(self) -> None:
        """Looks. A fault of the watch itself ends a healthy run only if it lasts."""
        try:
            self.look()
            self._broken_since = None
        except Exception as error:  # noqa: BLE001
            now = time.monotonic()
            if self._broken_since is None:
                self._broken_since = now
                log.warning("the watch for lost ranks could not look, and tries again: %r", error)
            is_store = isinstance(error, RuntimeError | OSError)  # of the store, or of its connection
            for journal in self._open():
                patience = min(journal.timeout, LOST_CONNECTION_S) if is_store else journal.timeout
                if now - self._broken_since >= patience:
                    journal.accept(json.dumps(["RankLostError", _why_blind(error, is_store=is_store)]))

    def look(self) -> None:
        """Publishes and compares, if a rank has waited for a while."""
        now, journals = time.monotonic(), self._open()
        is_stalled = any(journal.is_stalled(now) for journal in journals)
        if not (is_stalled or self._has_set_alarm or self.store.check(["alarm"])):
            self._idle_since = None
            return
        for journal in journals:
            if self.store.check([f"failure/{journal.name}"]):
                self._accept(journal, self.store.get(f"failure/{journal.name}").decode())
        journals = [journal for journal in journals if not journal.has_failed]
        stalled = [journal for journal in journals if journal.is_stalled(now)]
        self._publish(now, journals)
        self._collect_if_idle(now)
        if stalled:
            self.store.set("alarm", str(self.rank))
            self._has_set_alarm = True
            self._compare(stalled, now)
        elif self._has_verdict:  # ranks that do not wait look only while there is an alarm: they need another look
            self._has_verdict = False
        elif self._has_set_alarm:
            self.store.delete_key("alarm")  # a rank that still waits sets it again
            self._beats.clear()
            self._stopped.clear()
            self._has_set_alarm = False

    def _publish(self, now: float, journals: Sequence[Journal]) -> None:
        waits = [
            Place(journal.name, journal.words(wait.entry), now - wait.since, wait.is_call)
            for journal in journals
            for wait in list(journal.waits.values())
        ]
        call = None if waits else collective_of_the_caller()
        if call is None or self._own_collective is None or self._own_collective[0] != call:
            self._own_collective = None if call is None else (call, now)
        # a rank that waits in zc itself has called it since, which ends a backward that raised
        has_raised = not waits and any(journal.has_raised() for journal in journals)
        if self._own_collective is not None:
            call, since = self._own_collective
            waits = [Place("", call, now - since, is_call=True)]
        records = {journal.name: journal.record for journal in journals}
        has_left = not waits and not dist.is_initialized()
        self._own_state = RankState(self._own_state.beat + 1, records, self._newest, waits, has_raised, has_left)
        self.store.set(f"state/{self.rank}", self._own_state.to_json())

    def _collect_if_idle(self, now: float) -> None:
        """A model that the program has dropped in a cycle, or while a stream had a task of it, lives until Python's
        collector comes. While the program idles nobody calls that, and the others would wait without end. Each time
        after twice as long: this rank may be late instead, and a collection keeps Python's lock."""
        if self._own_state.waits or self._idle_since is None:
            self._idle_since, self._collects_after = now, IDLE_S
        elif now - self._idle_since >= self._collects_after:
            self._collects_after *= 2
            gc.collect()

    def _read_states(self, stalled: Iterable[Journal]) -> dict[int, RankState]:
        """The states of the ranks that stalled models wait for, of those that these wait for, and so on."""
        states = {self.rank: self._own_state}
        to_read = {rank for journal in stalled for rank in journal.ranks} - {self.rank}
        while to_read:
            rank = to_read.pop()
            key = f"state/{rank}"
            is_there = self.store.check([key])
            states[rank] = RankState.from_json(self.store.get(key).decode()) if is_there else RankState()
            to_read |= {r for place in states[rank].waits for r in _ranks_in(place.journal)} - states.keys()
        return states

    def _compare(self, stalled: list[Journal], now: float) -> None:
        states = self._read_states(stalled)
        self._stopped = {rank: self._stopped.get(rank, now) for rank, state in states.items() if state.has_stopped}
        for journal in stalled:
            others = [rank for rank in journal.ranks if rank != self.rank]
            texts = (difference(journal, self.rank, rank, states[rank]) for rank in others)
            text = next(filter(None, texts), None)
            if text is not None:
                self.fail([journal.name], RankMismatchError, text)
                continue
            silent = {rank: self._silence(journal, rank, states[rank], now) for rank in others}
            reasons = {rank: self._why_lost(journal, rank, states[rank], seconds) for rank, seconds in silent.items()}
            lost = {rank: why for rank, why in reasons.items() if why}
            if not lost:
                silent = {rank: now - self._stopped[rank] for rank in others if rank in self._stopped}
                lost = {rank: _RAISED for rank, seconds in silent.items() if seconds > journal.timeout}
            if lost:
                self.fail([journal.name], RankLostError, self._lost(journal, lost, min(silent[r] for r in lost)))
        if not any(journal.has_failed for journal in stalled):
            verdict = deadlock(states, min(min(journal.timeout, STANDS_S) for journal in stalled))
            if verdict is not None:
                names, text = verdict
                self.fail(names, RankMismatchError, text)
            else:
                self._say_who_is_late(stalled, states, now)

    # --- what it finds ---

    def _silence(self, journal: Journal, rank: int, state: RankState, now: float) -> float:
        """Seconds for which a rank has not answered, or has answered without this model, which it had, or without a
        process group."""
        beat = -2 if _has_closed(journal, state) or _has_left(state) else state.beat
        before, since = self._beats.get((rank, journal.name), (-1, now))
        if beat != before:
            since = now
        self._beats[rank, journal.name] = beat, since
        return now - since

    def _why_lost(self, journal: Journal, rank: int, state: RankState, silent_s: float) -> str | None:
        """Why a rank that has been silent for so long is lost; None: it may still answer."""
        soon = min(journal.timeout, LOST_CONNECTION_S)
        if silent_s > soon and _has_closed(journal, state):
            return _CLOSED
        if silent_s > soon and _has_left(state):
            return _LEFT
        farewell = self._farewell_of(rank) if silent_s > soon else None
        if farewell is not None:
            return farewell
        if silent_s > soon and has_ended(self.store, rank):
            return "its process has ended"
        if silent_s > (journal.timeout if journal.network_error is None else soon):
            return "ended, was killed, or stands still"
        return None

    def _farewell_of(self, rank: int) -> str | None:
        """The last words of this rank's present watch, if it has ended."""
        key = f"watch/{rank}"
        if self.store.check([key]) and self.store.check([left := f"left/{rank}/{self.store.get(key).decode()}"]):
            return self.store.get(left).decode()
        return None

    def _lost(self, journal: Journal, lost: Mapping[int, str], silent_s: float) -> str:
        waits = [journal.words(wait.entry) for wait in list(journal.waits.values())]
        who = f"rank {next(iter(lost))} has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} have"
        has_left, raised = any(why in (_CLOSED, _LEFT, _AT_ITS_END) for why in lost.values()), _RAISED in lost.values()
        return (
            f"{who} not answered for {silent_s:.0f} s ({'; '.join(dict.fromkeys(lost.values()))}), and rank "
            f"{self.rank} waits for it in: {', '.join(waits) or 'an exchange'}"
            + (f"; the network says: {journal.network_error}" if journal.network_error else "")
            + (f". Every rank must make as many updates as the others. {JOIN}" if has_left else "")
            + (". After an error of a backward call optimizer.zero_grad(), or let the program end" if raised else "")
        )

    def _say_who_is_late(self, stalled: Sequence[Journal], states: Mapping[int, RankState], now: float) -> None:
        """Once for each wait that is longer than the model's patience: a program that has left its loop, and keeps the
        model, looks like one that is late."""
        for journal in stalled:
            wait = min(list(journal.waits.values()), key=lambda wait: wait.since, default=None)
            if wait is not None and now - wait.since > journal.timeout and journal.long_wait is not wait:
                journal.long_wait = wait
                log.warning("%s", late(journal, self.rank, states, wait, now - wait.since))

    def fail(self, names: Sequence[str], kind: type[ZcError], text: str) -> None:
        """Publishes a verdict on the models with journals of these ``names``. The first one counts on all ranks."""
        verdict = json.dumps([kind.__name__, text])
        self._has_verdict = True
        for name in names:
            verdict = self.store.compare_set(f"failure/{name}", "", verdict).decode()
            reference = self._journals.get(name)
            journal = None if reference is None else reference()
            if journal is not None:
                self._accept(journal, verdict)

    def _accept(self, journal: Journal, verdict: str) -> None:
        """In a collective of the program's own no verdict can be raised, so it is logged: such a collective ends in an
        error of the network's."""
        journal.accept(verdict)
        if self._own_collective is not None:
            log.error("rank %d stands in %s: %r", self.rank, self._own_collective[0], journal.error())


def _why_blind(error: Exception, *, is_store: bool) -> str:
    if is_store:
        return f"the store that the ranks share is gone (the process that held it, most often rank 0, ended): {error}"
    return f"the watch for lost ranks fails, so a wait would be without end: {error!r}"


def _run(watch: weakref.ref[Watch], stop: threading.Event, farewell: list[str], key: str) -> None:
    running = watch()
    store, tick = (running.store if running is not None else None), TICK_S
    while running is not None:
        tick = running._tick
        del running
        if stop.wait(tick):
            break
        running = watch()
        if running is not None:
            running.tick()
    if store is not None:
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone
            store.set(key, farewell[0])


@atexit.register
def _say_farewell() -> None:
    """Tells ranks that still wait whether this one's program came to its end or raised."""
    error = getattr(sys, "last_value", None)
    how = _AT_ITS_END if error is None else f"its program raised {type(error).__name__}: {error}"
    for watch in list(_ALL):
        if watch._pid == os.getpid():  # else a child that was forked ends
            if error is not None:
                for journal in watch._open():
                    journal.report(error)
            watch.end(how)


FORWARDS = "with stage=3 or shard_frozen=True also the same forwards, those of an evaluation included"
JOIN = "Where ranks have different numbers of batches, use zc.join"


class Place(NamedTuple):
    """Where a rank waits: in an exchange of a model, by the name of its journal, or in a collective that the program
    has called, without a name. ``is_call``: see `zc.ranks.journal.Wait`."""

    journal: str
    words: str
    seconds: float
    is_call: bool


@dataclass(frozen=True)
class RankState:
    """What one rank publishes: of all its models, by the names of their journals."""

    beat: int = 0  # how often it has published
    records: Mapping[str, Record] = field(default_factory=dict)
    newest: Mapping[str, int] = field(default_factory=dict)  # by ranks: the number of their newest model
    waits: Sequence[Place] = ()
    has_raised: bool = False  # a backward has, and nothing of zc was called since
    has_left: bool = False  # the program has destroyed the default group, and does not wait in zc

    @property
    def has_stopped(self) -> bool:
        """Whether the program has left a backward by an error, and is neither in zc nor in a collective since."""
        return self.has_raised and not self.waits

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> RankState:
        fields = json.loads(text)
        for name, (epoch, entries, *more) in fields["records"].items():
            fields["records"][name] = Record(epoch, [(kind, index) for kind, index in entries], *more)
        return RankState(**{**fields, "waits": [Place(*wait) for wait in fields["waits"]]})


def _ranks_in(journal: str) -> list[int]:
    """The ranks that a journal's name consists of; none for a collective of the program's."""
    return [int(rank) for rank in journal.partition("/")[0].split("_")] if journal else []


def _has_left(state: RankState) -> bool:
    """Whether a rank has no process group any more. Where this one has none either, both may train on."""
    return state.has_left and dist.is_initialized()


def _has_closed(journal: Journal, state: RankState) -> bool:
    """Whether a rank has closed or dropped this model. It may be late for zc.compile instead."""
    ranks, _, _ = journal.name.partition("/")
    return journal.name not in state.records and state.newest.get(ranks, 0) >= journal.number


def difference(journal: Journal, own_rank: int, rank: int, state: RankState) -> str | None:
    """The first exchange in which the journals of this rank and of ``rank`` differ."""
    mine, theirs = journal.record, state.records.get(journal.name)
    if theirs is None or theirs.epoch != mine.epoch:
        return None
    start = max(mine.folded, theirs.folded)  # entries that both can name
    pairs = zip(mine.entries[start - mine.folded :], theirs.entries[start - theirs.folded :], strict=False)
    for k, (here, there) in enumerate(pairs):
        if here != there:
            return (
                f"ranks are out of step: exchange {start + k + 1} since the last update is, on rank {rank}: "
                f"{journal.words(there)}; on rank {own_rank}: {journal.words(here)}. Let every rank make "
                "the same calls in the same order: clip_grad_norm_, reads of gradients, step, and loading of states; "
                + FORWARDS
            )
    return None


def late(journal: Journal, own_rank: int, states: Mapping[int, RankState], wait: Wait, seconds: float) -> str:
    """For the log of a rank that has waited for so long, and has no verdict."""
    ranks = ", ".join(str(rank) for rank in journal.ranks if not states[rank].waits)
    return (
        f"rank {own_rank} has waited for {seconds:.0f} s in {journal.words(wait.entry)}. Not in zc, but answering, "
        f"are ranks {ranks or '(none)'}: a rank computes, compiles or reads data, or its program has left the loop"
    )


def deadlock(states: Mapping[int, RankState], patience: float) -> tuple[list[str], str] | None:
    """The names of the journals and the text of a verdict; None without a deadlock.

    In a deadlock every rank waits in an exchange of zc's or in a collective that its program has called, and no
    exchange has all its ranks. It is one even if a rank has left the loop early and waits in a barrier. Ranks are late,
    not in a deadlock, while one of them computes, or has passed the boundary of an update before the others.
    """
    if not all(state.waits and min(place.seconds for place in state.waits) > patience for state in states.values()):
        return None
    exchanges = {rank: {(place.journal, place.words) for place in state.waits} for rank, state in states.items()}
    for name, words in {exchange for waits in exchanges.values() for exchange in waits}:
        if name and all((name, words) in exchanges[rank] for rank in _ranks_in(name)):
            return None
    models = sorted({place.journal for state in states.values() for place in state.waits if place.journal})
    numbers = {name: f" (of model {name.partition('/')[2]})" for name in models if len(models) > 1}

    def words_of(rank: int) -> str:
        words = (place.words + numbers.get(place.journal, "") for place in states[rank].waits)
        return ", ".join(dict.fromkeys(words))

    where = "; ".join(f"rank {rank} stands in {words_of(rank)}" for rank in sorted(states))
    raised = [str(rank) for rank in sorted(states) if states[rank].has_raised]
    if raised:
        advice = (
            f"A backward raised on rank {', '.join(raised)}, and other ranks wait for its reductions: call "
            "optimizer.zero_grad() there before the next collective"
        )
    else:
        advice = _advice(place for state in states.values() for place in state.waits)
    return models, f"ranks are out of step, for {patience:.0f} s now: {where}. {advice}"


def _advice(places: Iterable[Place]) -> str:
    calls = sorted({(place.journal, place.words) for place in places if place.is_call})
    if not calls:
        return f"Let all ranks run the same backwards and updates, in one order; {FORWARDS}. {JOIN}"
    advice = f"Every rank must make this call, or none: {', '.join(words for _, words in calls)}"
    return advice if all(name for name, _ in calls) else f"{advice}. {JOIN}"


def publish_process(store: Store, rank: int) -> None:
    """Tells the others which process ``rank``, this one, is."""
    store.set(f"process/{rank}", json.dumps(_this_process()))


def has_ended(store: Store, rank: int) -> bool:
    """Whether the process of ``rank`` has ended. False also where the kernel can't say: another host, or no access.
    (Its connections do not always show it: a child that it forked, such as a data loader's worker, keeps them open.)"""
    key = f"process/{rank}"
    fields: list[str] = json.loads(store.get(key)) if store.check([key]) else []
    if not fields or fields[:1] != _this_process()[:1]:
        return False
    try:
        state, start_time = _state(fields[1])
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process may not look
        return False
    return state in "ZX" or start_time != fields[2]  # killed and not yet waited for; or another process has its PID


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


def _this_process() -> list[str]:
    """[boot and PID namespace, PID, start time]; empty where the system does not say."""
    try:
        return [f"{machine_id()} {os.readlink('/proc/self/ns/pid')}", str(os.getpid()), _state("self")[1]]
    except OSError:
        return []


def _state(number: str) -> tuple[str, str]:
    """The third and the 22nd field of proc(5)'s stat."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
