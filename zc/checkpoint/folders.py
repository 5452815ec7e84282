"""Checkpoint folders: filled apart, by one job, and renamed when complete. What a job that has ended left is removed.

    .step_5.<job>.partial   being filled; job's rank 0 holds a lock on ``zc.owner`` in it for as long as it lives
    step_5                  complete: ``zc.json`` in it lists its files
    .step_1.<job>.removed   out of sight, and being removed

Two jobs may save one name at once, as a job that was given up does beside its restart. Each fills a folder of its own,
the first to be done gets the name, and the other one's save fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zc.durable import exchange, sync_folder, write_synced
from zc.errors import CheckpointError

try:
    import fcntl
except ImportError:  # no POSIX: no unfinished folder is ever taken for a dead job's
    fcntl = None  # type: ignore[assignment]

INFO, OWNER = "zc.json", "zc.owner"
PARTIAL, REMOVED = ".partial", ".removed"


def partial_of(path: Path, job: str) -> Path:
    """Where ``job`` fills the checkpoint ``path``."""
    return path.parent / f".{path.name}.{job}{PARTIAL}"


class Unfinished:
    """Rank 0's hold on the folder that a save fills, from before its first file until `close`.

    Raises CheckpointError where ``path`` exists (with ``overwrite``: and is no checkpoint) or the disk has no room;
    removes what a job that has ended left of a save of the same name.
    """

    def __init__(self, path: Path, job: str, nbytes: int, overwrite: bool = False) -> None:
        if path.name.startswith(".") or not path.name:
            raise CheckpointError(
                f"a checkpoint can't be named {path.name!r}: names with a dot are kept for unfinished ones"
            )
        if os.path.lexists(path) and not overwrite:
            raise CheckpointError(
                f"{path} exists already: nothing is overwritten, remove it, choose another name or give overwrite=True"
            )
        if os.path.lexists(path) and not (path / INFO).is_file():
            raise CheckpointError(f"{path} exists and is no checkpoint of zc's: overwrite=True leaves it alone")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path.parent, f".{path.name}.")
        free = shutil.disk_usage(path.parent).free
        if free < nbytes:
            raise CheckpointError(f"{path.parent} has room for {free} bytes, the checkpoint {path.name} needs {nbytes}")
        self.path, self.job, self.folder, self.overwrite = path, job, partial_of(path, job), overwrite
        self.folder.mkdir()  # exclusive: nobody else has made it
        # lifetime: open, and so locked, until `close`, or until this process has ended
        self._owner = open(self.folder / OWNER, "x")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks: what is left there stays
            if fcntl is not None:
                fcntl.flock(self._owner, fcntl.LOCK_EX)
                self._owner.write(_machine())  # only now: an empty file is one whose owner is about to lock it
                self._owner.flush()

    def make_visible(self, info: dict[str, Any], keep: int | None) -> None:
        """When all files are written and synced: lists them, renames the folder, removes older checkpoints."""
        path, others = self.path, complete(self.path.parent)
        files = {e.name: e.stat().st_size for e in sorted(self.folder.iterdir()) if e.name != OWNER}
        sequence = max((number for number, _ in others), default=0) + 1
        content = {"format": 1, "sequence": sequence, **info, "files": files}
        write_synced(self.folder / INFO, json.dumps(content).encode())
        sync_folder(self.folder)
        try:
            os.rename(self.folder, path)
        except OSError as error:
            if not os.path.lexists(path):
                raise
            if not self.overwrite:
                raise CheckpointError(
                    f"{path} exists by now: another job has saved it in the meantime. That one stays, this one is "
                    "dropped"
                ) from error
            exchange(self.folder, path)
            self._remove(self.folder, path.name)
        sync_folder(path.parent)
        (path / OWNER).unlink(missing_ok=True)
        if keep is None:
            return
        others = [(number, old) for number, old in others if old != path]
        for _, old in others[: max(0, len(others) + 1 - keep)]:
            self._remove(old, old.name)
        remove_left(path.parent, ".")

    def _remove(self, old: Path, name: str) -> None:
        """Out of sight first: a removal that is killed half-way leaves no checkpoint with holes."""
        hidden = old.parent / f".{name}.{self.job}{REMOVED}"
        shutil.rmtree(hidden, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another job that keeps some was first
            os.rename(old, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def close(self) -> None:
        """This job has done what it could: a folder that did not get its name is dropped."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owner.close()


def remove_left(parent: Path, prefix: str) -> None:
    """Removes hidden folders with this prefix whose job has ended, and names those of which that can't be known."""
    for entry in sorted(parent.glob(".*")):
        if not entry.name.startswith(prefix) or entry.suffix not in (PARTIAL, REMOVED):
            continue
        if entry.suffix == REMOVED or _has_ended(entry):
            shutil.rmtree(entry, ignore_errors=True)


def _has_ended(folder: Path) -> bool:
    """Whether the job that fills ``folder`` has ended: it no longer holds its lock. Not every shared file system tells
    one machine of another's locks, so a folder that was made elsewhere stays, and is named."""
    try:
        with open(folder / OWNER, "r+") as file:
            if fcntl is None:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            machine = file.read()
    except OSError:
        return False  # locked, or about to be, or gone
    if machine and machine != _machine():
        warnings.warn(
            f"zc: {folder} is an unfinished checkpoint that another machine made: remove it if that job has ended",
            stacklevel=2,
        )
    return machine == _machine()


def _machine() -> str:
    """One start of one machine's system: within it a lock is known to everybody."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def complete(folder: Path, warn: Callable[[str], None] = lambda text: None) -> list[tuple[int, Path]]:
    """(sequence, path) of the complete checkpoints in ``folder``, oldest first."""
    found: list[tuple[int, Path]] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith(".") or not (entry / INFO).is_file():
            continue
        try:
            info = json.loads((entry / INFO).read_text())
            sizes = {name: (entry / name).stat().st_size for name in (*info["files"], ".metadata")}
            differing = [name for name, nbytes in info["files"].items() if sizes[name] != nbytes]
            sequence = int(info["sequence"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warn(f"{entry} is no complete checkpoint and is passed over: {error}")
            continue
        if differing:
            name = differing[0]
            warn(f"{entry} is passed over: {name} has {sizes[name]} bytes, it was written with {info['files'][name]}")
            continue
        found.append((sequence, entry))
    return sorted(found)


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in ``folder``; None where there is none, or no folder.

    Newest by a number that each save counts up, not by a clock. What a killed save left is never seen; a checkpoint
    that lost a file, or a part of one, is passed over with a warning.
    """
    found = complete(Path(folder), lambda text: warnings.warn(f"zc: {text}", stacklevel=4))
    return found[-1][1] if found else None
