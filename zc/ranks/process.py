"""The processes of the ranks: whether one on this host has ended, which collective this one is in, and how its threads
end.

The connections of a process do not always show that it has ended: a child that it forked, such as a data loader's
worker, keeps them open. The kernel knows.

At its end zc's threads end before the interpreter does, and each wait for that is bounded. A thread that returns from
C++ (a collective, a kernel, a call of the store) while the interpreter is torn down finds no GIL to take. Python before
3.14 unwinds it with pthread_exit, through a destructor of pybind11 that is noexcept. Then std::terminate ends the
process with SIGABRT, after the traceback of a good message ("terminate called without an active exception"). Ranks
raise a named error at the same moment. So what a thread of one rank still waits for in gloo ends, with an error, when
the process of another rank ends: as a rule while the interpreter of the first one is torn down.

gloo can't be told to stop a wait, but a receive that times out ends all waits in its group (`torch_private.cut`). So at
exit groups are cut, and the threads that waited in them are joined.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from zc import torch_private


class Store(Protocol):
    """The methods of torch.distributed's stores that never block."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


def publish_process(store: Store, rank: int) -> None:
    """Tells the others which process ``rank``, this one, is."""
    store.set(f"process/{rank}", json.dumps(_this_process()))


def has_ended(store: Store, rank: int) -> bool:
    """Whether the process of ``rank`` has ended. False also where the kernel can't say: another host, or no access."""
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


def machine_id() -> str:
    """Identifies this boot of this machine; its name where the kernel has no number of the boot. Processes of one
    machine see each other's locks of files."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


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
