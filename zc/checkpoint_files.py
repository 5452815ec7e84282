"""Checkpoint folders: written apart, synced, renamed; checksums beside DCP's files; no code of a stranger's is run.

The format is DCP's own (`torch.distributed.checkpoint.FileSystemWriter`). Beside its files lie two kinds more, which
other readers of DCP ignore: ``zc.json``, the list of all files and their sizes, and for each data file
``<file>.crc32.json``, the checksum of each chunk in it: neither the file system nor ``torch.load`` notices a flipped
bit.
"""

from __future__ import annotations

import io
import json
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
from torch.distributed.checkpoint.metadata import Metadata
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

from zc.durable import sync_folder, write_synced
from zc.errors import CheckpointError

INFO = "zc.json"
PARTIAL = ".partial"  # of a folder that is being written or removed; its name also begins with a dot


class Writer(FileSystemWriter):
    """DCP's writer, and a checksum for each chunk. Files are synced before `write_data` is done."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        files: dict[str, list[tuple[int, int]]] = {}
        for result in written.wait():
            info = result.storage_data
            files.setdefault(info.relative_path, []).append((info.offset, info.length))
        for name, items in files.items():
            with open(Path(self.path) / name, "rb") as file:
                sums = [[offset, length, _crc32(file, offset, length)] for offset, length in items]
            write_synced(Path(self.path) / f"{name}.crc32.json", json.dumps(sums).encode())
        return written


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
    """DCP's reader that runs no code from the folder, checks each chunk's checksum, and reads each chunk once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                found: Metadata = _MetadataUnpickler(file).load()
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is no checkpoint: it has no .metadata file") from None
        except _UNREADABLE as error:
            raise CheckpointError(f"{path} is damaged or not DCP's metadata: {error}") from error
        if not isinstance(found, Metadata) or found.storage_data is None:
            raise CheckpointError(f"{path} holds a {type(found).__name__}, not DCP's metadata")
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[Any, list[ReadItem]] = {}
        for item in plan.items:
            by_chunk.setdefault(item.storage_index, []).append(item)
        order = sorted(by_chunk, key=lambda index: _place(self.storage_data[index]))
        sums: dict[str, dict[tuple[int, int], int] | None] = {}
        for number, index in enumerate(order):
            info = self.storage_data[index]
            if info.transform_descriptors:
                raise CheckpointError(
                    f"{self.path}: {index.fqn} was written with the extension {info.transform_descriptors}"
                )
            if info.relative_path not in sums:
                sums[info.relative_path] = self._checksums(info.relative_path)
            following = [self.storage_data[later] for later in order[number + 1 : number + 2]]
            raw = self._read(info.relative_path, info.offset, info.length, index.fqn, following)
            known = sums[info.relative_path]
            stop = info.offset + info.length
            if known is not None and (found := zlib.crc32(raw)) != (saved := known.get((info.offset, info.length))):
                raise CheckpointError(
                    f"{self.path}/{info.relative_path} is corrupted: the checksum of {index.fqn} (bytes {info.offset} "
                    f"to {stop}) is {found}, it was {saved}"
                )
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
                for info in following:  # the disk works on the next chunk while this one is checked and copied
                    if info.relative_path == name and hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(file.fileno(), info.offset, info.length, os.POSIX_FADV_WILLNEED)
                file.seek(offset)
                raw = file.read(length)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: {fqn} is in it") from None
        if raw is None or len(raw) != length:
            raise CheckpointError(
                f"{path} is truncated: {fqn} is bytes {offset} to {offset + length}, the file has {path.stat().st_size}"
            )
        return raw

    def _inside(self, name: str) -> Path:
        if Path(name).name != name:
            raise CheckpointError(f"{self.path}: the metadata names the file {name}, outside of the folder")
        return Path(self.path) / name

    def _checksums(self, name: str) -> dict[tuple[int, int], int] | None:
        """None: written by another program, without checksums."""
        if not (Path(self.path) / INFO).exists():
            return None
        path = self._inside(name + ".crc32.json")
        try:
            return {(offset, length): crc for offset, length, crc in json.loads(path.read_text())}
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from error


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
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),  # Python 3.13
}  # fmt: skip


# what a pickle that was cut or overwritten raises
_UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError)


class _MetadataUnpickler(pickle.Unpickler):
    """DCP keeps its metadata as a pickle, which may call anything. These are the classes that it needs, no other."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which DCP's metadata does not need")
        return super().find_class(module, name)


# --- folders ---


def partial_of(path: Path) -> Path:
    return path.parent / f".{path.name}{PARTIAL}"


def prepare(path: Path, nbytes: int) -> None:
    """One rank, before a save. Raises where ``path`` exists or the disk has no room; removes what a killed save of the
    same name has left."""
    if path.name.startswith(".") or not path.name:
        raise CheckpointError(
            f"a checkpoint can't be named {path.name!r}: names with a dot are kept for unfinished ones"
        )
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: nothing is overwritten, remove it or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial_of(path), ignore_errors=True)
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise CheckpointError(f"{path.parent} has room for {free} bytes, the checkpoint {path.name} needs {nbytes}")
    partial_of(path).mkdir()


def make_visible(path: Path, info: dict[str, Any], keep: int | None) -> None:
    """One rank, when all files are written and synced: lists them, renames the folder, removes older checkpoints."""
    partial = partial_of(path)
    others = complete(path.parent)
    files = {entry.name: entry.stat().st_size for entry in sorted(partial.iterdir())}
    sequence = max((number for number, _ in others), default=0) + 1
    write_synced(partial / INFO, json.dumps({"format": 1, "sequence": sequence, **info, "files": files}).encode())
    sync_folder(partial)
    os.rename(partial, path)  # fails where `path` has come into being in the meantime, unless it is an empty folder
    sync_folder(path.parent)
    if keep is not None:
        for _, old in others[: max(0, len(others) + 1 - keep)]:
            # out of sight first: a removal that is killed half-way leaves no checkpoint with holes
            os.rename(old, partial_of(old))
            shutil.rmtree(partial_of(old), ignore_errors=True)
        for left in path.parent.glob(f".*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)


def complete(folder: Path, warn: Callable[[str], None] = lambda text: None) -> list[tuple[int, Path]]:
    """(sequence, path) of the complete checkpoints in ``folder``, oldest first."""
    found: list[tuple[int, Path]] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith(".") or not (entry / INFO).is_file():
            continue
        try:
            info = json.loads((entry / INFO).read_text())
            sizes = {name: (entry / name).stat().st_size for name in info["files"]}
            differing = [name for name, nbytes in info["files"].items() if sizes[name] != nbytes]
            sequence = int(info["sequence"])
        except (OSError, ValueError, KeyError, TypeError) as error:
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
