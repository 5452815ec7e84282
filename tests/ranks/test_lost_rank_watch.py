"""Who is called lost: a rank that is gone, and none that waits for a key of the store or keeps Python's lock."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from watched import Shelf, watch_of

import zc
from zc import torch_private
from zc.ranks import watch
from zc.ranks.control import patience
from zc.ranks.journal import Journal, Wait


class Waiting:
    """Rank 0 of four waits, and looks at the store once a second of a clock that the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch, timeout: float) -> None:
        self.now = 1000.0
        patch.setattr(watch.time, "monotonic", lambda: self.now)
        self.store = Shelf()
        self.watch = watch_of(self.store)
        self.journal = Journal(self.watch, range(4), 1, timeout)
        self.journal.waits[1] = Wait(("reduce", 0), self.now, False)

    def publish(self, rank: int, *waits: object, **more: object) -> None:
        state = {"beat": self.now, "records": {self.journal.name: [0, [], 0, 0]}, "newest": {}, "waits": waits, **more}
        self.store.set(f"state/{rank}", json.dumps(state))

    def verdict(self, seconds: int, answer: tuple[int, ...]) -> str | None:
        for _ in range(seconds):
            self.now += 1
            for rank in answer:
                self.publish(rank)
            self.watch.tick()
            if self.journal.has_failed:
                return f"{type(self.journal.error()).__name__}: {self.journal.error()}"
        return None


def test_a_rank_that_can_not_answer_for_minutes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, timeout=600)
    assert waiting.verdict(30, answer=(1, 2, 3)) is None
    assert waiting.verdict(590, answer=(1, 3)) is None
    assert waiting.verdict(3, answer=(1, 2, 3)) is None
    assert "rank 2 has not answered for 601 s" in str(waiting.verdict(700, answer=(1, 3)))


def test_a_broken_connection_names_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: of a rank that was killed and one that keeps Python's lock nobody knows which is which."""
    waiting = Waiting(monkeypatch, timeout=600)
    assert waiting.verdict(5, answer=(1, 2, 3)) is None
    waiting.journal.network_error = "connection reset by peer"
    text = str(waiting.verdict(20, answer=(2,)))
    assert "ranks 1, 3 have not answered for 7 s" in text and "connection reset by peer" in text


def test_a_rank_that_does_not_wait_hears_of_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks only while there is an alarm, such as a rank in a collective of its own, and may look just after the
    verdict: the alarm is there for one more look of the rank that came to it."""
    waiting = Waiting(monkeypatch, timeout=600)
    other = Journal(watch_of(waiting.store, rank=1), range(4), 1, 600)
    waiting.journal.network_error = "connection reset by peer"
    waiting.verdict(20, answer=(1, 2))
    assert waiting.journal.has_failed and not other.has_failed
    waiting.now += 1
    waiting.watch.tick()  # nothing waits any more
    other.watch.tick()
    assert other.has_failed and str(other.error()) == str(waiting.journal.error())
    waiting.watch.tick()
    assert "alarm" not in waiting.store.items


def test_a_rank_that_has_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program came to its end, one raised, one has closed its model and trains another."""
    for left, answer, words in (
        ("its program came to its end", (1, 3), "(its program came to its end), and rank 0 waits"),
        ("its program raised KeyError: 3", (1, 3), "its program raised KeyError: 3"),
        (None, (1, 2, 3), "(it closed or dropped its compiled model)"),
    ):
        waiting = Waiting(monkeypatch, timeout=600)
        if left is None:
            waiting.publish = lambda rank, plain=waiting.publish: plain(  # type: ignore[misc]
                rank, **({"records": {}, "newest": {"0_1_2_3": 1}} if rank == 2 else {})
            )
        else:
            waiting.store.set("watch/2", "1")
            waiting.store.set("left/2/1", left)
        text = str(waiting.verdict(20, answer=answer))
        assert "RankLostError: rank 2 has not answered for 7 s" in text and words in text, text
        assert ("zc.join" in text) == ("raised" not in text)


