"""offload="disk": the optimizer's state tensors live in a rank's state file and are updated in place.

The optimizer creates its state in memory, at a parameter's first update. After that update each tensor moves to its
region of the file, and later updates read and write mapped pages. Scalars, such as Adam's ``step``, stay in memory.
ZeRO-Infinity (arXiv:2104.07857) reads and writes NVMe explicitly. Here the system's page cache is the staging buffer,
and zc announces its reads one bucket ahead.

`zc.flush_state` makes the folder complete: a later run that starts from the same weights continues from it.

A state file has memory-mapped regions, and a mark beside it that exists only while the file is complete. Updates write
to mapped pages, and the system writes these to disk at any time. So after a crash the file alone can't be trusted.
`StateFile.flush` creates the mark, ``*.mark``, after everything else is on disk. The next update removes it, also on
disk, before it writes its first byte. The order is that of a commit record in a write-ahead log (Mohan et al., ARIES,
1992), whose undo is to start with fresh state::

    flush:         fsync(state)  ->  write, fsync(mark.new)  ->  rename to mark  ->  fsync(folder)
    begin_update:  unlink(mark)  ->  fsync(folder)  ->  the update writes

While there is a mark, pages are mapped privately, at the same addresses: what the caller writes into a state tensor
reaches the file at the next `begin_update`. A file without a mark is never read. All space is reserved when the file is
opened, because a full disk would end the process with SIGBUS in the middle of an update.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import mmap
import os
import secrets
import sys
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.engine.memory_order import in_shape
from zc.errors import PlanError
from zc.machine import sync_folder, write_synced
from zc.planning.plan import Plan

if TYPE_CHECKING:
    from zc.engine.core import Core


def regions_of(plan: Plan, keys: Sequence[str]) -> tuple[Region, ...]:
    """The file's regions, bucket by bucket in the order of the update: its state tensors [S], and the fp32 master [S]
    if the weights are narrower."""
    sizes: dict[str, tuple[int, torch.dtype]] = {}
    for bucket in plan.buckets:
        named = [*keys, *(["master_shard"] if bucket.has_master else [])]
        sizes.update({f"{bucket.index}/{key}": (bucket.layout.numel_shard, bucket.acc_dtype) for key in named})
    return place(sizes)


def open_file(
    folder: str | Path, rank: int, plan: Plan, name: str, keys: Sequence[str], params: Mapping[str, nn.Parameter]
) -> StateFile:
    """Opens the file for this plan, and for an optimizer of the class ``name`` whose state tensors are ``keys``. Raises
    as `StateFile` does, and PlanError if an earlier run's state belongs to weights other than rank 0's, which all ranks
    get."""
    slots = [f"{slot} of bucket {b.index}" for b in plan.buckets for slot in b.slots]
    lines = [f"optimizer {name} with {', '.join(keys) or 'no state'}", *slots]
    file = StateFile(Path(folder), rank, plan.world_size, regions_of(plan, keys), lines)
    if file.mark is not None and rank == 0:
        dtypes = {s.name: b.param_dtype for b in plan.buckets for s in b.slots}
        for param, wanted in file.mark["weights"].items():
            if checksum(params[param], dtypes[param]) != wanted:
                path, number = file.path, file.mark["num_updates"]
                file.discard()
                raise PlanError(
                    f"{path} holds the state of other weights ({param} differs), those of update "
                    f"{number:,}: load them before zc.compile, or remove {path.stem}.* from every rank"
                )
    return file


def checksum(param: Tensor, dtype: torch.dtype) -> int:
    """CRC-32 of the values, as ``dtype``."""
    values = param.detach().to(dtype=dtype).contiguous().cpu().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data) if values.numel() else 0


class DiskState:
    """The optimizer's state of ``slices`` (by name) in ``file``."""

    def __init__(
        self, core: Core, file: StateFile, optimizer: Optimizer, slices: Mapping[str, nn.Parameter]
    ) -> None:
        self.core, self.file, self.optimizer, self.slices = core, file, optimizer, slices
        self.num_updates = 0
        self._place: dict[tuple[str, str], Tensor] = {}
        keys = {name.split("/")[1] for name in file.regions} - {"master_shard"}
        rank = core.group.rank
        for bucket in core.plan.buckets:
            for slot in bucket.slots:
                if slot.name in slices:
                    inside, _ = bucket.layout.owned_part(slot, rank)
                    for key in keys:
                        whole = file.tensor(f"{bucket.index}/{key}")
                        self._place[slot.name, key] = in_shape(whole[inside], slot)
        self._resume()

    def _resume(self) -> None:
        """Loads the state that an earlier run flushed, on all ranks or on none."""
        mark, group = self.file.mark, self.core.group
        number = mark["flush"] if mark is not None else -1
        low, high = group.max_on_host([-number, number])
        if mark is None or -low != high:
            self.file.mark = None
            if self.file.has_earlier or -low != high:
                why = "on some ranks it is not complete" if -low != high else "it is not complete"
                self.core.say_once(f"offload_dir: {why}, so state of an earlier run in it is not used")
            self.file.begin_update()
            return
        self.num_updates = mark["num_updates"]
        for bucket in self.core.plan.buckets:
            if bucket.has_master:
                self.core.buffers.master_shard[bucket.index].copy_(self.file.tensor(f"{bucket.index}/master_shard"))
        for name, items in mark["state"].items():
            param = self.slices[name]
            self.optimizer.state[param] = {key: self._read_item(name, key, item) for key, item in items.items()}
        self.core.say_once(f"offload_dir: state after update {self.num_updates:,} taken up")

    def _read_item(self, name: str, key: str, item: Any) -> Any:
        if item == "file":
            return self._place[name, key]
        if isinstance(item, dict):
            return torch.tensor(item["value"], dtype=getattr(torch, item["dtype"]), device="cpu")
        return item

    def begin_update(self) -> None:
        self.begin_writes()
        self.num_updates += 1

    def begin_writes(self) -> None:
        """Call it before any write to the file. A state that lies in another one's place, because the caller has
        exchanged the two, moves to memory: the other one is written first."""
        self.file.begin_update()
        for name, param in self.slices.items():
            for key, item in list(self.optimizer.state.get(param, {}).items()):
                if isinstance(item, Tensor) and not self._is_in_place(name, key, item) and self.file.holds(item):
                    self.optimizer.state[param][key] = item.clone()

    def prefetch(self, bucket: int) -> None:
        """Announces the reads of a bucket's update."""
        for name in self.file.regions:
            if name.startswith(f"{bucket}/") and not name.endswith("/master_shard"):
                self.file.prefetch(name)

    def move_to_file(self, bucket: int) -> None:
        """Moves state tensors that the optimizer created in memory (a first update, load_state_dict) to the file."""
        for slot in self.core.plan.buckets[bucket].slots:
            param = self.slices.get(slot.name)
            state = self.optimizer.state.get(param) if param is not None else None
            for key, item in list((state or {}).items()):
                if not isinstance(item, Tensor) or item.dim() == 0:
                    continue
                place = self._place.get((slot.name, key))
                if place is None or item.dtype != place.dtype or item.shape != place.shape:
                    self.core.say_once(
                        f"offload='disk': the state {key} was not there when the file was made; it stays in memory"
                    )
                elif not self._is_in_place(slot.name, key, item) and item.numel():
                    assert state is not None
                    place.copy_(item)
                    state[key] = place

    def _is_in_place(self, name: str, key: str, item: Tensor) -> bool:
        place = self._place.get((name, key))
        if place is None or item.data_ptr() != place.data_ptr():
            return False
        return item.stride() == place.stride()  # a transposed one is not

    def flush(self, prepare: Callable[[], None]) -> None:
        """See `zc.flush_state`. ``prepare`` copies the caller's writes to parameters into the masters."""
        core, rank = self.core, self.core.group.rank
        (number,) = core.group.max_on_host([secrets.randbits(62) if rank == 0 else 0])
        with core.group.refuse_together("failed in zc.flush_state"):
            prepare()
            self.begin_writes()
            for bucket in core.plan.buckets:
                self.move_to_file(bucket.index)
                if bucket.has_master:
                    self.file.tensor(f"{bucket.index}/master_shard").copy_(core.buffers.master_shard[bucket.index])
            dtypes = {s.name: b.param_dtype for b in core.plan.buckets for s in b.slots}
            weights = {n: checksum(p, dtypes[n]) for n, p in core.params.items()} if rank == 0 else {}
            state = {name: self._items_of(name, param) for name, param in self.slices.items()}
            facts = {"flush": number, "num_updates": self.num_updates, "weights": weights}
            self.file.flush({**facts, "state": {name: items for name, items in state.items() if items}})
        if not self.file.is_private:
            core.say_once(
                "offload_dir: the system maps no private copy of it, so change no state in place before the next "
                "step(): a resume would have the change"
            )

    def close(self) -> None:
        """See `StateFile.close`."""
        self._place.clear()
        self.file.close()

    def _items_of(self, name: str, param: nn.Parameter) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for key, item in self.optimizer.state.get(param, {}).items():
            if not isinstance(item, Tensor):
                saved[key] = item
            elif item.dim() == 0:
                saved[key] = {"value": item.item(), "dtype": str(item.dtype).removeprefix("torch.")}
            elif self._is_in_place(name, key, item):
                saved[key] = "file"
            else:
                raise PlanError(f"the state {key} of {name} is not in the file, so it can't be flushed")
        return saved


