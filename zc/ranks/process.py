"""The processes of the ranks: whether one on this host has ended, and which collective this one is in.

The connections of a process do not always show that it has ended: a child that it forked, such as a data loader's
worker, keeps them open. The kernel knows.
"""

from __future__ import annotations

import json
import os
import socket
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