@pytest.mark.parametrize("has_group", [True, False])
def test_a_rank_without_a_group_has_left_those_that_have_one(has_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all have destroyed theirs, one may compute for longer than others wait."""
    waiting = Waiting(monkeypatch, timeout=600)
    waiting.publish = lambda rank, plain=waiting.publish: plain(rank, has_left=rank == 2)  # type: ignore[misc]
    with mock.patch.object(dist, "is_initialized", return_value=has_group):
        text = str(waiting.verdict(20, answer=(1, 2, 3)))
    assert "rank 2 has not answered for 7 s (its program has called" in text if has_group else text == "None"


def test_a_rank_that_is_late_for_the_second_model_has_not_closed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, timeout=600)
    second = Journal(waiting.watch, range(4), 2, 600)
    second.waits[2] = waiting.journal.waits.pop(1)
    waiting.publish = lambda rank, plain=waiting.publish: plain(rank, newest={"0_1_2_3": 1})  # type: ignore[misc]
    assert waiting.verdict(500, answer=(1, 2, 3)) is None and not second.has_failed


def test_the_farewell_says_how_the_program_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"its program came to its end": None, "its program raised ValueError: odd": ValueError("odd")}
    for words, error in ends.items():
        store = Shelf()
        ending = watch.Watch(3, store)
        monkeypatch.setattr(watch, "_ALL", {ending})
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        watch._say_farewell()
        assert store.items[f"left/3/{store.items['watch/3']}"] == words


def test_a_farewell_that_comes_late_is_not_that_of_the_next_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank drops its last model and compiles another. The first watch's thread may be slower than that, and a rank
    with the second model was then called lost after 6 s in place of the timeout."""
    waiting = Waiting(monkeypatch, timeout=600)
    may_end = threading.Event()

    class Slow(Shelf):
        def set(self, key: str, value: str) -> None:
            if key.startswith("left/"):
                may_end.wait()
            super().set(key, value)

    store = Slow()
    store.items = waiting.store.items
    first = watch.Watch(2, store)
    first.end("it closed or dropped its compiled model", seconds=0.0)
    second = watch.Watch(2, waiting.store)
    may_end.set()
    first._thread.join()
    assert waiting.verdict(30, answer=(1, 3)) is None
    second.end("its program came to its end")
    assert "its program came to its end" in str(waiting.verdict(20, answer=(1, 3)))


def test_ranks_that_all_stand_are_named_before_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, timeout=600)
    for second in range(40):
        waiting.now += 1
        for rank in (1, 2, 3):
            waiting.publish(rank, [waiting.journal.name, f"exchange {rank}", second + 1.0, False])
        waiting.watch.tick()
        assert waiting.journal.has_failed == (second >= 20), second
    text = str(waiting.journal.error())
    assert "out of step, for 20 s" in text and text.count("rank 2 stands in exchange 2") == 1


@pytest.mark.parametrize(
    ("place", "words", "others"),
    [
        (["0_1_2_3/1", "saving here", True], ["Every rank must make this call, or none: saving here"], ["zc.join"]),
        (["", "torch.distributed.all_reduce (a.py:1)", True], ["must make this call, or none: torch", "zc.join"], []),
        (["0_1_2_3/1", "end a backward", False], ["the same backwards and updates", "zc.join"], ["this call"]),
    ],
)
def test_the_advice_is_for_what_ranks_stand_in(
    place: list[object], words: list[str], others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch, timeout=5)
    waiting.publish = lambda rank, plain=waiting.publish: plain(rank, [*place[:2], 6.0, place[2]])  # type: ignore[misc]
    text = str(waiting.verdict(20, answer=(1, 2, 3)))
    assert all(word in text for word in words) and not any(word in text for word in others), text


def test_a_collective_after_a_backward_that_raised_is_named_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank in the collective can't raise the verdict there, so it logs it."""
    waiting = Waiting(monkeypatch, timeout=5)
    place = "torch.distributed.all_reduce (a.py:1)"
    monkeypatch.setattr(watch, "collective_of_the_caller", lambda: place)
    there = watch_of(waiting.store, rank=2)
    journal = Journal(there, range(4), 1, 5)
    journal.has_raised = lambda: True
    waiting.store.set("alarm", "0")
    there.look()
    assert json.loads(waiting.store.items["state/2"])["has_raised"]
    plain = waiting.publish
    waiting.publish = lambda rank: plain(rank, ["", place, 6.0, True], has_raised=rank == 2)  # type: ignore[method-assign]
    text = str(waiting.verdict(20, answer=(1, 2, 3)))
    assert "A backward raised on rank 2" in text and "optimizer.zero_grad() there" in text and not caplog.text
    there.look()
    assert f"rank 2 stands in {place}" in caplog.text and "A backward raised on rank 2" in caplog.text


