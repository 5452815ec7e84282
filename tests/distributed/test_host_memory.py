"""Ranks of one host that read each other's memory: the same bits as by messages, and a named way out where the host
refuses; and the sockets between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_cases, run_ranks
from tiers import FULL, full_cases
from torch import Tensor, nn
from training_runs import Run, environment, message_of, zc_weights

import zc
from zc.engine.buffers import Buffers
from zc.engine.streams import ThreadStreams
from zc.ranks import hosts, neighbours

UPDATES = 5 if FULL else 2
RUNS = [
    Run(case, stage=stage, backend=backend, updates=UPDATES)
    for case, backend in (("mlp", "aot_eager"), ("gpt_tied", "eager")) for stage in (2, 1)
]  # fmt: skip


def _counted(rank: int, world_size: int, run: Run, host_memory: str) -> tuple[dict[str, Tensor], int]:
    """Job: the weights, and how many bytes this rank has read of the others' memory."""
    nbytes: list[int] = []

    def counting(self: neighbours.Reader, *arguments: int) -> None:
        nbytes.append(arguments[-1])
        _READ(self, *arguments)

    neighbours.Reader.read_into = counting  # type: ignore[method-assign, assignment]
    try:
        with environment(ZC_HOST_MEMORY=host_memory):
            return zc_weights(rank, world_size, run), sum(nbytes)
    finally:
        neighbours.Reader.read_into = _READ  # type: ignore[method-assign]


@pytest.mark.parametrize(("world_size", "number"), [(2, 0), (3, 3), *([(3, 1), (3, 2)] if FULL else [])])
@full_cases("2-0")
def test_the_same_bits_as_by_messages(world_size: int, number: int) -> None:
    read, sent = (run_ranks(_counted, world_size, RUNS[number], host_memory) for host_memory in "10")
    for (got, nbytes), (wanted, none) in zip(read, sent, strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in got) and got.keys() == wanted.keys()
        assert nbytes > sum(value.nbytes for value in got.values()) and none == 0


def _trained(rank: int, world_size: int, cuts: list[int], on: tuple[int, ...]) -> list[Tensor]:
    """Job: the weights after as many updates as ``cuts``. In each, at that place of the gathers on the ranks ``on``,
    Ctrl-C comes, and the loop goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=8)  # a bucket for each parameter
    left = [-1]  # places until it comes

    def cutting(call: Any, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == -1 and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return call(*arguments)

    places = [(neighbours.Links, "receive"), (neighbours.Links, "send"), (neighbours.Reader, "read_into")]
    for cut in cuts:
        optimizer.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).square().sum().backward()
        with contextlib.ExitStack() as stack:

            def begin(streams: ThreadStreams, at: int = cut, stack: contextlib.ExitStack = stack) -> Any:
                left[0] = at
                for cls, name in places if rank in on else ():
                    call = partialmethod(lambda self, call, *rest: cutting(call, self, *rest), getattr(cls, name))
                    stack.enter_context(mock.patch.object(cls, name, call))
                return _ON_CALLING_THREAD(streams)

            stack.enter_context(mock.patch.object(ThreadStreams, "on_calling_thread", begin))
            try:
                optimizer.step()
            except KeyboardInterrupt:
                left[0] = -2
        assert (left[0] == -2) == (rank in on), "it has come"
    return [param.detach().clone() for param in model.parameters()]


_ON_CALLING_THREAD = ThreadStreams.on_calling_thread


@pytest.mark.parametrize("on", [(0,), (0, 1)])
def test_ctrl_c_in_an_update_leaves_whole_weights(on: tuple[int, ...]) -> None:
    """The calling thread gathers, and other ranks wait for it. A loop that goes on read old weights, or parts."""
    cuts = [1, 2, 3, 4, 6, 9, 13]  # a bucket's places: send, receive, read, send, receive; not the first, of a send
    wanted = run_ranks(_trained, 2, cuts, ())
    for got, want in zip(run_ranks(_trained, 2, cuts, on), wanted, strict=True):
        assert all(map(torch.equal, got, want))


def _begun_again(rank: int, world_size: int, place: tuple[type, str], counts: bool) -> tuple[str, list[Tensor]]:
    """Job: what the second step() says where Ctrl-C came at ``place`` of the first one's boundary, on all ranks; and
    the weights of a loop that then clears its gradients."""
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zc.compile(model, optimizer, backend="eager", stage=1, overlap=False)  # the calling thread reduces

    def backward() -> None:
        with zc.no_sync(model):  # all of it is reduced at the boundary
            if counts:
                zc.count(model, 2)
            model(torch.full((1, 4), rank + 1.0)).sum().backward()

    backward()
    cls, name = place
    with mock.patch.object(cls, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(zc.ZcError) as refused:
        optimizer.step()
    optimizer.zero_grad()
    backward()
    optimizer.step()
    return str(refused.value), [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("place", "counts"),
    [((neighbours.Neighbours, "rows"), False), ((Buffers, "acc_copies"), True)],
    ids=["while it reduces", "while it divides by tokens"],
)
def test_ctrl_c_in_a_boundary_is_no_update(place: tuple[type, str], counts: bool) -> None:
    """A loop that caught it and called step() again had gradients reduced twice, or not divided."""
    for error, (weight, bias) in run_ranks(_begun_again, 2, place, counts):
        assert "optimizer.zero_grad()" in error
        by = 2.0 if counts else 1.0  # tokens of each rank; the mean over ranks, or the sum over 4 tokens
        assert torch.equal(weight, torch.full((4, 4), 1 - 1.5 / by)), weight
        assert bias.shape == (4,)


def _ways(rank: int, world_size: int, refused_on: int | None, how: str) -> tuple[str, str, list[str]]:
    """Job: what explain says of the plan and in its notes, after a step; and files of zc's in /dev/shm."""
    if rank == refused_on:
        if how == "kernel":  # as where a sandbox forbids the call
            neighbours.Reader.read_into = _forbidden  # type: ignore[method-assign]
        elif how == "no such call":
            hosts.Reader = _no_reader  # type: ignore[assignment, misc]
        elif how == "another memory":  # a process of this number is there, and is not the rank
            neighbours.Reader.read_into = _of_zeros  # type: ignore[method-assign]
        elif how == "another process":  # what it has announced is another one's number, as in another PID namespace
            hosts.Listener = _elsewhere  # type: ignore[assignment, misc]
    before = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        zc.compile(model, optimizer, backend="eager")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    finally:
        hosts.Reader, hosts.Listener = _READER, _LISTENER  # type: ignore[misc]
        neighbours.Reader.read_into = _READ  # type: ignore[method-assign]
    sections = zc.explain(model).sections
    now = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    return sections["plan"], sections["notes"], sorted(now - before)


