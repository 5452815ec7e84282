"""Ranks of one host that read each other's memory: the same bits as by messages, and a named way out where the host
refuses; and the sockets between them."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from training_runs import Run, environment, zc_weights

import zc
from zc.planning.topology import Topology, flat
from zc.ranks import memory, topology
from zc.ranks.links import Links
from zc.ranks.neighbours import Neighbours

RUNS = [
    Run("mlp", stage=2, backend="aot_eager"), Run("mlp", stage=1, backend="aot_eager"),
    Run("gpt_tied", stage=2, backend="eager"), Run("gpt_tied", stage=1, backend="eager"),
]  # fmt: skip


def _counted(rank: int, world_size: int, run: Run, host_memory: str) -> tuple[dict[str, Tensor], int]:
    """Job: the weights, and how many bytes this rank has read of the others' memory."""
    nbytes: list[int] = []

    def counting(self: memory.Reader, *given: int) -> None:
        nbytes.append(given[-1])
        _READ(self, *given)

    memory.Reader.read_into = counting  # type: ignore[method-assign, assignment]
    try:
        with environment(ZC_HOST_MEMORY=host_memory):
            return zc_weights(rank, world_size, run), sum(nbytes)
    finally:
        memory.Reader.read_into = _READ  # type: ignore[method-assign]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case} {run.stage} {run.backend}")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_bits_as_by_messages(run: Run, world_size: int) -> None:
    read, sent = (run_ranks(_counted, world_size, run, host_memory) for host_memory in "10")
    for (found, nbytes), (wanted, none) in zip(read, sent, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in found) and found.keys() == wanted.keys()
        assert nbytes > sum(value.nbytes for value in found.values()) and none == 0


def _ways(rank: int, world_size: int, refused_on: int | None, how: str) -> tuple[str, str, list[str]]:
    """Job: what explain says of the plan and in its notes, after a step; and files of zc's in /dev/shm."""
    if rank == refused_on:
        if how == "kernel":  # as where a sandbox forbids the call
            memory.Reader.read_into = _forbidden  # type: ignore[method-assign]
        elif how == "no such call":
            topology.Reader = _no_reader  # type: ignore[assignment, misc]
        elif how == "another memory":  # a process of this number is there, and is not the rank
            memory.Reader.read_into = _of_zeros  # type: ignore[method-assign]
        elif how == "another process":  # what it has announced is another one's number, as in another PID namespace
            topology.Listener = _elsewhere  # type: ignore[assignment, misc]
    before = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        zc.compile(model, optimizer, backend="eager")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    finally:
        memory.Reader.read_into, topology.Reader = _READ, memory.Reader  # type: ignore[method-assign, misc]
        topology.Listener = _LISTENER  # type: ignore[misc]
    found = zc.explain(model).sections
    now = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    return found["plan"], found["notes"], sorted(now - before)


_READ, _LISTENER = memory.Reader.read_into, topology.Listener


def _forbidden(self: memory.Reader, out: int, pid: int, address: int, nbytes: int) -> None:
    raise PermissionError(1, f"process {pid} can't be read: Operation not permitted")


def _of_zeros(self: memory.Reader, out: int, pid: int, address: int, nbytes: int) -> None:
    ctypes.memset(out, 0, nbytes)


def _no_reader() -> Any:
    raise AttributeError("undefined symbol: process_vm_readv")


def _elsewhere() -> Any:
    made = _LISTENER()
    made.address = made.address._replace(pid=os.getppid())
    return made


def test_explain_says_which_way() -> None:
    for plan, notes, files in run_ranks(_ways, 2, None, ""):
        assert "1 host of 2, which read each other's memory; reductions: read from the other ranks' memory" in plan
        assert notes == "none" and not files


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kernel", "rank 1: [Errno 1] process"),
        ("no such call", "rank 1: undefined symbol: process_vm_readv"),
        ("another memory", "is not rank 0 (another PID namespace)"),
        ("another process", "has connected as rank 1, which it is not"),
    ],
)
def test_where_it_is_refused_all_ranks_send_messages(how: str, says: str) -> None:
    """One rank that can't is enough; said once, with the reason, on every rank."""
    for plan, notes, _ in run_ranks(_ways, 2, 1, how):
        assert "1 host of 2; reductions: messages; gathers of weights: messages" in plan
        assert "don't read each other's memory" in notes and says in notes


