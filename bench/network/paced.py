"""A c10d backend for one process that plays rank 0 of W: collectives take the time that a modelled network would need.

    init_paced("nvlink", world_size=8)      # then DDP, FSDP2, DeepSpeed or zc, unchanged

Each collective of a group runs on the group's own *line*, one after another: it moves its local bytes, then the line
stays busy until ``Network.seconds`` are over since it started. ``wait()`` returns when they are (CPU: a timer thread;
CUDA: an event behind a kernel that watches the clock). What a step costs on a paced network beyond what it costs on
``zero`` is its *exposed* communication. Other ranks are played as copies of rank 0, so values stay finite, but a loss
means nothing here.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.network import NETWORKS, Network

Move = Callable[[], object]


class Line:
    """When collectives that share one link start and end, in seconds of any clock."""

    def __init__(self) -> None:
        self.free_at = -math.inf
        self.busy_s = 0.0

    def reserve(self, issued_at: float, seconds: float) -> float:
        """One more, ``issued_at``: it starts when the line is free. Returns when it ends."""
        self.free_at = max(issued_at, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


class PacedWork(dist.Work):
    """Done when its line says so."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._done = threading.Event()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._result = result
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)  # type: ignore[no-untyped-call]

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: object = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class CpuLine:
    """A thread that moves bytes and then sleeps until the model's time is over."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.line, self.num_late, self._now, self._sleep = Line(), 0, now, sleep
        self._tasks: queue.SimpleQueue[tuple[float, float, Move, PacedWork]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, seconds: float, move: Move, result: list[Tensor]) -> PacedWork:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paced line", daemon=True)
            self._thread.start()
        work = PacedWork(result)
        self._tasks.put((self._now(), seconds, move, work))
        return work

    def _run(self) -> None:
        while True:
            self.one(*self._tasks.get())

    def one(self, issued_at: float, seconds: float, move: Move, work: PacedWork) -> None:
        """One collective, from its start to its end. The move is part of its time; where it takes longer than the model
        says, the line is late, which is counted."""
        ends = self.line.reserve(issued_at, seconds)
        try:
            with torch.no_grad():
                move()
        except BaseException as error:  # noqa: BLE001  (raised by wait, in the caller's thread)
            work.finish(error)
            return
        rest = ends - self._now()
        if rest > 0:
            self._sleep(rest)
        elif seconds > 0:
            self.num_late += 1
            self.line.free_at = max(ends, self._now())
        work.finish()


def _collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """c10d calls it from C++: under a compiled module (DDP's buffers) Dynamo would trace into it as into the model."""
    made: Callable[..., Any] = torch.compiler.disable(method)
    return made


class PacedGroup(dist.ProcessGroup):
    """Rank 0 of ``size`` on a modelled network. Method names are those that torch 2.11 to 2.15 call."""

    def __init__(self, rank: int, size: int, network: Network) -> None:
        super().__init__(rank, size)
        self.network, self._size = network, size
        self._cpu = CpuLine()
        self._cuda: Any = None

    def getBackendName(self) -> str:
        return "paced"

    @property
    def group_name(self) -> str:
        """What device meshes find the group by. c10d names a Python group only in its own table, which has no public
        reader."""
        return str(dist.distributed_c10d._get_process_group_name(self))

    def size(self) -> int:
        return self._size

    def _start(self, kind: str, nbytes: int, move: Move, result: list[Tensor]) -> dist.Work:
        seconds = self.network.seconds(kind, nbytes, self._size)
        if result and result[0].is_cuda:
            if self._cuda is None:
                from bench.network.paced_cuda import CudaLine

                self._cuda = CudaLine(result[0].device)
            work: dist.Work = self._cuda.put(seconds, move, result)
            return work
        return self._cpu.put(seconds, move, result)

    @_collective
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
                for tensor in tensors:
                    tensor.mul_(self._size)

        return self._start("all_reduce", _nbytes(tensors), move, tensors)

    allreduce_coalesced = allreduce

    @_collective
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._start("broadcast", _nbytes(tensors), lambda: None, tensors)

    @_collective
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._start("broadcast", _nbytes(tensors), lambda: None, tensors)

    @_collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            for outs, own in zip(outputs, inputs, strict=True):
                for out in outs:
                    out.copy_(own)

        return self._start("all_gather", sum(map(_nbytes, outputs)), move, [t for outs in outputs for t in outs])

    @_collective
    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        return self._start("all_gather", output.nbytes, lambda: self._fill(output, own), [output])

    @_collective
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                self._fill(output, own)

        return self._start("all_gather", _nbytes(outputs), move, outputs)

    @_collective
    def reduce_scatter_single(self, output: Tensor, rows: Tensor, opts: Any = None) -> dist.Work:
        return self._start("reduce_scatter", rows.nbytes, lambda: self._reduce(output, rows, opts), [output])

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def move() -> None:
            for output, rows in zip(outputs, inputs, strict=True):
                self._reduce(output, rows, opts)

        return self._start("reduce_scatter", _nbytes(inputs), move, outputs)

    @_collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        def move() -> None:
            for output, rows in zip(outputs, inputs, strict=True):
                self._reduce(output, rows[0], opts)

        return self._start("reduce_scatter", sum(map(_nbytes, inputs)), move, outputs)

    @_collective
    def all_to_all_single(
        self, output: Tensor, rows: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Every rank sends what rank 0 keeps for itself; uneven splits are none of the benchmark's."""
        if out_splits or in_splits:
            raise NotImplementedError("the paced group's all_to_all takes even splits only")
        own = rows.view(self._size, -1)[0]
        return self._start("all_to_all", rows.nbytes, lambda: self._fill(output, own), [output])

    @_collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def move() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                output.copy_(given)

        return self._start("all_to_all", _nbytes(inputs), move, outputs)

    @_collective
    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Links carry both directions at once: a send costs what its receive does, once."""
        return self._start("barrier", 0, lambda: None, tensors)

    @_collective
    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._start("p2p", _nbytes(tensors), lambda: None, tensors)

    @_collective
    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start("barrier", 0, lambda: None, [])

    # names before torch 2.13
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _fill(self, output: Tensor, own: Tensor) -> None:
        """Every rank's rows are this rank's. ``own`` may lie in ``output``."""
        rows = output.view(self._size, -1)
        rows.copy_(own.reshape(-1).expand_as(rows))  # one call: W would outlast the model's time

    def _reduce(self, output: Tensor, rows: Tensor, opts: Any) -> None:
        torch.mul(rows.view(self._size, -1)[0], self._size if _is_sum(opts) else 1, out=output.view(-1))


def _is_sum(opts: Any) -> bool:
    return opts is None or opts.reduceOp == dist.ReduceOp.SUM


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


_NETWORK = NETWORKS["zero"]


def _create(store: object, rank: int, size: int, timeout: object) -> PacedGroup:
    return PacedGroup(rank, size, _NETWORK)


def init_paced(network: str | Network, world_size: int) -> None:
    """`init_process_group` with this process as rank 0 of ``world_size``; groups made from it share the network's
    model, each with a line of its own."""
    global _NETWORK
    _NETWORK = network if isinstance(network, Network) else NETWORKS[network]
    if "paced" not in dist.Backend.backend_list:
        dist.Backend.register_backend("paced", _create, devices=["cpu", "cuda"])
    dist.init_process_group("paced", store=dist.HashStore(), rank=0, world_size=world_size)
