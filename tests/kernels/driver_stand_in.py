"""What a launch would compile, without a GPU: the kernels' own launching code, CPU tensors, a stand-in for the driver.

Triton decides at a launch which argument is compiled in (1), which is known to be a multiple of 16, and which type it
has. Here it decides so, of the very arguments that the code passes, and compiles; only the launch itself is left out.

Relies on ``JITFunction.run(grid=, warmup=)`` and on what it asks of ``triton.runtime.driver.active`` (3.6 to 3.9).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class _Driver:
    """A machine with a GPU of each kind; ``current`` is the one that is launched on."""

    def __init__(self, current: str) -> None:
        self.current = current

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.current]

    def get_current_device(self) -> str:
        return self.current  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def compiled_on(target: str) -> Iterator[list[Any]]:
    """What is launched inside, compiled for ``target``: a kernel a launch, the same one where it is launched again."""
    binaries: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binaries.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_Driver(target))
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield binaries
    finally:
        driver._active = None  # found again by whoever launches next; here there may be none