try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_CHUNK = 1 << 20
# Python's mmap does not name these two. FIXED: of Linux and macOS. NORESERVE: a private mapping counts as memory that
# may be needed, and Linux refuses one that is larger than all there is, as states on disk may be
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


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
            differs), or the folder that of another number of ranks. The folder is then unchanged.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, regions: Sequence[Region], lines: Sequence[str]):
        if not folder.is_dir():
            raise PlanError(f"offload_dir {folder} is not a folder: make it first, on the disk that is meant")
        _refuse_other_numbers(folder, world_size)
        self.folder, self._rank, self.path = folder, rank, folder / f"zc-rank{rank:05d}-of-{world_size:05d}.state"
        self.mark_path = self.path.with_suffix(".mark")
        self.regions = {region.name: region for region in regions}
        last = regions[-1] if regions else None
        self.nbytes = max(last.offset + last.nbytes if last else 0, 1)  # mmap takes no empty file
        self.lines = [*lines, *(f"{r.name}: {r.numel} {r.dtype} at {r.offset}" for r in regions)]
        self.existed = self.path.exists()
        self.has_earlier = self.existed or bool(_of_other_numbers(folder, world_size, "state"))
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
        views = {r.name: memoryview(self._map)[r.offset : r.offset + r.nbytes] for r in regions}
        self._tensors = {r.name: torch.frombuffer(views[r.name], dtype=r.dtype, count=r.numel) for r in regions}
        self._views = {name: weakref.ref(view) for name, view in views.items()}  # each lives as long as its tensors
        self.is_private = False  # what the caller writes into a tensor stays out of the file
        if self.mark is not None:
            self._map_privately()
        # a run that ends, or is closed, without a flush removes its file; a killed one leaves a file without a mark
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
        for here, there in itertools.zip_longest(self.lines, lines, fillvalue="nothing"):
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

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the mapped file."""
        if not self._tensors:
            return False
        start = next(iter(self._tensors.values())).data_ptr()
        return start <= tensor.data_ptr() < start + self.nbytes

    def prefetch(self, name: str) -> None:
        """Asks the system to read a region ahead; returns at once."""
        region = self.regions[name]
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_WILLNEED, region.offset, region.nbytes)

    def begin_update(self) -> None:
        """Call it before any write: from here on a restart finds no mark. What the caller has written since there was
        one goes to the file."""
        self.mark = None
        if self.mark_path.exists():
            self.mark_path.unlink()
            sync_folder(self.folder)
        if self.is_private:
            for start in range(0, self.nbytes, _CHUNK):
                here = self._map[start : start + _CHUNK]
                if os.pread(self._fd, len(here), start) != here:
                    os.pwrite(self._fd, here, start)
            _map_again(self._map, self._fd, 0, self.nbytes, mmap.MAP_SHARED)
            self.is_private = False

    def _map_privately(self) -> None:
        """From here on a write to a tensor copies the page that it is in, and the file stays as it is, if the system
        allows it: where it promises no more memory than it has (vm.overcommit_memory=2), it may not."""
        if fcntl is not None:
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            with contextlib.suppress(OSError):
                mmap.mmap(self._fd, self.nbytes, flags=flags).close()  # a failure in place unmaps what was there
                _map_again(self._map, self._fd, 0, self.nbytes, flags)
                self.is_private = True

    def flush(self, facts: Mapping[str, Any]) -> None:
        """Syncs the file to disk, and then writes the mark with ``facts``, which the next run has in `found`."""
        self._map.flush()
        os.fsync(self._fd)
        text = json.dumps({"format": FORMAT, "nbytes": self.nbytes, "lines": self.lines, **facts})
        new = self.mark_path.with_suffix(".mark.new")
        write_synced(new, text.encode())
        self._map_privately()
        os.replace(new, self.mark_path)
        sync_folder(self.folder)

    def close(self) -> None:
        """Gives the file up, so that another model may open it. The mapping itself ends with the last tensor in it: a
        region of which the caller keeps one becomes ordinary memory, since the file may be another model's next."""
        self._tensors.clear()
        for name, view in self._views.items() if fcntl is not None else ():
            if view() is not None:
                start, stop = self.regions[name].offset, self.regions[name].offset + self.regions[name].nbytes
                content = self._map[start:stop]
                _map_again(self._map, -1, start, stop - start, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._map[start:stop] = content
        del self._map
        self._end()

    def discard(self) -> None:
        """Restores the folder, because the plan was refused elsewhere."""
        self._remove_if_new()
        self._end.detach()
        self._tensors.clear()
        _unlock_and_close(self._fd)

    def _remove_if_new(self) -> None:
        if not self.existed:
            self.path.unlink(missing_ok=True)


def _of_other_numbers(folder: Path, world_size: int, suffix: str) -> list[Path]:
    """The files that another number of ranks has left in the folder."""
    paths = sorted(folder.glob(f"zc-rank*-of-*.{suffix}"))
    return [path for path in paths if path.stem.rpartition("-of-")[2] != f"{world_size:05d}"]


def _refuse_other_numbers(folder: Path, world_size: int) -> None:
    """Raises PlanError if another number of ranks has completed its state in the folder."""
    for mark in _of_other_numbers(folder, world_size, "mark"):
        number = mark.stem.rpartition("-of-")[2]
        raise PlanError(
            f"offload_dir {folder} holds the state of {number.lstrip('0')} rank(s) ({mark.name}), and this run has "
            f"{world_size}: start as many ranks as then, and to change their number call zc.save there and zc.load "
            f"here. To start without that state, remove zc-rank*-of-{number}.*"
        )


def _end(fd: int, path: Path, mark: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked worker ends
        return
    if not mark.exists():
        path.unlink(missing_ok=True)
    _unlock_and_close(fd)


def _map_again(mapped: mmap.mmap, fd: int, offset: int, nbytes: int, flags: int) -> None:
    """Puts a mapping with other ``flags`` in the place of these bytes of ``mapped``, at the same address, so that
    tensors there stay valid."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped, offset))
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED
    if call(address, nbytes, access, flags, fd, offset if fd >= 0 else 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _unlock_and_close(fd: int) -> None:
    """Closing alone would not unlock: the mapping, and forked workers, have copies of the descriptor."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
