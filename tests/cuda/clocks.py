"""A GPU's streams, its caching allocator and NCCL, stood in for on a CPU. Every operation runs at once, in the order in
which it is issued, and the recorder keeps what would order it on a GPU.

A stream counts the operations that it gets. Its *clock* says of each stream how many of those are done before its next
one begins. The host has a clock too: work that it issues begins after all that it has done itself. Three rules are
checked; `Gpu.errors` names each place that breaks one:

- *Memory*: the allocator gives memory back to the stream that allocated it, which may write it next. Everything that
  used the memory must be in the clock of that stream, or of a stream that ``record_stream`` named.
- *Order*: of two operations that touch the same bytes, one of which writes, the later has the earlier in its clock.
- *Collectives*: all ranks issue the same collectives in the same order, for each communicator (`compare`).
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zc
from zc.engine import streams as engine_streams
from zc.engine.operations import Operations
from zc.engine.streams import DeviceStreams
from zc.offload.host_step import HostMemory
from zc.ranks.exchanges import Exchanges
from zc.ranks.group import Group
from zc.schedule.buffer import HOST

Clock = dict["Stream", int]
Lists = dict[str, list[str]]  # communicator -> its collectives


class Stream:
    """``torch.Stream``."""

    def __init__(self, gpu: Gpu, name: str = "", priority: int = 0, *, is_device: bool = True) -> None:
        self.gpu, self.priority = gpu, priority
        self.name = name or f"side {len(gpu.streams)}"
        self.clock: Clock = {self: 0}
        if is_device:
            gpu.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def __enter__(self) -> None:
        self._before = self.gpu.current
        self.gpu.current = self

    def __exit__(self, *_: object) -> None:
        self.gpu.current = self._before

    def wait(self, clock: Clock) -> None:
        self.gpu.sweep()
        for stream, count in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.clock)

    def wait_event(self, event: Event) -> None:
        self.wait(event.clock)

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.host_waits(f"Stream.synchronize of {self}", self.clock)


class Event:
    """``torch.Event``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream) -> None:
        self.gpu.sweep()
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self.gpu.host_waits("Event.synchronize", self.clock)


@dataclass(frozen=True)
class _Touch:
    """Bytes [start, stop) of a storage, by the operation number ``count`` of a stream."""

    start: int
    stop: int
    stream: Stream
    count: int
    writes: bool
    what: str

    def conflicts(self, other: _Touch) -> bool:
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop

    def covers(self, other: _Touch) -> bool:
        return self.start <= other.start and other.stop <= self.stop and (self.writes or not other.writes)


@dataclass
class _Memory:
    ref: StorageWeakRef
    home: Stream  # that allocated it
    made_by: str
    used: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    told: set[Stream] = field(default_factory=set)
    touches: list[_Touch] = field(default_factory=list)


class _Work:
    """A collective on NCCL's stream: who waits for it comes after it, and the host goes on."""

    def __init__(self, work: Any, gpu: Gpu, clock: Clock) -> None:
        self._work, self._gpu, self._clock = work, gpu, clock

    def wait(self, *args: Any) -> None:
        self._work.wait()
        self._gpu.current.wait(self._clock)

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done


# which tensors of a collective it writes, by position among its tensors; all of them where it is not here
_WRITES_FIRST = ("alltoall_base_", "_allgather_base_", "_reduce_scatter_base_")
# what takes an element's value to the host
_READS_TO_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")


