"""A GPU's streams and NCCL, stood in for on a CPU. Every operation runs at once, in the order in which it is issued;
`Gpu` keeps what each communicator was given, and what the host stood still for. All ranks issue the same collectives in
the same order, for each communicator (`compare`). Which operation may run before which is asked of the simulated device
(tests/simulated_device).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zc
from zc.engine import streams as engine_streams
from zc.engine.streams import DeviceStreams
from zc.ranks.exchanges import Exchanges
from zc.ranks.group import Group

Lists = dict[str, list[str]]  # communicator -> its collectives


class Stream:
    """``torch.Stream``."""

    def __init__(self, gpu: Gpu, name: str = "") -> None:
        self.gpu, self.name = gpu, name or f"side {len(gpu.streams)}"
        gpu.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def __enter__(self) -> None:
        self._before = self.gpu.current
        self.gpu.current = self

    def __exit__(self, *_: object) -> None:
        self.gpu.current = self._before

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        return Event(self.gpu)

    def synchronize(self) -> None:
        self.gpu.waits.append(f"Stream.synchronize of {self}")


class Event:
    """``torch.Event``."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        self.gpu.waits.append("Event.synchronize")


class _Work:
    """A collective on NCCL's stream: the host goes on."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *args: Any) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done


class Gpu(TorchDispatchMode):
    """A device with one stream, ``home``, that is current where no other is. `waits`: what the host stood still for;
    `collectives`: what each communicator was given."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.home = self.current = Stream(self, "home")
        self.waits: list[str] = []
        self.collectives: Lists = {}
        self.levels: dict[str, str] = {}  # communicator -> "host" or "net", of those inside a host and between hosts
        self.order: list[str] = []  # all collectives, of whatever communicator, by its level
        self.sent: list[tuple[Any, Tensor]] = []  # messages under way

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles while this records (torch 2.12 and later)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a class of its own: what that asks for comes back here
        out = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._collective(func, args, kwargs)
        return out

    def communicator(self, group: dist.ProcessGroup) -> None:
        """``group`` carries tensors of the device."""
        self.collectives[group.group_name] = []

    def _collective(self, func: Any, args: Any, kwargs: Any) -> None:
        objects = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.ScriptObject)]
        name = next((name for name in map(_name, objects) if name), "")
        if name not in self.collectives:
            return
        kind = func.name().split("::")[1].split(".")[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # pieces of unequal length: each rank sends and receives its own number of elements
        has_pieces = kind == "alltoall_base_" and any(isinstance(a, list | tuple) and a for a in args)
        self.launch(name, kind, tensors[0], has_pieces=has_pieces)

    def launch(self, communicator: str, kind: str, first: Tensor, *, has_pieces: bool = False) -> None:
        entry = f"{kind} of {'pieces' if has_pieces else first.numel()} {first.dtype}"
        self.collectives[communicator].append(entry)
        self.order.append(f"{self.levels.get(communicator, 'all')}: {entry}")


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


def _name(group: torch.ScriptObject) -> str:
    try:
        return dist.ProcessGroup.unbox(group).group_name
    except (RuntimeError, ValueError, AttributeError):
        return ""  # a reduction or options


@contextlib.contextmanager
def recorded(with_collectives: bool = True) -> Iterator[tuple[Gpu, pytest.MonkeyPatch]]:
    """zc runs a device's streams over CPU tensors, and ranks exchange gradients as over NCCL."""
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patch:
        install(patch, gpu)
        with gpu if with_collectives else contextlib.nullcontext():
            yield gpu, patch


def install(patch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """``gpu`` is torch's one device from here on, for tensors of the CPU."""
    patch.setattr(engine_streams, "Stream", lambda device, priority: Stream(gpu))
    patch.setattr(engine_streams, "Event", lambda device: Event(gpu))
    patch.setattr(torch.accelerator, "current_stream", lambda device=None: gpu.current)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(zc.api, "make_streams", DeviceStreams)
    patch.setenv("ZC_HOST_MEMORY", "0")  # NCCL's ranks read no memory of each other
    _install_nccl(patch, gpu)


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
        gpu.launch(group.data.group_name, "broadcast_", tensor)
        # messages, so that ranks whose orders differ end and can be compared
        if group.rank == 0:
            sent = tensor.clone()
            gpu.sent.append((group.send_to_all([sent], "the stand-in's broadcast"), sent))
        else:
            group.receive(tensor, "the stand-in's broadcast")

    def data_work(group: Exchanges, work: Any, entry: Any) -> Any:
        return _Work(watched(group, work, entry))

    patch.setattr(Group, "open_data", opened)
    patch.setattr(Group, "broadcast_", broadcast_)
    patch.setattr(Exchanges, "_data_work", data_work)
    patch.setattr(Group, "open_levels", opened_levels)
