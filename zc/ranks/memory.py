"""Reads from the memory of another process on this host by process_vm_readv(2): one copy, no file, no mapping.

No memory has to be shared: gradients and parameters stay private to a rank, and a killed rank leaves no file behind.
Reading freed memory returns an error, not a signal. MPI libraries use the same call inside a host (Cross Memory Attach,
Linux 3.2). docs/decisions.md compares it with mapped memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from torch import Tensor

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv  # AttributeError: not Linux
    call.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    return call


def let_siblings_read() -> None:
    """Lets the launcher's other children read this process, where the kernel allows only ancestors (Yama, scope 1)."""
    with contextlib.suppress(OSError, AttributeError):
        if _YAMA.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)


class Reader:
    """Reads memory of other processes, by pid."""

    def __init__(self) -> None:
        self._call = _readv()

    def read_into(self, out: int, pid: int, address: int, nbytes: int) -> None:
        """Copies ``nbytes`` from ``address`` of process ``pid`` to address ``out`` here. Raises OSError if that process
        has ended or may not be read."""
        done = 0
        while done < nbytes:
            here = _Vector(out + done, nbytes - done)
            there = _Vector(address + done, nbytes - done)
            count: int = self._call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process {pid} can't be read: {os.strerror(number)}")
            done += count

    def read(self, out: Tensor, pid: int, address: int) -> None:
        """As `read_into`, into a contiguous tensor in host memory."""
        if out.numel():
            self.read_into(out.data_ptr(), pid, address, out.nbytes)