class Gpu(TorchDispatchMode):
    """A device with one stream, ``home``, that is current where no other is. `errors` names each broken rule, `waits`
    what the host stood still for, `collectives` what each communicator was given."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.home = Stream(self, "home")
        self.host = Stream(self, "the host", is_device=False)
        self.current = self.home
        self.errors: list[str] = []
        self.waits: list[str] = []
        self.collectives: Lists = {}
        self.levels: dict[str, str] = {}  # communicator -> "host" or "net", of those inside a host and between hosts
        self.order: list[str] = []  # all collectives, of whatever communicator, by its level
        self.sent: list[tuple[Any, Tensor]] = []  # messages under way
        self._communicators: dict[str, Stream] = {}  # NCCL's stream of each, by the group's name
        self._launched: Clock = {}  # of the collective that was launched last
        self._memory: dict[int, _Memory] = {}
        self._on_host: dict[int, StorageWeakRef] = {}  # storages in host memory that a device may read

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles while this records (torch 2.12 and later)."""
        return True

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def host_waits(self, why: str, clock: Clock) -> None:
        """What is issued from here on comes after ``clock``, on every stream."""
        self.waits.append(why)
        for stream in (self.host, *self.streams):
            stream.wait(clock)

    def told(self, tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self._of(tensor, "nobody").told.add(stream)

    def pinned(self, tensor: Tensor) -> Tensor:
        """``tensor`` lies in host memory, and copies to and from it may be queued."""
        storage = tensor.untyped_storage()
        self._on_host[storage._cdata] = StorageWeakRef(storage)
        self._memory.pop(storage._cdata, None)
        return tensor

    def sweep(self) -> None:
        """Looks for memory that is gone."""
        for key in [key for key, memory in self._memory.items() if memory.ref.expired()]:
            memory = self._memory.pop(key)
            self._on_host.pop(key, None)
            safe = [memory.home.clock, *(stream.clock for stream in memory.told)]
            for stream, (count, user) in memory.used.items():
                if not any(clock.get(stream, 0) >= count for clock in safe):
                    self._report(
                        f"what {memory.made_by} allocated on {memory.home} is given away while {user} may be using it "
                        f"on {stream}"
                    )

    def _report(self, error: str) -> None:
        if error not in self.errors:
            self.errors.append(error)

    def _of(self, tensor: Tensor, maker: str) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory or self._memory[key].ref.expired():
            self._memory[key] = _Memory(StorageWeakRef(storage), self.current, maker)
        return self._memory[key]

    def _is_on_host(self, tensor: Tensor) -> bool:
        ref = self._on_host.get(tensor.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    # --- operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a class of its own: what that asks for comes back here
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        if not inputs and not outputs:
            return out
        on_host = [t for t in inputs if self._is_on_host(t)]
        copies = func.name() in ("aten::copy_", "aten::_to_copy")
        # a copy between the two memories is queued on the current stream, and the host waits if it is asked to
        is_mixed = copies and 0 < len(on_host) < len({*map(id, inputs), *map(id, outputs)})
        goes_over = is_mixed or kwargs.get("device") is not None  # "like" memory of the host, on a device
        stream = self.host if self.current is self.host or (on_host and not goes_over) else self.current
        place = f"{func.name()} ({_place()})"
        old = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in old]
        written = [*_written(func, args, kwargs)]
        if not any(part in func.name() for part in ("empty", "set_")):
            written += fresh
        if stream is self.host:
            for tensor in fresh:
                self.pinned(tensor)
        is_view = not written and not fresh
        changed = {id(t) for t in written}
        reads_none = is_view or "empty" in func.name()
        self.issue(stream, place, () if reads_none else [t for t in inputs if id(t) not in changed], written)
        with self.on(stream):
            for tensor in (*inputs, *outputs):  # a view keeps its storage in use as well
                self._of(tensor, place).used[stream] = stream.clock[stream], place
        blocks = is_mixed and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if blocks or (func.name() in _READS_TO_HOST and stream is not self.host):
            self.host_waits(place, stream.clock)
        return out

    def issue(self, stream: Stream, what: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """One operation on ``stream``. Reports an earlier one in conflict that is not in the clock."""
        if stream is not self.host:
            stream.wait(self.host.clock)
        stream.clock[stream] += 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                start, stop = _bytes(tensor)
                if start == stop:
                    continue
                touch = _Touch(start, stop, stream, stream.clock[stream], writes, what)
                memory = self._of(tensor, what)
                for other in memory.touches:
                    if other.conflicts(touch) and stream.clock.get(other.stream, 0) < other.count:
                        kinds = f"{'writes' if writes else 'reads'} what {other.what} on {other.stream}"
                        self._report(f"{what} on {stream} {kinds} {'writes' if other.writes else 'reads'}: unordered")
                # one that this covers is in this one's clock, or was reported
                memory.touches = [t for t in memory.touches if not (touch.covers(t) and (writes or t.stream is stream))]
                memory.touches.append(touch)

    # --- collectives ---

    def communicator(self, group: dist.ProcessGroup) -> None:
        """``group`` carries tensors of the device, on a stream of its own."""
        self._communicators[group.group_name] = Stream(self, f"NCCL {group.group_name}")
        self.collectives[group.group_name] = []

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        objects = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.ScriptObject)]
        name = next((name for name in map(_name, objects) if name), "")
        if name not in self._communicators:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        out = func(*args, **kwargs)
        kind = func.name().split("::")[1].split(".")[0]
        first = 1 if kind in _WRITES_FIRST else len(tensors)
        # pieces of unequal length: each rank sends and receives its own number of elements
        has_pieces = kind == "alltoall_base_" and any(isinstance(a, list | tuple) and a for a in args)
        self.launch(name, kind, tensors[first:], tensors[:first], has_pieces=has_pieces)
        return out

    def launch(
        self,
        communicator: str,
        kind: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        *,
        has_pieces: bool = False,
    ) -> None:
        """A collective, after what the current stream has."""
        sizes = ", ".join(f"{'pieces' if has_pieces else t.numel()} {t.dtype}" for t in (*written, *read)[:1])
        self.collectives[communicator].append(f"{kind} of {sizes}")
        self.order.append(f"{self.levels.get(communicator, 'all')}: {kind} of {sizes}")
        stream = self._communicators[communicator]
        stream.wait(self.current.clock)
        self.issue(stream, f"{kind} ({_place()})", read, written)
        self._launched = dict(stream.clock)

    def watched(self, work: Any) -> _Work:
        """The handle of the collective that was launched last."""
        return _Work(work, self, self._launched)


