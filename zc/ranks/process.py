"""Whether another rank's process has ended, asked of the kernel where both are on one host.

Its connections don't always say so: a child that it has forked, a loader's worker say, holds them open.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """The part of torch.distributed's stores that never blocks."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


def tell_process(store: Store, rank: int) -> None:
    store.set(f"process/{rank}", json.dumps(_this_process()))


def has_ended(store: Store, rank: int) -> bool:
    """Whether what ``rank`` told is no more. False also where that can't be known: another host, or no answer."""
    key = f"process/{rank}"
    told: list[str] = json.loads(store.get(key)) if store.check([key]) else []
    if not told or told[:1] != _this_process()[:1]:
        return False
    try:
        state, began = _state(told[1])
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # not ours to see
        return False
    return state in "ZX" or began != told[2]  # killed and not yet waited for; or another one has its number


def boot_id() -> str:
    """Of this start of this machine's kernel. Raises OSError where there is none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _this_process() -> list[str]:
    """[where its number is known, its number, when it began]; empty where the system doesn't say."""
    try:
        return [f"{boot_id()} {os.readlink('/proc/self/ns/pid')}", str(os.getpid()), _state("self")[1]]
    except OSError:
        return []


def _state(number: str) -> tuple[str, str]:
    """The third and the 22nd field of proc(5)'s stat."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