def test_hosts_and_their_order() -> None:
    assert topology.order(["a"] * 4) == (Topology(1, 4), None)
    assert topology.order(["a", "a", "b", "b"]) == (Topology(2, 2), None)
    found, why = topology.order(["a", "b", "a", "b"])
    assert found == flat(4) and why is not None and "don't follow each other" in why
    found, why = topology.order(["a", "a", "b"])
    assert found == flat(3) and why is not None and "hosts have 2, 1 ranks" in why
    assert Topology(2, 3).neighbours(4) == (3, 5) and Topology(2, 3).host_of(2) == 0


# --- links ---


def _pair() -> tuple[Links, Links]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Links({1: one}), Links({0: other})


def test_links_that_nobody_holds_are_closed() -> None:
    """By themselves: a model that is dropped leaves no open socket to the collector."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        Links({1: one})
        assert one.fileno() == -1


def test_messages_of_a_key_keep_their_order_and_no_others_wait() -> None:
    one, other = _pair()
    large = bytes(range(256)) * 400  # of several pieces
    for key, payload in ((7, b"first"), (9, b"other"), (7, b"later"), (8, large), (5, b"")):
        one.send(1, key, payload)
    assert other.receive(0, 8, len(large), timeout=15) == large
    assert other.receive(0, 7, 5, timeout=15) == b"first" and other.receive(0, 7, 5, timeout=15) == b"later"
    assert other.receive(0, 9, 5, timeout=15) == b"other" and other.receive(0, 5, 0, timeout=15) == b""
    with pytest.raises(RuntimeError, match="timed out"):
        other.receive(0, 7, 5, timeout=0.05)


def test_two_ranks_that_send_more_than_a_socket_takes_do_not_stand_still() -> None:
    one, other = _pair()
    large = bytes(range(256)) * 8000
    found: dict[int, bytes] = {}

    def exchange(links: Links, peer: int) -> None:
        links.send(peer, 4, large)
        found[peer] = links.receive(peer, 4, len(large), timeout=15)

    threads = [threading.Thread(target=exchange, args=pair) for pair in ((one, 1), (other, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: large, 1: large}


def test_two_threads_take_each_its_own() -> None:
    one, other = _pair()
    found: dict[int, bytes] = {}

    def take(key: int) -> None:
        found[key] = other.receive(0, key, 4, timeout=15)

    threads = [threading.Thread(target=take, args=(key,)) for key in range(8)]
    for thread in threads:
        thread.start()
    for k in (3, 1, 7, 0, 2, 6, 5, 4):
        one.send(1, k, b"%4d" % k)
    for thread in threads:
        thread.join(10)
    assert found == {k: b"%4d" % k for k in range(8)}


def test_a_rank_that_ends_is_heard_of_at_once_but_what_it_sent_counts() -> None:
    one, other = _pair()
    one.send(1, 3, b"last")
    one.close()
    assert other.receive(0, 3, 4, timeout=15) == b"last"
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 has closed its connection"):
        other.receive(0, 3, 4, timeout=15)
    assert time.monotonic() - started < 5
    other.send(0, 3, b"x")  # nobody is there; the next wait is what tells


def test_a_failure_that_the_watch_has_found_ends_a_wait() -> None:
    one, other = _pair()
    other.failure = lambda: ValueError("out of step")
    with pytest.raises(ValueError, match="out of step"):
        other.receive(0, 3, 4, timeout=15)
    assert one.peers == (1,)


def test_what_differs_in_size_is_no_read() -> None:
    one, other = _pair()
    reader = memory.Reader()
    here = Neighbours(0, one, {1: os.getpid()}, reader)
    there = Neighbours(1, other, {0: os.getpid()}, reader)
    given, taken = torch.arange(6.0), torch.zeros(4)
    here.signal_full(0, 0, given)
    place = there.await_full(0, 0)
    place.wait()
    with pytest.raises(RuntimeError, match="rank 0 gives 24 bytes, and rank 1 takes 16"):
        there.read(taken, 0, place.found[0])
    with pytest.raises(OSError, match="process 4194304 can't be read"):
        reader.read(taken, 4194304, given.data_ptr())
