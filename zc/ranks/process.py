"""The processes of the ranks: which have ended, as the kernel says where both are on one host, and where this one is.

The connections of a process don't always tell that it ended: a child that it forked, such as a loader's worker, keeps
them open.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """The methods of torch.distributed's stores that never block."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


def tell_process(store: Store, rank: int) -> None:
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
    return state in "ZX" or start_time != fields[2]  # killed and not yet waited for; or another process has its number


def boot_id() -> str:
    """Of this start of this machine's kernel. Raises OSError where there is none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
    """[where its number is valid, its number, its start time]; empty where the system doesn't say."""
    try:
        return [f"{boot_id()} {os.readlink('/proc/self/ns/pid')}", str(os.getpid()), _state("self")[1]]
    except OSError:
        return []


def _state(number: str) -> tuple[str, str]:
    """The third and the 22nd field of proc(5)'s stat."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
