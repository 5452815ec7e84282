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

import nccl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import zc
from zc import torch_private
from zc.ranks import process, watch
from zc.ranks.comm import Group
from zc.ranks.control import patience
from zc.ranks.watch import RankCheck


class Shelf:
    """A store."""

    def __init__(self) -> None:
        self.items: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.items[key] = value

    def get(self, key: str) -> bytes:
        return self.items[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.items for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.items.setdefault(key, desired).encode()

    def delete_key(self, key: str) -> bool:
        return self.items.pop(key, None) is not None


class Never:
    """An exchange that other ranks do not come to."""

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


class Waiting:
    """Rank 0 of four waits, and looks at the store once a second of a clock that the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch, timeout: float) -> None:
        self.now = 1000.0
        patch.setattr(watch.time, "monotonic", lambda: self.now)
        patch.setattr(watch.threading, "Thread", _NoThread)
        self.store = Shelf()
        self.check = RankCheck(0, 4, self.store, str, timeout)
        self.check._waits[1] = ("reduce", 0), self.now

    def goes_on(self, seconds: int, answer: tuple[int, ...]) -> str | None:
        for _ in range(seconds):
            self.now += 1
            for rank in answer:
                state = {"beat": self.now, "epoch": 0, "journal": [[], 0, 0], "waits": {}, "elsewhere": None}
                self.store.set(f"state/{rank}", json.dumps(state))
            self.check.look()
            if self.check.has_failed:
                return str(self.check.error())
        return None


class _NoThread:
    def __init__(self, **options: object) -> None: ...

    def start(self) -> None: ...


def test_a_rank_that_can_not_answer_for_minutes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, timeout=600)
    assert waiting.goes_on(30, answer=(1, 2, 3)) is None
    assert waiting.goes_on(590, answer=(1, 3)) is None
    assert waiting.goes_on(3, answer=(1, 2, 3)) is None
    assert "rank 2 has not answered for 601 s" in str(waiting.goes_on(700, answer=(1, 3)))


def test_a_broken_connection_names_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: of a rank that was killed and one that keeps Python's lock nobody knows which is which."""
    waiting = Waiting(monkeypatch, timeout=600)
    assert waiting.goes_on(5, answer=(1, 2, 3)) is None
    waiting.check._network_error = "connection reset by peer"
    found = str(waiting.goes_on(20, answer=(2,)))
    assert "ranks 1, 3 have not answered for 7 s" in found and "connection reset by peer" in found


def test_ranks_that_all_stand_are_named_before_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, timeout=600)
    for second in range(40):
        waiting.now += 1
        for rank in (1, 2, 3):
            waits = {f"exchange {rank}": second + 1.0}
            state = {"beat": second, "epoch": 0, "journal": [[], 0, 0], "waits": waits, "elsewhere": None}
            waiting.store.set(f"state/{rank}", json.dumps(state))
        waiting.check.look()
        assert waiting.check.has_failed == (second >= 20), second
    assert "out of step, for 20 s" in str(waiting.check.error())


def test_the_timeout_is_the_environments_or_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZC_RANK_TIMEOUT", raising=False)
    assert patience(None) == 600 and patience(timedelta(seconds=90)) == 90
    monkeypatch.setenv("ZC_RANK_TIMEOUT", "7")
    assert patience(timedelta(seconds=90)) == 7


def _timeouts(rank: int, world_size: int) -> list[float]:
    """Job: of a program's NCCL group, made without a timeout and with one; and of a compiled model on gloo."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        nccl.install(patch)
        patch.delenv("ZC_RANK_TIMEOUT", raising=False)
        model = nn.Linear(4, 4)
        zc.compile(model, torch.optim.SGD(model.parameters()), backend="eager")
        runtime = zc.registry.sharded(model).runtime
        assert runtime.group.check._store.underlying_store is not torch_private.default_store()
        assert runtime.notes == []
        for timeout, backend in ((None, "nccl"), (timedelta(minutes=3), "cpu:gloo,cuda:nccl")):
            ranks = Group(dist.new_group([0, 1], timeout=timeout, backend=backend))
            ranks.open_data(torch.device("cuda"))
            ranks.watch(runtime.plan, torch_private.own_store()[0])
            found.append(ranks.check.timeout)
            ranks.close()
        given = torch_private.timeout_of(dist.group.WORLD, "cpu")
        assert given is not None and runtime.group.check.timeout == given.total_seconds()
    return found


def test_a_group_on_nccl_has_its_timeout() -> None:
    assert run_ranks(_timeouts, 2) == [[600, 180]] * 2


def test_the_watch_looks_while_the_program_waits_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the store is one connection: its next call waits until this one is answered."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(torch_private, "default_store", lambda: server)
    own, is_own = torch_private.own_store()
    check = RankCheck(0, 2, dist.PrefixStore("zc", own), str, 600)
    check.close()
    looked = threading.Event()
    waiter = threading.Thread(target=server.wait, args=(["a key"], timedelta(seconds=60)), daemon=True)
    waiter.start()
    while not check._waits:
        check._waits[1] = ("reduce", 0), 0.0  # for long
    watcher = threading.Thread(target=lambda: (check.look(), looked.set()), daemon=True)
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
        process.tell_process(store, 0)
        here, _, began = json.loads(store.items["process/0"])
        fields = Path(f"/proc/{child.pid}/stat").read_text().split()
        store.items["process/1"] = json.dumps([here, str(child.pid), fields[21]])
        store.items["process/2"] = json.dumps([here, str(child.pid), began])
        assert [process.has_ended(store, rank) for rank in range(4)] == [False, False, True, False]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.has_ended(store, 1)
    assert process.has_ended(store, 1)
    store.items["process/1"] = json.dumps(["another host", str(child.pid), fields[21]])
    assert not process.has_ended(store, 1)
