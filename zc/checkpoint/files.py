"""Checkpoint folders, and DCP's files in them, with checksums; no code from a checkpoint is ever run.

One job fills a hidden folder and renames it when complete. Leftovers of ended jobs are removed::

    .step_5.<job>.partial   being filled; the job's rank 0 locks ``zc.owner`` in it for as long as it lives
    step_5                  complete: its ``zc.json`` lists its files
    .step_1.<job>.removed   hidden, and being removed

Two jobs may save under one name at once, such as an abandoned job and its restart. Each fills its own folder. The first
to finish gets the name, and the save of the other one fails.

The format is DCP's own (`torch.distributed.checkpoint.FileSystemWriter`). Beside each file, also ``.metadata``, is
``<file>.crc32.json`` with the checksums of its chunks, which other DCP readers ignore. Neither the file system nor
``torch.load`` would notice a flipped bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zc.errors import CheckpointError
from zc.machine import machine_id, swap_paths, sync_folder, write_synced

try:
    import fcntl
except ImportError:  # not POSIX: unfinished folders are never removed as those of a dead job
    fcntl = None  # type: ignore[assignment]

METADATA, SUMS = ".metadata", ".crc32.json"
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
            swap_paths(self.folder, path)
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


# --- files ---


class Writer(FileSystemWriter):
    """DCP's writer, with a checksum per chunk. Files are synced to disk before `write_data` completes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        files: dict[str, list[tuple[int, int]]] = {}
        for result in written.wait():
            info = result.storage_data
            files.setdefault(info.relative_path, []).append((info.offset, info.length))
        for name, items in files.items():
            self._write_sums(name, items)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As DCP's, on rank 0. Raises CheckpointError unless all that ranks have written is in the folder here."""
        for rank, written in enumerate(results):
            self._check(rank, written)
        super().finish(metadata, results)
        self._write_sums(METADATA, [(0, (Path(self.path) / METADATA).stat().st_size)])

    def _check(self, rank: int, written: Sequence[WriteResult]) -> None:
        ends: dict[str, int] = {}
        for result in written:
            info = result.storage_data
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        folder = Path(self.path)
        for name, end in ends.items():
            try:
                nbytes = (folder / name).stat().st_size
                (folder / f"{name}{SUMS}").stat()
            except FileNotFoundError as error:
                found = f"{error.filename} is missing"
            else:
                if nbytes >= end:
                    continue
                found = f"{folder / name} has {nbytes} bytes"
            raise CheckpointError(
                f"{found}, and rank {rank} has written {end} bytes of {name}: not all ranks see the folder "
                f"{folder.parent}. Save into one that all machines share, by a name that all ranks take for the same. "
                "This checkpoint is dropped, earlier ones stay"
            )

    def remove(self) -> None:
        """Removes the folder, as this rank sees it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write_sums(self, name: str, items: Sequence[tuple[int, int]]) -> None:
        with open(Path(self.path) / name, "rb") as file:
            sums = [[offset, length, _crc32(file, offset, length)] for offset, length in items]
        write_synced(Path(self.path) / f"{name}{SUMS}", json.dumps(sums).encode())


def _crc32(file: io.BufferedReader, offset: int, length: int) -> int:
    file.seek(offset)
    value, buffer = 0, memoryview(bytearray(min(length, 2**20) or 1))
    while length:
        count = file.readinto(buffer[: min(length, len(buffer))])
        if not count:
            raise CheckpointError(f"{file.name} ends {length} bytes early")
        value = zlib.crc32(buffer[:count], value)
        length -= count
    return value


class Reader(FileSystemReader):
    """DCP's reader that runs no code from the folder, checks each chunk's checksum, and reads each chunk once.

    It reads ``.metadata`` once. ``digest`` is the SHA-256 of its bytes, in which DCP has a number of the save: two
    saves of one model differ in it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None
        self.digest = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            raw = self._raw_metadata()
            self._metadata, self.digest = self._unpickled(raw), _sha256(raw)
        return self._metadata

    def check_unchanged(self) -> None:
        """Raises CheckpointError if the folder holds another checkpoint than when ``.metadata`` was read: what was read
        meanwhile may be of both."""
        if _sha256(self._raw_metadata()) != self.digest:
            raise CheckpointError(f"{self.path} was overwritten while it was read: load it again")

    def _raw_metadata(self) -> bytes:
        try:
            return (Path(self.path) / METADATA).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is no checkpoint: it has no .metadata file") from None

    def _unpickled(self, raw: bytes) -> Metadata:
        path = Path(self.path) / METADATA
        if self._has_sums(METADATA):
            self._compare(METADATA, 0, raw, METADATA, self._checksums(METADATA))
        try:
            metadata: Metadata = _MetadataUnpickler(io.BytesIO(raw)).load()
            _check(metadata)
        except Exception as error:  # a truncated or overwritten pickle may raise anything, even MemoryError
            raise CheckpointError(
                f"{path} is damaged or not DCP's metadata: {type(error).__name__}: {error}"
            ) from error
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[Any, list[ReadItem]] = {}
        for item in plan.items:
            by_chunk.setdefault(item.storage_index, []).append(item)
        order = sorted(by_chunk, key=lambda index: _place(self.storage_data[index]))
        sums: dict[str, dict[tuple[int, int], int]] = {}
        for number, index in enumerate(order):
            info = self.storage_data[index]
            if info.transform_descriptors:
                raise CheckpointError(
                    f"{self.path}: {index.fqn} was written with the extension {info.transform_descriptors}"
                )
            name = info.relative_path
            following = [self.storage_data[later] for later in order[number + 1 : number + 2]]
            raw = self._read(name, info.offset, info.length, index.fqn, following)
            if self._has_sums(name):
                if name not in sums:
                    sums[name] = self._checksums(name)
                self._compare(name, info.offset, raw, index.fqn, sums[name])
            self._deliver(by_chunk[index], planner, raw)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _deliver(self, items: Sequence[ReadItem], planner: LoadPlanner, raw: bytes) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(raw))
                continue
            if tensor is None:
                tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
            parts = zip(item.storage_offsets, item.lengths, strict=True)
            part = tensor[tuple(slice(offset, offset + length) for offset, length in parts)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)

    def _read(self, name: str, offset: int, length: int, fqn: str, following: Sequence[Any]) -> bytes:
        path = self._inside(name)
        try:
            with open(path, "rb", buffering=0) as file:
                for info in following:  # the disk reads the next chunk while this one is checked and copied
                    if info.relative_path == name and hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(file.fileno(), info.offset, info.length, os.POSIX_FADV_WILLNEED)
                nbytes = os.fstat(file.fileno()).st_size
                file.seek(offset)
                raw = file.read(length) if offset + length <= nbytes else None
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: {fqn} is in it") from None
        if raw is None or len(raw) != length:
            raise CheckpointError(
                f"{path} is truncated: {fqn} is bytes {offset} to {offset + length}, the file has {nbytes}"
            )
        return raw

    def _inside(self, name: str) -> Path:
        if Path(name).name != name:
            raise CheckpointError(f"{self.path}: the metadata names the file {name}, outside of the folder")
        return Path(self.path) / name

    def _has_sums(self, name: str) -> bool:
        """Whether this file must have checksums: they exist, or zc wrote the folder. (zc's first checkpoints have none
        for ``.metadata``, and other programs write none at all.)"""
        folder = Path(self.path)
        if (folder / f"{name}{SUMS}").exists():
            return True
        return name != METADATA and ((folder / INFO).exists() or any(folder.glob(f"*{SUMS}")))

    def _checksums(self, name: str) -> dict[tuple[int, int], int]:
        path = self._inside(name + SUMS)
        try:
            return {(offset, length): crc for offset, length, crc in json.loads(path.read_text())}
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from error

    def _compare(self, name: str, offset: int, raw: bytes, what: str, sums: dict[tuple[int, int], int]) -> None:
        actual, saved = zlib.crc32(raw), sums.get((offset, len(raw)))
        if actual != saved:
            was = "it was written in other parts" if saved is None else f"it was {saved}"
            raise CheckpointError(
                f"{self.path}/{name} is corrupted: the checksum of {what} (bytes {offset} to {offset + len(raw)}) is "
                f"{actual}, {was}"
            )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _place(info: Any) -> tuple[str, int]:
    return info.relative_path, info.offset


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """DCP stores its metadata as a pickle, which could call anything. This allows only the classes that DCP needs."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # what Python 3.13 writes, and no earlier one has
            module = "pathlib"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which DCP's metadata does not need")
        return super().find_class(module, name)


def _check(metadata: Metadata) -> None:
    """Raises unless what was unpickled is consistent metadata: DCP and zc rely on all of this. `Reader` checks the
    places in files as it reads."""
    wanted: list[tuple[str, torch.Size | None]] = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            wanted.append((key, None))
            continue
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{key} is a {type(entry).__name__}")
        for chunk in entry.chunks:
            parts = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in parts):
                raise ValueError(f"{key} of shape {tuple(entry.size)} has a part at {chunk.offsets} of {chunk.sizes}")
            wanted.append((key, chunk.offsets))
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) < math.prod(entry.size):
            raise ValueError(f"{key}: its parts are not all of its shape {tuple(entry.size)}")
    for key, offsets in wanted:
        metadata.storage_data[MetadataIndex(key, offsets)]  # or KeyError
    if metadata.planner_data and not metadata.planner_data.keys() >= metadata.state_dict_metadata.keys():
        raise ValueError("keys have no paths")