def test_a_rank_that_stops_after_a_backward_that_raised_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that calls zc again in time, or that waits for others."""
    waiting = Waiting(monkeypatch, timeout=60)
    plain, raised, waits = waiting.publish, [True], list[object]()
    waiting.publish = lambda rank: plain(rank, *waits, has_raised=raised[0] and rank == 2)  # type: ignore[method-assign]
    assert waiting.verdict(60, answer=(1, 2, 3)) is None
    raised[0] = False
    assert waiting.verdict(1, answer=(1, 2, 3)) is None
    raised[0] = True
    assert waiting.verdict(60, answer=(1, 2, 3)) is None
    waits.append([waiting.journal.name, "('reduce', 0)", 1.0, False])
    assert waiting.verdict(100, answer=(1, 2, 3)) is None
    waits.clear()
    text = str(waiting.verdict(70, answer=(1, 2, 3)))
    assert "RankLostError: rank 2 has" in text and "a backward raised there" in text and "zero_grad()" in text, text


def test_a_handler_may_wait_inside_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler that had saved, or failed to, ended its rank with a KeyError."""
    journal, seen = Waiting(monkeypatch, 600).journal, list[object]()

    def handles(seconds: float | None) -> bool:
        journal.wait(lambda seconds: True, "inner")
        seen.extend(wait.entry for thread, wait in journal.waits.items() if thread == threading.get_ident())
        return True

    journal.wait(handles, "outer")
    assert seen == ["outer"] and threading.get_ident() not in journal.waits