_READER, _READ, _LISTENER = neighbours.Reader, neighbours.Reader.read_into, hosts.Listener


def _forbidden(self: neighbours.Reader, out: int, pid: int, address: int, nbytes: int) -> None:
    raise PermissionError(1, f"process {pid} can't be read: Operation not permitted")


def _of_zeros(self: neighbours.Reader, out: int, pid: int, address: int, nbytes: int) -> None:
    ctypes.memset(out, 0, nbytes)


def _no_reader() -> Any:
    raise AttributeError("undefined symbol: process_vm_readv")


def _elsewhere() -> Any:
    listener = _LISTENER()
    listener.address = listener.address._replace(pid=os.getppid())
    return listener


def test_explain_says_which_way() -> None:
    for plan, notes, files in run_ranks(_ways, 2, None, ""):
        assert "1 host of 2, which read each other's memory; reductions: read from the other ranks' memory" in plan
        assert notes == "none" and not files


def test_where_it_is_refused_all_ranks_send_messages() -> None:
    """One rank that can't is enough; said once, with the reason, on every rank."""
    reasons = {
        "kernel": "rank 1: [Errno 1] process",
        "no such call": "rank 1: undefined symbol: process_vm_readv",
        "another memory": "is not rank 0 (another PID namespace)",
        "another process": "has connected as rank 1, which it is not",
    }
    for (_, how), ranks in run_cases(_ways, 2, [(1, how) for how in reasons]):
        for plan, notes, _ in ranks:
            assert "1 host of 2; reductions: messages; gathers of weights: messages" in plan, how
            assert "messages instead of reading each other's memory" in notes and reasons[how] in notes, how


def _refused_later(rank: int, world_size: int) -> tuple[str, str]:
    """Job: from the second step on the kernel refuses rank 1's reads, as a policy that a container gets does."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")

    def run() -> None:
        for step in range(3):
            if rank == 1 and step == 1:
                neighbours.Reader.read_into = _forbidden  # type: ignore[method-assign]
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        return message_of(run)
    finally:
        neighbours.Reader.read_into = _READ  # type: ignore[method-assign]


def test_a_refusal_in_the_middle_of_a_run_is_named_on_every_rank() -> None:
    """It was a plain RuntimeError on one rank, and a lost rank without the reason on the other."""
    results = run_ranks(_refused_later, 2)
    assert results[0] == results[1] and results[0][0] == "RankLostError", results
    assert "the memory of rank 0 can't be read by rank 1" in results[0][1] and "ZC_HOST_MEMORY=0" in results[0][1]
