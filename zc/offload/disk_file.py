"""One rank's state file: memory-mapped regions, and a mark beside it that exists only while the file is complete.

Updates write to mapped pages, and the system writes these to disk at any time. So after a crash the file alone can't be
trusted. `StateFile.flush` creates the mark, ``*.mark``, after everything else is on disk. The next update removes it,
also on disk, before it writes its first byte. The order is that of a commit record in a write-ahead log (Mohan et al.,
ARIES, 1992), whose undo is to start with fresh state::

    flush:         fsync(state)  ->  write, fsync(mark.new)  ->  rename to mark  ->  fsync(folder)
    begin_update:  unlink(mark)  ->  fsync(folder)  ->  the update writes

A file without a mark is never read. All space is reserved when the file is opened, because a full disk would end the
process with SIGBUS in the middle of an update.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zc.durable import sync_folder, write_synced
from zc.errors import PlanError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Region:
    """[numel] of ``dtype`` at ``offset`` bytes, page-aligned, so that it can be read ahead separately."""

    name: str
    offset: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def place(sizes: Mapping[str, tuple[int, torch.dtype]]) -> tuple[Region, ...]:
    """Places regions in a file in this order, each at the start of a page. Omits empty ones."""
    regions: list[Region] = []
    offset = 0
    for name, (numel, dtype) in sizes.items():
        if numel:
            regions.append(Region(name, offset, numel, dtype))
            offset += -(-regions[-1].nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    return tuple(regions)


class StateFile:
    """The file of one rank in ``folder``: open, locked, and at its final size.

    ``mark`` is that of an earlier run, checked against ``regions`` and ``lines``; None: there is no valid state.

    Raises:
        PlanError: the folder does not exist, is not writable, or lacks the space (both figures); another process uses
            the file; its size is not what its mark says; it has the state of another plan (names the first line that
            differs). The folder is then unchanged.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, regions: Sequence[Region], lines: Sequence[str]):
        if not folder.is_dir():
            raise PlanError(f"offload_dir {folder} is not a folder: make it first, on the disk that is meant")
        self.folder, self._rank, self.path = folder, rank, folder / f"zc-rank{rank:05d}-of-{world_size:05d}.state"
        self.mark_path = self.path.with_suffix(".mark")
        self.regions = {region.name: region for region in regions}
        last = regions[-1] if regions else None
        self.nbytes = max(last.offset + last.nbytes if last else 0, 1)  # mmap takes no empty file
        self.lines = [*lines, *(f"{r.name}: {r.numel} {r.dtype} at {r.offset}" for r in regions)]
        self.existed = self.path.exists()
        self._remedy = f"to start without that state, remove {self.path.stem}.*"
        self.mark: dict[str, Any] | None = None
        self._fd = self._open()
        try:
            self.mark = self._read_mark()
            if self.mark is None:
                self._reserve()
            self._map = mmap.mmap(self._fd, self.nbytes)
        except BaseException:
            self._remove_if_new()
            os.close(self._fd)
            raise
        self._tensors = {r.name: torch.frombuffer(self._map, dtype=r.dtype, count=r.numel, offset=r.offset)
                         for r in regions}  # fmt: skip
        # a run that ends without a flush removes its file; a killed one leaves a file without a mark
        self._end = weakref.finalize(self, _end, self._fd, self.path, self.mark_path, os.getpid())

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise PlanError(
                f"offload_dir {self.folder} can't be written to: {error.strerror} ({self.path.name})"
            ) from None
        if fcntl is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise PlanError(
                    f"{self.path} is in use by another process, or by a model in this one: give each run a folder of "
                    "its own"
                ) from None
        return fd

    def _read_mark(self) -> dict[str, Any] | None:
        if not self.mark_path.exists():
            return None
        try:
            mark: dict[str, Any] = json.loads(self.mark_path.read_text())
            version, wanted, lines = mark["format"], mark["nbytes"], mark["lines"]
        except (ValueError, KeyError, TypeError):
            raise PlanError(f"{self.mark_path} can't be read: {self._remedy}") from None
        if version != FORMAT:
            raise PlanError(f"{self.mark_path} has format {version}, this zc reads {FORMAT}: {self._remedy}")
        nbytes = os.fstat(self._fd).st_size
        if nbytes != wanted:
            raise PlanError(
                f"{self.path} has {nbytes:,} bytes, and had {wanted:,} when its state was complete: {self._remedy}"
            )
        for here, there in zip(_padded(self.lines, lines), _padded(lines, self.lines), strict=True):
            if here != there:
                raise PlanError(
                    f"{self.path} holds the state of another plan: it has {there}, this one {here}: {self._remedy}"
                )
        return mark

    def _reserve(self) -> None:
        """Allocates every byte of the file."""
        allocated = os.fstat(self._fd).st_blocks * 512
        free = os.statvfs(self.folder)
        available = free.f_bavail * free.f_frsize + allocated
        try:
            if self.nbytes > available:
                raise OSError(errno.ENOSPC, "")
            os.ftruncate(self._fd, self.nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self.nbytes)
            else:
                for start in range(0, self.nbytes, _CHUNK):
                    os.pwrite(self._fd, bytes(min(_CHUNK, self.nbytes - start)), start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(self._fd, 0)
            raise PlanError(
                f"offload_dir {self.folder} has {available:,} bytes for rank {self._rank}, whose optimizer "
                f"state takes {self.nbytes:,}"
            ) from None

    def tensor(self, name: str) -> Tensor:
        """[numel], mapped: the system writes its changes to the file at some later time."""
        return self._tensors[name]

    def prefetch(self, name: str) -> None:
        """Asks the system to read a region ahead; returns at once."""
        region = self.regions[name]
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_WILLNEED, region.offset, region.nbytes)

    def begin_update(self) -> None:
        """Call it before any write: from here on a restart finds no mark."""
        self.mark = None
        if self.mark_path.exists():
            self.mark_path.unlink()
            sync_folder(self.folder)

    def flush(self, facts: Mapping[str, Any]) -> None:
        """Syncs the file to disk, and then writes the mark with ``facts``, which the next run has in `found`."""
        self._map.flush()
        os.fsync(self._fd)
        text = json.dumps({"format": FORMAT, "nbytes": self.nbytes, "lines": self.lines, **facts})
        new = self.mark_path.with_suffix(".mark.new")
        write_synced(new, text.encode())
        os.replace(new, self.mark_path)
        sync_folder(self.folder)

    def discard(self) -> None:
        """Restores the folder, because the plan was refused elsewhere."""
        self._remove_if_new()
        self._end.detach()
        self._tensors.clear()
        os.close(self._fd)

    def _remove_if_new(self) -> None:
        if not self.existed:
            self.path.unlink(missing_ok=True)


def _end(fd: int, path: Path, mark: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked worker ends
        return
    if not mark.exists():
        path.unlink(missing_ok=True)
    os.close(fd)


def _padded(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    return [*lines, *["nothing"] * max(0, len(others) - len(lines))]
