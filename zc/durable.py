"""File operations that a crash does not undo."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_CWD, _EXCHANGE = -100, 2  # of Linux's renameat2


def sync_folder(path: Path) -> None:
    """Makes the names in the folder durable. In POSIX, fsync of a file does not do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Writes the file, and returns when its content is on the disk. Its name is there after `sync_folder`."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def exchange(one: Path, other: Path) -> None:
    """Exchanges two names in one folder, atomically if the system and its file system can. Otherwise in steps: a
    process that is killed between them leaves nothing under ``other``."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, TypeError, AttributeError):
        rename = None
    if rename is not None and rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return
    aside = one.with_name(f"{one.name}.aside")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)
