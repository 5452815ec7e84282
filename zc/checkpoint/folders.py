"""Checkpoint folders: one job fills a hidden folder and renames it when complete. Leftovers of ended jobs are removed.

    .step_5.<job>.partial   being filled; the job's rank 0 locks ``zc.owner`` in it for as long as it lives
    step_5                  complete: its ``zc.json`` lists its files
    .step_1.<job>.removed   hidden, and being removed

Two jobs may save under one name at once, such as an abandoned job and its restart. Each fills its own folder. The first
to finish gets the name, and the save of the other one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zc.errors import CheckpointError
from zc.machine import exchange, machine_id, sync_folder, write_synced

try:
    import fcntl
except ImportError:  # not POSIX: unfinished folders are never removed as those of a dead job
    fcntl = None  # type: ignore[assignment]

INFO, OWNER = "zc.json", "zc.owner"
PARTIAL, REMOVED = ".partial", ".removed"


def partial_of(path: Path, job: str) -> Path:
    """The folder in which ``job`` fills the checkpoint ``path``."""
    return path.parent / f".{path.name}.{job}{PARTIAL}"


class Unfinished:
    """The folder that a save fills, locked by rank 0 from before its first file until `close`.

    Raises CheckpointError if ``path`` exists (with ``overwrite``: and is not a checkpoint) or the disk has no room.
    Removes leftovers of an ended job that saved under the same name.
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
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay there
            if fcntl is not None:
                fcntl.flock(self._owner, fcntl.LOCK_EX)
                self._owner.write(machine_id())  # after the lock: the owner of an empty file is about to lock it
                self._owner.flush()

    def make_visible(self, info: dict[str, Any], keep: int | None) -> None:
        """Lists the files in ``zc.json``, renames the folder, and removes older checkpoints. All files are synced."""
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
        """Hides the folder first, so that a killed removal leaves no partial checkpoint in sight."""
        hidden = old.parent / f".{name}.{self.job}{REMOVED}"
        if old.is_symlink():  # the folder that it led to is another checkpoint
            old.unlink()
            return
        shutil.rmtree(hidden, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another job with ``keep`` was first
            os.rename(old, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def close(self) -> None:
        """Unlocks the folder, and removes it if it was not renamed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owner.close()


def remove_left(parent: Path, prefix: str) -> None:
    """Removes hidden folders with this prefix whose job has ended, and warns of those for which it can't know."""
    for entry in sorted(parent.glob(".*")):
        if not entry.name.startswith(prefix) or entry.suffix not in (PARTIAL, REMOVED):
            continue
        if entry.suffix == REMOVED or _has_ended(entry):
            shutil.rmtree(entry, ignore_errors=True)


def _has_ended(folder: Path) -> bool:
    """Whether the job that fills ``folder`` has ended, so that the folder is unlocked. Not every shared file system
    shows one machine another's locks, so a folder from another machine stays, with a warning."""
    try:
        with open(folder / OWNER, "r+") as file:
            if fcntl is None:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            machine = file.read()
    except OSError:
        return False  # locked, or about to be, or gone
    if machine and machine != machine_id():
        warnings.warn(
            f"zc: {folder} is an unfinished checkpoint that another machine made: remove it if that job has ended",
            stacklevel=2,
        )
    return machine == machine_id()


def complete(folder: Path, warn: Callable[[str], None] = lambda text: None) -> list[tuple[int, Path]]:
    """(sequence, path) of the complete checkpoints in ``folder``, oldest first."""
    checkpoints: list[tuple[int, Path]] = []
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
        checkpoints.append((sequence, entry))
    return sorted(checkpoints)


def latest(folder: str | Path) -> Path | None:
    """Returns the newest complete checkpoint in ``folder``, or None if there is no checkpoint or no folder.

    Newest means the highest number, which each save counts up, not the latest time. It never returns what a killed save
    left. It skips a checkpoint with a missing or truncated file, with a warning.
    """
    checkpoints = complete(Path(folder), lambda text: warnings.warn(f"zc: {text}", stacklevel=4))
    return checkpoints[-1][1] if checkpoints else None
