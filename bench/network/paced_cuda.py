"""The paced group's line on CUDA: a stream of its own, and a one-thread kernel that watches the GPU's clock.

Its kernels are compiled to PTX by the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def now_ns():
    """Nanoseconds of the GPU's global timer; one SM's one warp reads it."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def mark_kernel(start_ptr):
    """start <- the time at which the stream has come here."""
    tl.store(start_ptr, now_ns())


@triton.jit
def spin_kernel(start_ptr, nanoseconds):
    """Ends once ``nanoseconds`` have gone by since the mark."""
    ends = tl.load(start_ptr) + nanoseconds
    now = now_ns()
    while now < ends:
        now = now_ns()


class CudaWork(dist.Work):
    """The caller's current stream waits for the collective's end; the host does not."""

    def __init__(self, done: torch.cuda.Event, stream: torch.cuda.Stream, result: list[Tensor]) -> None:
        super().__init__()
        self._done_event, self._stream, self._result = done, stream, result

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done_event)
        return True

    def is_completed(self) -> bool:
        return bool(self._done_event.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done when the line is: a CUDA future keeps the streams that are current where it is set, and whoever waits
        for it waits for these (DDP asks for it at launch: its compute must not wait there)."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._result)
        return future


class CudaLine:
    """One high-priority stream, like a communicator's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._start = torch.zeros(1, dtype=torch.int64, device=device)  # one is enough: the stream is in order

    def put(self, seconds: float, move: Callable[[], object], result: list[Tensor]) -> CudaWork:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            if seconds:  # a network that costs nothing launches nothing for it: its host's time is the systems'
                mark_kernel[(1,)](self._start, num_warps=1, enable_fp_fusion=False)
            move()
            if seconds:
                spin_kernel[(1,)](self._start, round(seconds * 1e9), num_warps=1, enable_fp_fusion=False)
            for tensor in result:
                tensor.record_stream(self.stream)  # the caller may drop it while the stream still writes
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self.stream)
        return CudaWork(done, self.stream, result)
