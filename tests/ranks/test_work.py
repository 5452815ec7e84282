"""Waits, in one process with stand-in works: a work that completes just after a time limit has not failed."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from watched import Shelf, journal_of

import zc
from zc.ranks import journal
from zc.ranks.control import backend_of, host_backend
from zc.ranks.exchanges import Call, Exchanges, Work, collective, messages
from zc.ranks.group import Group
from zc.ranks.journal import EXCHANGES, GATHER, TO_OWNERS
from zc.ranks.neighbours import Links


class AtTheEdge:
    """As torch's works wait: the time limit passes, the work completes, and then the error goes to the caller."""

    def __init__(self, num_limits: int, failure: str = "") -> None:
        self.left, self.failure = num_limits, failure

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.left > 0:
            assert timeout is not None
            self.left -= 1
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.left == 0


class InTime:
    """A work of which another thread sets the event; gloo's sends and receives know no time limit."""

    def __init__(self, has_limit: bool) -> None:
        self.event, self.has_limit = threading.Event(), has_limit

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.event.wait(timeout.total_seconds() if timeout is not None and self.has_limit else None):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.event.is_set()


@pytest.mark.parametrize("num_limits", [1, 2, 5])
def test_a_work_that_completes_after_its_time_limit_has_not_failed(num_limits: int) -> None:
    for _ in range(1000):
        watched = journal_of(Shelf())
        Work("reduce", collective(AtTheEdge(num_limits)), journal=watched).wait()  # type: ignore[arg-type]
        assert watched.network_error is None and not watched.waits


def test_its_own_error_is_raised_also_where_that_is_a_time_limit() -> None:
    """gloo's text for a work whose own, long time limit has passed."""
    work = collective(AtTheEdge(1, failure="Timed out waiting 1800000ms for recv operation to complete"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="1800000ms"):
        work(0.1)


def _link(seconds: Callable[[], float]) -> tuple[Callable[[float | None], bool], threading.Thread]:
    one, other = (Links({0: each}) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    def send() -> None:
        time.sleep(seconds())
        one.send(0, 1, b"here")

    return lambda limit: other.receive(0, 1, 4, limit) == b"here", threading.Thread(target=send)


def _work(has_limit: bool, seconds: Callable[[], float]) -> tuple[Any, threading.Thread]:
    work: Any = InTime(has_limit)

    def end() -> None:
        time.sleep(seconds())
        work.event.set()

    return collective(work) if has_limit else messages([work]), threading.Thread(target=end)


SHAPES: dict[str, Callable[[Callable[[], float]], tuple[Any, threading.Thread]]] = {
    "a collective": lambda seconds: _work(True, seconds),
    "sends and receives": lambda seconds: _work(False, seconds),
    "a message of a neighbour": _link,
    "a call": lambda seconds: (Call(lambda: time.sleep(seconds())), threading.Thread()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_thousands_that_complete_around_the_edges_of_slices(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SLICE_S", 0.0005)
    rng, watched = random.Random(0), journal_of(Shelf())
    for _ in range(250):
        step, thread = SHAPES[shape](lambda: 0.0005 * rng.randrange(1, 3) + rng.uniform(-5e-5, 5e-5))
        thread.start()
        Work("reduce", step, journal=watched).wait()
        thread.join()
    assert watched.network_error is None and not watched.has_failed


def test_an_error_of_one_exchange_is_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "TICK_S", 0.0)
    watched = journal_of(Shelf(), timeout=0.01)
    with pytest.raises(RuntimeError, match="connection reset"):
        Work("reduce", collective(AtTheEdge(0, "connection reset by peer")), journal=watched).wait()  # type: ignore[arg-type]
    assert watched.network_error is None and not watched.is_stalled(time.monotonic())


def test_a_verdict_ends_a_wait() -> None:
    watched = journal_of(Shelf())
    threading.Timer(0.05, watched.fail, (zc.RankLostError, "rank 1 is gone")).start()
    with pytest.raises(zc.RankLostError, match="rank 1 is gone"):
        Work("reduce", messages([InTime(False)]), journal=watched).wait()  # type: ignore[list-item]


# --- messages ---


class Scarce:
    """A socket that has no memory for each second message."""

    def __init__(self, plain: socket.socket) -> None:
        self.plain, self.count = plain, 0

    def send(self, piece: bytes) -> int:
        self.count += 1
        if self.count % 2:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self.plain.send(piece)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def test_a_message_is_sent_again_where_the_kernel_had_no_memory() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    scarce: Any = Scarce(one)
    here, there = Links({1: scarce}), Links({0: other})
    large = bytes(range(256)) * 400  # of several pieces
    here.send(1, 3, large)
    here.send(1, 3, b"next")
    assert there.receive(0, 3, len(large), 15) == large and there.receive(0, 3, 4, 15) == b"next"


def test_a_message_of_another_size_is_refused() -> None:
    one, other = (Links({0: each}) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    one.send(0, 3, b"four")
    with pytest.raises(RuntimeError, match="sent 4 bytes where 8 were expected"):
        other.receive(0, 3, 8, 15)


def test_ranks_that_read_each_others_memory_send_no_messages() -> None:
    """There is no process group that could carry one."""
    ranks, calls = Group.__new__(Group), list[str]()
    Exchanges.__init__(ranks, 0, 2, None)
    ranks._by_memory = True
    ranks._neighbours = SimpleNamespace(  # type: ignore[assignment]
        read_tensors=lambda kind, *_: calls.append(EXCHANGES[kind]) or (), reduce_=lambda *_: calls.append("sum") or ()
    )
    rows = [torch.ones(2), torch.ones(2)]
    ranks.all_gather(torch.ones(4), rows[0], GATHER, 0).wait()
    ranks.exchange_pieces([(1, rows[1])], [(1, rows[0])], TO_OWNERS, 0).wait()
    ranks.sum_(rows[0])
    assert calls == [GATHER, TO_OWNERS, "sum"]


def test_a_group_s_backend_is_that_of_the_tensors_device(tmp_path: Path) -> None:
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert backend_of(None, "cpu") == host_backend(None) == "gloo" and backend_of(None, "cuda") is None
    finally:
        dist.destroy_process_group()