def test_the_log_says_who_is_late(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each wait: a program that keeps its model and has left the loop looks like one that reads data."""
    waiting = Waiting(monkeypatch, timeout=60)
    assert waiting.verdict(60, answer=(1, 2, 3)) is None and not caplog.text
    for number in (1, 2):
        assert waiting.verdict(100, answer=(1, 2, 3)) is None
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == number and "rank 0 has waited for 61 s in ('reduce', 0)" in said[-1], said
        assert "are ranks 1, 2, 3" in said[-1] and "its program has left the loop" in said[-1]
        waiting.journal.waits[1] = Wait(("reduce", 0), waiting.now, False)


def test_garbage_is_collected_where_others_wait_and_this_rank_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a model that this rank has dropped. More seldom each time, since the rank may be late instead."""
    waiting, ticks = Waiting(monkeypatch, timeout=600), list[float]()
    monkeypatch.setattr(watch.gc, "collect", lambda: ticks.append(waiting.now - begun))
    waiting.verdict(30, answer=(1, 2, 3))
    assert not ticks, "it waits itself"
    wait = waiting.journal.waits.pop(1)
    for number in range(2):
        waiting.verdict(2, answer=(1, 2, 3))  # nobody waits
        begun, ticks[:] = waiting.now, []
        waiting.store.set("alarm", "1")
        waiting.verdict(30, answer=(1, 2, 3))
        assert ticks == [4.0, 7.0, 13.0, 25.0], (number, ticks)
        waiting.store.delete_key("alarm")
    waiting.journal.waits[1] = wait


def _raises(rank: int, world_size: int) -> list[bool]:
    """Job: whether the watch hears that a backward raised: before it, after it, and after zero_grad."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = zc.compile(model, torch.optim.SGD(model.parameters()), backend="eager", bucket_nbytes=4)
    journal = zc.registry.sharded(model).runtime.group.journal
    assert journal is not None
    heard = [journal.has_raised()]
    hidden = model[0](torch.ones(2, 4))
    hidden.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model[1](hidden).sum().backward()
    heard.append(journal.has_raised())
    optimizer.zero_grad()
    return [*heard, journal.has_raised()]


def test_the_watch_hears_of_a_backward_that_raised() -> None:
    assert run_ranks(_raises, 2) == [[False, True, False]] * 2


def test_two_models_whose_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in model 1, the others in model 2: each model's own waits look like those of late ranks."""
    waiting = Waiting(monkeypatch, timeout=5)
    second = Journal(waiting.watch, range(4), 2, 5)
    for _ in range(10):
        waiting.now += 1
        for rank in (1, 2, 3):
            waiting.publish(rank, [second.name, "reduce", waiting.now - 1000, False])
        waiting.watch.tick()
    text = str(waiting.journal.error())
    assert "rank 0 stands in ('reduce', 0) (of model 1)" in text and "rank 3 stands in reduce (of model 2)" in text
    assert second.has_failed and str(second.error()) == text


def test_ranks_that_wait_for_one_that_computes_are_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits in a model that it has with rank 7 alone, which answers and waits for nobody."""
    waiting = Waiting(monkeypatch, timeout=5)
    for _ in range(60):
        waiting.now += 1
        waiting.publish(1, ["1_7/1", "reduce", waiting.now - 1000, False])
        waiting.publish(2, [waiting.journal.name, "another", waiting.now - 1000, False])
        waiting.publish(3, [waiting.journal.name, "another", waiting.now - 1000, False])
        waiting.publish(7)
        waiting.watch.tick()
    assert not waiting.journal.has_failed


@pytest.mark.parametrize(
    ("failure", "seconds"), [(dist.DistNetworkError("reset"), 6), (KeyError("state"), 30), (ValueError("json"), 30)]
)
def test_a_watch_that_can_not_look_ends_no_run_before_its_patience(
    failure: Exception, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that does not answer once is asked again; a fault of the watch's own ends a wait by the timeout only."""
    waiting = Waiting(monkeypatch, timeout=30)
    for _ in range(3):  # for a moment
        waiting.store.failure = failure
        assert waiting.verdict(5, answer=()) is None
        waiting.store.failure = None
        assert waiting.verdict(2, answer=(1, 2, 3)) is None
    waiting.store.failure = failure
    assert waiting.verdict(seconds, answer=()) is None
    assert ("the store that the ranks share is gone" if seconds == 6 else "the watch") in str(waiting.verdict(1, ()))


def test_the_timeout_is_the_environments_or_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZC_RANK_TIMEOUT", raising=False)
    assert patience(None) == 600 and patience(timedelta(seconds=90)) == 90
    monkeypatch.setenv("ZC_RANK_TIMEOUT", "7")
    assert patience(timedelta(seconds=90)) == 7


def test_the_watch_looks_while_the_program_waits_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the store is one connection: its next call waits until this one is answered."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(torch_private, "default_store", lambda: server)
    own, is_own = torch_private.own_store()
    with mock.patch.object(watch.process, "start_thread"):
        waiting = Journal(watch.Watch(0, dist.PrefixStore("zc", own)), range(2), 1, 600)
    looked = threading.Event()
    waiter = threading.Thread(target=server.wait, args=(["a key"], timedelta(seconds=60)), daemon=True)
    waiter.start()
    waiting.waits[1] = Wait(("reduce", 0), 0.0, False)  # for long
    watcher = threading.Thread(target=lambda: (waiting.watch.look(), looked.set()), daemon=True)
    watcher.start()
    assert looked.wait(90) and waiter.is_alive() and is_own
    dist.TCPStore("127.0.0.1", server.port, is_master=False).set("a key", "")
    waiter.join()


def _shared(rank: int, world_size: int) -> str:
    """Job: a store that can't be cloned."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        plain = torch_private.default_store
        patch.setattr(torch_private, "own_store", lambda: (plain(), False))
        said = pytest.warns(UserWarning, match="can't be connected to twice") if rank == 0 else contextlib.nullcontext()
        with said:  # by rank 0 for all
            zc.compile(model, optimizer, backend="eager")
    return zc.explain(model).sections["notes"]


def test_a_store_that_has_one_connection_is_said() -> None:
    for notes in run_ranks(_shared, 2):
        assert notes.count("can't be connected to twice") == 1


def test_a_process_that_has_ended_is_known_by_a_rank_of_its_host() -> None:
    """Also one that nobody has waited for yet, and one whose number another process has now."""
    store = Shelf()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        watch.publish_process(store, 0)
        here, _, began = json.loads(store.items["process/0"])
        fields = Path(f"/proc/{child.pid}/stat").read_text().split()
        store.items["process/1"] = json.dumps([here, str(child.pid), fields[21]])
        store.items["process/2"] = json.dumps([here, str(child.pid), began])
        assert [watch.has_ended(store, rank) for rank in range(4)] == [False, False, True, False]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert watch.has_ended(store, 1)
    assert watch.has_ended(store, 1)
    store.items["process/1"] = json.dumps(["another host", str(child.pid), fields[21]])
    assert not watch.has_ended(store, 1)
