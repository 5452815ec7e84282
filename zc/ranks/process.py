"""zc's own process groups, and how its threads end: before the interpreter does, and each wait for that is bounded.

A thread that returns from C++ (a collective, a kernel, a call of the store) while the interpreter is torn down finds no
GIL to take. Python before 3.14 unwinds it with pthread_exit, through a destructor of pybind11 that is noexcept. Then
std::terminate ends the process with SIGABRT, after the traceback of a good message ("terminate called without an active
exception"). Ranks raise a named error at the same moment. So what a thread of one rank still waits for in gloo ends,
with an error, when the process of another rank ends: as a rule while the interpreter of the first one is torn down.

gloo can't be told to stop a wait, but a receive that times out ends all waits in its group (`torch_private.cut`). So at
exit groups are cut, and the threads that waited in them are joined.

zc's own process groups have unique names, and are closed only when all ranks agree. A group has about four descriptors
and three threads. Python's collector drops a model at a different moment on each rank, and closing a group on one rank
alone does harm. ``new_group(use_local_synchronization=True)`` names a group by the number of existing groups, so ranks
would wait for each other under two names. gloo's destructor also waits for started collectives. So the groups of
dropped models are set aside. The next `zc.compile` or `zc.close` of the same ranks closes them, the same ones on every
rank.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private

CUT_S = 5.0  # how long all threads together may take to end after their groups are cut

# threads that may be in C++, with the group of the caller's that each waits in; None: it waits in groups of zc's alone
_THREADS: weakref.WeakKeyDictionary[threading.Thread, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()
_GROUPS: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # zc's own
# lifetime: to the next `zc.compile`, of groups that can be cut. gloo's destructor waits for started collectives, which
# a lost rank never finishes.
_ABANDONED: list[dist.ProcessGroup] = []


def start_thread(
    target: Callable[..., None], args: tuple[Any, ...], name: str, group: dist.ProcessGroup | None = None
) -> threading.Thread:
    """Starts a daemon thread that is joined at exit. ``group``: the group in which it waits, if it is the caller's."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _THREADS[thread] = group
    thread.start()
    return thread


def close_abandoned() -> None:
    """Closes the groups of models whose ranks were out of step or gone: whoever still waits there gets an error. A
    program that has caught that error and compiles again would keep their threads and connections."""
    for group in list(_ABANDONED):
        if torch_private.cut(group):
            _ABANDONED.remove(group)
            with contextlib.suppress(ValueError):  # the program has destroyed all groups meanwhile
                dist.destroy_process_group(group)


def join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """At exit: waits until ``threads`` have done their work, for at most so many ``seconds`` in all. Cuts the groups in
    which no exchange completes, so that nobody waits there."""
    for group in _ABANDONED:
        torch_private.cut(group)
    _join(threads, seconds)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


@atexit.register
def _end_threads() -> None:
    """Of zc's functions that run at exit the last: modules whose threads finish something by themselves import this
    one, so theirs are registered later. In a child that was forked no thread is alive."""
    threads = [thread for thread in list(_THREADS) if thread.is_alive()]
    if threads:
        callers = {group for thread in threads if (group := _THREADS[thread]) is not None}
        for group in (*_GROUPS, *callers):
            torch_private.cut(group)
        _join(threads, CUT_S)


class _Open(NamedTuple):
    """An open group, with collectives that may still run and memory that other ranks may still read."""

    group: dist.ProcessGroup
    works: list[dist.Work]
    tensors: list[Tensor]


class _Ranks:
    """The groups of one set of ranks under one default group."""

    def __init__(self) -> None:
        self.count = 0  # equal on all of these ranks, which make their groups in one order
        self.num_models = 0
        self.num_of_earlier = 0  # groups of models from before this default group, equal on all, too
        self.dropped: dict[int, _Open] = {}  # by number: of models that this rank has dropped


_WORLDS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Ranks]] = weakref.WeakKeyDictionary()