def compare(lists: Sequence[Lists]) -> list[str]:
    """The first difference between ranks in what each communicator was given; ``lists`` by rank."""
    errors = []
    for name in sorted({name for each in lists for name in each}):
        members = [(rank, each[name]) for rank, each in enumerate(lists) if name in each]
        first, expected = members[0]
        for rank, issued in members[1:]:
            if issued != expected:
                pairs = zip(expected, issued, strict=False)
                at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(issued)))
                errors.append(
                    f"{name}: collective {at} of rank {first} is {[*expected, 'none'][at]}, of rank {rank} "
                    f"{[*issued, 'none'][at]}"
                )
                break
    return errors


def _tensors(tree: Any) -> list[Tensor]:
    """Tensors with memory of their own: no wrapper that dispatches elsewhere."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and _is_real(t)]


def _is_real(tensor: Tensor) -> bool:
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    return is_plain and tensor.device.type != "meta" and not torch._is_functional_tensor(tensor)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[k] if k < len(args) else kwargs.get(argument.name))


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """[start, stop) in its storage, gaps between rows included."""
    if not tensor.numel():
        return 0, 0
    start = tensor.storage_offset()
    stop = start + 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), stop * tensor.element_size()


def _name(group: torch.ScriptObject) -> str:
    try:
        return dist.ProcessGroup.unbox(group).group_name
    except (RuntimeError, ValueError, AttributeError):
        return ""  # a reduction or options


def _place() -> str:
    """The line of zc's that asks for an operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not str(frame.f_globals.get("__name__", "")).startswith("zc."):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


@contextlib.contextmanager
def recorded(with_memory: bool = True) -> Iterator[tuple[Gpu, pytest.MonkeyPatch]]:
    """zc runs a device's streams over CPU tensors, and ranks exchange gradients as over NCCL. ``with_memory``:
    operations are recorded, too."""
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patch:
        install(patch, gpu)
        with gpu if with_memory else contextlib.nullcontext():
            yield gpu, patch
            gc.collect()
            gpu.sweep()


def install(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """``gpu`` is torch's one device from here on, for tensors of the CPU."""
    patch.setattr(engine_streams, "Stream", lambda device, priority: Stream(gpu, priority=priority))
    patch.setattr(engine_streams, "Event", lambda device: Event(gpu))
    patch.setattr(torch.accelerator, "current_stream", lambda device=None: gpu.current)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: gpu.told(tensor, stream))
    patch.setattr(zc.api, "make_streams", DeviceStreams)
    patch.setenv("ZC_HOST_MEMORY", "0")  # NCCL's ranks read no memory of each other
    _install_host(patch, gpu)
    _install_nccl(patch, gpu)


def _install_host(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Host memory is known as such, and tasks of the host stream are the host's own."""
    zeros, run_on, segment = HostMemory.zeros, DeviceStreams.run_on, Operations.segment

    def run(streams: DeviceStreams, stream: str, task: Callable[[], object]) -> None:
        with gpu.on(gpu.host if stream == HOST else None):
            run_on(streams, stream, task)

    def compiled(ops: Operations, key: str, args: list[Any]) -> Any:
        """Inductor's kernels are not dispatched: a segment reads its inputs and writes its results."""
        read = _tensors(args)
        out = segment(ops, key, args)
        old = {t.untyped_storage()._cdata for t in read}
        gpu.issue(gpu.current, key, read, [t for t in _tensors(out) if t.untyped_storage()._cdata not in old])
        return out

    patch.setattr(HostMemory, "zeros", lambda memory, numel, dtype: gpu.pinned(zeros(memory, numel, dtype)))
    patch.setattr(DeviceStreams, "run_on", run)
    patch.setattr(Operations, "segment", compiled)


def _install_nccl(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Exchanges of gradients and weights go as they do with NCCL; gloo carries them."""
    open_data, open_levels, watched = Group.open_data, Group.open_levels, Exchanges._data_work

    def opened(group: Group, device: torch.device) -> None:
        open_data(group, device)
        if group.data is not None:
            group._by_memory = group._by_pairs = False
            group._waits_on_stream = True
            gpu.communicator(group.data)

    def opened_levels(group: Group) -> None:
        open_levels(group)
        assert group.levels is not None
        for level, exchanges in group.levels._asdict().items():
            gpu.communicator(exchanges.data)
            gpu.levels[exchanges.data.group_name] = level

    def broadcast_(group: Group, tensor: Tensor) -> None:
        if group.data is None:
            return
        gpu.launch(group.data.group_name, "broadcast_", [], [tensor])
        gpu.current.wait(gpu._launched)
        # messages, so that ranks whose orders differ end and can be compared
        if group.rank == 0:
            sent = tensor.clone()
            gpu.sent.append((group.send_to_all([sent], "the stand-in's broadcast"), sent))
        else:
            group.receive(tensor, "the stand-in's broadcast")

    def data_work(group: Exchanges, work: Any, entry: Any) -> Any:
        return gpu.watched(watched(group, work, entry))

    patch.setattr(Group, "open_data", opened)
    patch.setattr(Group, "broadcast_", broadcast_)
    patch.setattr(Exchanges, "_data_work", data_work)
    patch.setattr(Group, "open_levels", opened_levels)
