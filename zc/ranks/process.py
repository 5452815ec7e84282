"""How zc's threads end: before the interpreter does, and each wait for that is bounded.

A thread that returns from C++ (a collective, a kernel, a call of the store) while the interpreter is torn down finds no
GIL to take. Python before 3.14 unwinds it with pthread_exit, through a destructor of pybind11 that is noexcept. Then
std::terminate ends the process with SIGABRT, after the traceback of a good message ("terminate called without an active
exception"). Ranks raise a named error at the same moment. So what a thread of one rank still waits for in gloo ends,
with an error, when the process of another rank ends: as a rule while the interpreter of the first one is torn down.

gloo can't be told to stop a wait, but a receive that times out ends all waits in its group (`torch_private.cut`). So at
exit groups are cut, and the threads that waited in them are joined.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

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


def add_group(group: dist.ProcessGroup) -> None:
    """From here on zc's threads may wait in ``group``, which is one of zc's own."""
    _GROUPS.add(group)


def abandon(groups: Iterable[dist.ProcessGroup]) -> None:
    """Keeps these groups of zc's: ranks are out of step or gone, and no exchange completes in them."""
    _ABANDONED.extend(groups)


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
