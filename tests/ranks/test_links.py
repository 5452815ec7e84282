"""Sockets between the ranks of a host, in one process: order, size, threads, and ends; and the order of hosts."""

from __future__ import annotations

import os
import socket
import threading
import time
from unittest import mock

import pytest
import torch

from zc.planning.plan import Topology, flat
from zc.ranks import hosts, neighbours
from zc.ranks.neighbours import Links, Neighbours


def test_hosts_and_their_order() -> None:
    assert hosts.topology_of(["a"] * 4) == (Topology(1, 4), None)
    assert hosts.topology_of(["a", "a", "b", "b"]) == (Topology(2, 2), None)
    topology, why = hosts.topology_of(["a", "b", "a", "b"])
    assert topology == flat(4) and why is not None and "do not have consecutive numbers" in why
    topology, why = hosts.topology_of(["a", "a", "b"])
    assert topology == flat(3) and why is not None and "hosts have 2, 1 ranks" in why
    assert Topology(2, 3).neighbours(4) == (3, 5) and Topology(2, 3).host_of(2) == 0


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
    assert other.receive(0, 8, len(large), 15) == large
    assert other.receive(0, 7, 5, 15) == b"first" and other.receive(0, 7, 5, 15) == b"later"
    assert other.receive(0, 9, 5, 15) == b"other" and other.receive(0, 5, 0, 15) == b""
    assert other.receive(0, 7, 5, 0.05) is None


def test_two_ranks_that_send_more_than_a_socket_takes_do_not_stand_still() -> None:
    one, other = _pair()
    large = bytes(range(256)) * 8000
    received: dict[int, bytes | None] = {}

    def exchange(links: Links, peer: int) -> None:
        links.send(peer, 4, large)
        received[peer] = links.receive(peer, 4, len(large), 15)

    threads = [threading.Thread(target=exchange, args=pair) for pair in ((one, 1), (other, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert received == {0: large, 1: large}


def test_two_threads_take_each_its_own() -> None:
    one, other = _pair()
    received: dict[int, bytes | None] = {}

    def take(key: int) -> None:
        received[key] = other.receive(0, key, 4, 15)

    threads = [threading.Thread(target=take, args=(key,)) for key in range(8)]
    for thread in threads:
        thread.start()
    for k in (3, 1, 7, 0, 2, 6, 5, 4):
        one.send(1, k, b"%4d" % k)
    for thread in threads:
        thread.join(10)
    assert received == {k: b"%4d" % k for k in range(8)}


@pytest.mark.parametrize("num_unread", [0, 2])
def test_a_rank_that_ends_is_heard_of_at_once_but_what_it_sent_counts(num_unread: int) -> None:
    """Linux reports a reset before the messages of a rank that has closed with unread ones."""
    one, other = _pair()
    for _ in range(num_unread):
        other.send(0, 5, b"unread")
    one.send(1, 3, b"well")
    one.send(1, 3, b"last")
    one.close()
    assert other.receive(0, 3, 4, 15) == b"well"
    assert other.receive(0, 3, 4, 15) == b"last"
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 has closed its connection"):
        other.receive(0, 3, 4, 15)
    assert time.monotonic() - started < 5
    other.send(0, 3, b"x")  # nobody is there; the next wait is what tells


def test_a_failure_that_the_watch_has_found_ends_a_wait() -> None:
    one, other = _pair()
    other.raise_failure = mock.Mock(side_effect=ValueError("out of step"))
    with pytest.raises(ValueError, match="out of step"):
        other.receive(0, 3, 4, 15)
    assert one.peers == (1,)


def test_a_sum_after_one_that_was_cut_off_takes_nothing_of_that_one() -> None:
    """Ctrl-C in a norm on one rank, which goes on: it took the other's old value, and the ranks had two sums."""
    links = _pair()
    ranks = [Neighbours(k, own, {1 - k: 0}, mock.Mock()) for k, own in enumerate(links)]
    values = [[torch.tensor([float(10 * rank + call)]) for call in range(2)] for rank in range(2)]
    first, later = ([ranks[k].reduce_(1, values[k][call], torch.add) for k in range(2)] for call in range(2))
    _, of_rank_1 = first  # rank 0 does none of these steps
    for step in (*of_rank_1, *later[0], *later[1]):
        assert step(15)
    assert [float(own[1]) for own in values] == [12.0, 12.0] and float(values[1][0]) == 10.0


def test_what_differs_in_size_is_no_read() -> None:
    one, other = _pair()
    reader = neighbours.Reader()
    here = Neighbours(0, one, {1: os.getpid()}, reader)
    there = Neighbours(1, other, {0: os.getpid()}, reader)
    sent, taken = torch.arange(6.0), torch.zeros(4)
    here.signal_full(0, 0, sent)
    places: dict[int, bytes] = {}
    assert there.await_full(0, 0, places)(None)
    with pytest.raises(RuntimeError, match="rank 0 offers 24 bytes, and rank 1 expects 16"):
        there.read(taken, 0, places[0])
    there.name_ranks([4, 7], None)  # the second row of a mesh: errors name ranks as the program numbers them
    with pytest.raises(RuntimeError, match="rank 4 offers 24 bytes, and rank 7 expects 16"):
        there.read(taken, 0, places[0])
    there._pids = {0: 4194304}
    with pytest.raises(RuntimeError, match="memory of rank 4 can't be read by rank 7"):
        there.read(sent, 0, places[0])
    here.links.send(1, 9, b"abc")
    with pytest.raises(RuntimeError, match="rank 4 sent 3 bytes where 4 were expected"):
        there.links.receive(0, 9, 4, 15)
    one.close()
    with pytest.raises(RuntimeError, match="rank 4 has closed its connection"):
        there.links.receive(0, 9, 4, 15)
    with pytest.raises(OSError, match="process 4194304 can't be read"):
        reader.read_into(taken.data_ptr(), 4194304, sent.data_ptr(), taken.nbytes)