class ProcessGroups:
    """The groups of one model. ``ranks``: their members, in the order of their ranks in the group."""

    def __init__(self, ranks: Sequence[int], backend: str) -> None:
        close_abandoned()
        world = dist.group.WORLD
        assert world is not None, "a process group is initialised"
        self._ranks, self._backend, self._world = tuple(ranks), backend, weakref.ref(world)
        # torch's caches may keep a destroyed default group alive: those of DTensor hold meshes. The groups of dropped
        # models under it would keep their threads.
        for other in [other for other in _WORLDS if other is not world]:
            del _WORLDS[other]
        self._of_ranks = _WORLDS.setdefault(world, {}).setdefault(self._ranks, _Ranks())
        self._open: dict[int, _Open] = {}  # by number
        # the collector may run in any thread at any time, so this takes no lock and closes nothing
        weakref.finalize(self, self._of_ranks.dropped.update, self._open).atexit = False

    @property
    def is_open(self) -> bool:
        """Whether the groups can be used: False after ranks are lost, or the program has destroyed all groups."""
        return bool(self._open) and dist.is_initialized() and dist.group.WORLD is self._world()

    def new(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        *,
        like: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        members: Sequence[int] | None = None,
    ) -> dist.ProcessGroup:
        """Makes another group; every rank calls it.

        Args:
            backend: None means that of host memory.
            timeout: None means the backend's own.
            like, device: see `torch_private.new_group`.
            members: all ranks are divided into groups of these. This rank's one, by their numbers among all; None: all.
        """
        self._of_ranks.count += 1
        number, ranks = str(self._of_ranks.count), self._ranks
        if (world := dist.group.WORLD) is not None and world is not self._world():
            # made since: its own models count from 1, and the names of its groups are one set
            now = _WORLDS.setdefault(world, {}).setdefault(ranks, _Ranks())
            now.num_of_earlier += 1
            number = f"earlier/{now.num_of_earlier}"
        name = f"zc/{'_'.join(map(str, ranks))}/{number}"
        if members is not None:
            name, ranks = f"{name}/{'_'.join(map(str, members))}", tuple(self._ranks[k] for k in members)
        group = torch_private.new_group(
            ranks, backend or self._backend, name, timeout, high_priority=True, like=like, device=device
        )
        _GROUPS.add(group)
        self._open[self._of_ranks.count] = _Open(group, [], [])
        return group

    def number_of_model(self) -> int:
        """Numbers the models that these ranks compile. Every rank calls it once per model."""
        self._of_ranks.num_models += 1
        return self._of_ranks.num_models

    def record_collective(self, group: dist.ProcessGroup | None, work: dist.Work) -> None:
        """Records a collective of ``group`` that possibly nobody waits for."""
        for opened in self._open.values():
            if opened.group is group:
                opened.works[:] = [*(w for w in opened.works if not w.is_completed()), work]

    def keep_alive(self, tensor: Tensor) -> None:
        """Keeps memory that other ranks read: after this rank has dropped the model, until all have."""
        for opened in self._open.values():
            opened.tensors.append(tensor)
            return

    def abandon(self) -> None:
        """Keeps all groups open until the next `zc.compile`, because ranks are out of step or gone: no exchange
        completes in them."""
        _ABANDONED.extend(opened.group for opened in self._open.values())
        self._open.clear()

    def close_dropped(self, gather: Callable[[Tensor], Tensor], *, and_own: bool = False) -> None:
        """Closes the groups whose models all ranks have dropped; with ``and_own`` also the groups of this model.
        ``gather`` collects a row [n] of every rank as [W, n]."""
        unused = {**self._of_ranks.dropped, **(self._open if and_own else {})}
        is_used = torch.ones(self._of_ranks.count, dtype=torch.uint8, device="cpu")
        for number, dropped in unused.items():
            is_used[number - 1] = not all(work.is_completed() for work in dropped.works)
        if len(is_used) > 1:  # otherwise the only group is the one that would carry this exchange
            is_used = gather(is_used).amax(0)
        for number in ((is_used == 0).nonzero().flatten() + 1).tolist():
            for groups in (self._of_ranks.dropped, self._open):
                if number in groups:
                    with contextlib.suppress(ValueError):  # the program has destroyed all groups meanwhile
                        dist.destroy_process_group(groups.pop(number).group)
