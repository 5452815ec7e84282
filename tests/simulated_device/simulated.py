"""Makes the compiled device one of torch: type "sim", two devices, process group "simccl".

`install` is for a process of its own: torch has one such device, for good.
"""

from __future__ import annotations

import atexit
import contextlib
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import device_build
import torch
import torch.distributed as dist
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

NAME = "sim"
BACKENDS = f"cpu:gloo,{NAME}:simccl"
_installed: types.ModuleType | None = None
# lifetime: the process; a group of the device uses the gloo group below it from threads of its streams
_GLOO_GROUPS: list[Any] = []


class Touch(NamedTuple):
    """An operation, the phase of the loop that issued it, and its stream."""

    operator: str
    phase: str
    stream: str


class Race(NamedTuple):
    """``how``: "read after write", say; the two are not ordered."""

    how: str
    before: Touch
    now: Touch
    buffer: str
    count: int

    def __str__(self) -> str:
        (a, b), n = (
            (f"{t.operator} in {t.phase or 'no phase'} on the {t.stream}" for t in (self.before, self.now)),
            self.count,
        )
        return f"{self.how} of {self.buffer}: {b}, and nothing orders it behind {a} ({n} times)"


def install() -> Any:
    """The compiled module; torch has the device from here on."""
    global _installed
    if _installed is not None:
        return _installed
    _installed = compiled = device_build.load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    dist.Backend.register_backend("simccl", _make_group, extended_api=True, devices=[NAME])
    interface = _interface(compiled)
    for name in (NAME, *(f"{NAME}:{k}" for k in range(compiled.num_devices))):
        register_interface_for_device(name, interface)
    atexit.register(synchronize)
    return compiled


def synchronize() -> None:
    for device in range(install().num_devices):
        install().synchronize(device)


def races() -> list[Race]:
    return [Race(how, Touch(*before), Touch(*now), *rest) for how, before, now, *rest in install().races()]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """What is issued inside, by any thread, is of this phase."""
    before = install().set_phase(name)
    try:
        yield
    finally:
        install().set_phase(before)


@contextlib.contextmanager
def late(delays: Mapping[str, int] | None = None, jitter: int = 0, seed: int = 0) -> Iterator[None]:
    """Each task that is queued inside waits before it runs: as many microseconds as ``delays`` says of its kind of
    stream ("default", "high", "side", "group"), and up to ``jitter`` more, drawn by ``seed``."""
    install().set_delays(dict(delays or {}), jitter, seed)
    try:
        yield
    finally:
        install().set_delays({}, 0, 0)


def _index(compiled: Any, device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return int(compiled.current_device() if index is None else index)


def _device_module(compiled: Any) -> types.ModuleType:
    """``torch.sim``: what torch and zc ask of a device's module."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: compiled.num_devices
    module.current_device = compiled.current_device
    module.set_device = lambda device: compiled.set_device(_index(compiled, device))
    module.synchronize = lambda device=None: compiled.synchronize(_index(compiled, device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(compiled, device))
    module.memory_allocated = lambda device=None: compiled.nbytes_allocated(_index(compiled, device))
    module.mem_get_info = lambda device=None: (1 << 33, 1 << 33)
    module.manual_seed = module.manual_seed_all = lambda seed: None  # its kernels draw from the CPU's generator
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    return module


def _make_group(options: Any, _: Any = None) -> Any:
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    _GLOO_GROUPS.append(gloo)
    return install().make_group(gloo, options.group_rank, options.group_size)


def _interface(compiled: Any) -> type[DeviceInterface]:
    """What Dynamo asks of a device."""

    class Interface(DeviceInterface):
        device, Event, Stream = torch.device, torch.Event, torch.Stream
        current_device = staticmethod(compiled.current_device)
        set_device = staticmethod(lambda device: compiled.set_device(_index(compiled, device)))
        device_count = staticmethod(lambda: compiled.num_devices)
        is_available = staticmethod(lambda: True)
        synchronize = staticmethod(lambda device=None: compiled.synchronize(_index(compiled, device)))
        current_stream = staticmethod(lambda device=None: torch.accelerator.current_stream(_index(compiled, device)))
        set_stream = staticmethod(torch.accelerator.set_stream)
        get_compute_capability = staticmethod(lambda device=None: 0)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        exchange_device = maybe_exchange_device = staticmethod(lambda device: compiled.current_device())

        class Worker:
            current_device = staticmethod(compiled.current_device)
            set_device = staticmethod(compiled.set_device)
            get_device_properties = staticmethod(lambda device=None: None)

    return Interface
