"""What imports torch once and forks a template for each process of a run of pytest; a template, which forks ranks; and
what a rank does: one job after the other, each in a fresh group. harness.py starts it, with the descriptor of a socket
that listens."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RUNNING = 1000  # no exit code
PR_SET_PDEATHSIG = 1  # sys/prctl.h


def _fork_templates(listener: socket.socket) -> None:
    """One for each harness that connects, until the one that started this ends: that closes the other end of stdin."""
    _load_compiler()
    leave_out_guard_timing()
    gc.freeze()  # ranks need not walk what is imported, nor copy its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness, interrupted as well, still asks for the ends of ranks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a template has ended
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        control, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_ranks(control)
            os._exit(0)
        control.close()


def _fork_ranks(control: socket.socket) -> None:
    """Answers each request of the harness with a number, until the harness ends. "start": forks a rank, which gets the
    descriptor of its connection; "script": a process that runs code, with descriptors as its standard streams; the
    process id of either. "poll", "wait": its exit code, negative for a signal, or RUNNING."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 65536, 3)
        if not request:
            return
        kind, *arguments = pickle.loads(request)
        if kind in ("start", "script"):
            number = os.fork()
            if number == 0:
                control.close()
                if kind == "script":
                    _run_script(descriptors, *arguments)
                _become_rank(descriptors[0], *arguments)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            ended, status = os.waitpid(arguments[0], os.WNOHANG if kind == "poll" else 0)
            number = os.waitstatus_to_exitcode(status) if ended else RUNNING
        control.send(str(number).encode())


def _load_compiler() -> None:
    """Imports zc and what compiles, and compiles x + 1: the first graph of a process makes patterns and imports that
    take a second, here once for all ranks. No autograd, whose threads could not be forked."""
    import torch
    from torch._inductor.compile_fx import compile_fx

    sys.path.insert(0, str(Path(__file__).parents[2]))  # a rank has the path of who asks
    import zc  # noqa: F401

    if torch.cuda.is_available():  # asked of NVML, which can be forked; what a compiler asks can't
        return

    def compile_nothing(graph: Any, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=lambda graph, *_, **__: graph.forward)

    with torch.no_grad():
        torch.compile(lambda x: x + 1, backend=compile_nothing)(torch.ones(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def leave_out_guard_timing() -> None:
    """Of each graph that Dynamo compiles it times the guards once, and empties the processor's caches before it: 36 of
    some 300 ms for a model of two layers, and slower code on all cores after it. The time goes to a log alone."""
    import torch._dynamo.guards as guards

    if hasattr(guards, "profile_guard_manager"):  # torch 2.7 and later
        guards.profile_guard_manager = lambda *_: 0.0


def _run_script(streams: list[int], code: str, path: str, arguments: list[str], environment: dict[str, str]) -> None:
    """In the forked process: ends it as Python does, by what the code raises, which nobody below catches."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(environment)
    sys.argv = [path, *arguments]
    exec(compile(code, path, "exec"), vars(sys.modules["__main__"]))  # globals that live until Python has shut down
    sys.exit()


def _become_rank(descriptor: int, log: str, stacks: str) -> None:
    """In the forked process. Never returns."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["ZC_DIVERGED_DIR"] = str(Path(log).parents[1] / "diverged")  # what differs, as many tests let it
    code = 1
    try:
        _serve(Connection(descriptor), stacks)
        code = 0
    except BaseException:  # noqa: BLE001  (for the log; what the template would do next is not for a rank)
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with_parent() -> None:
    """A killed harness ends its templates, and these end their ranks, also in the middle of a job. (Linux's prctl;
    elsewhere a rank sees at the end of its job that nobody asks.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(connection: Connection, stacks: str) -> None:
    # lifetime: the file stays open as long as the process, faulthandler writes to its descriptor from a signal
    # handler
    written = open(stacks, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=written, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file=written, all_threads=False)
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    while True:
        try:
            rank, path, store, world_size, timeout, message = connection.recv()
        except EOFError:
            return  # the session ended
        sys.path[:] = path
        environment = dict(os.environ)
        is_fine, groups = True, []
        try:
            # lifetime: longer than the job's objects. A DDP module that is the last to hold the group ends it under the
            # GIL, and joins a thread of it that may wait for the GIL (torch 2.13)
            groups = [_start_job(rank, store, world_size, timeout)]
            fn, args = pickle.loads(message)
            answer = pickle.dumps((True, _run(fn, rank, world_size, args)))
        except BaseException:  # noqa: BLE001  (whatever it is, it goes to the test that asked)
            is_fine, answer = False, pickle.dumps((False, traceback.format_exc()))
        groups.clear()
        connection.send_bytes(answer)
        _end_job(is_fine)
        os.environ.clear()  # what a job has set is its own
        os.environ.update(environment)


def _start_job(rank: int, store: str, world_size: int, timeout: float) -> Any:
    """Every job starts the same, whatever ran before it: group, compiler and seeds are fresh."""
    import torch
    import torch.distributed as dist

    torch._dynamo.reset()
    torch.manual_seed(0)
    # a fresh store and group: what a failed job left in flight can't meet this one's collectives
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    # a rank that raises at once must not close connections that others still open: their next group would have another
    # name than its own, and the next job would hang
    dist.barrier()
    return dist.group.WORLD


def _run(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> Any:
    """Calls the job; where ``ZC_TEST_CLOCKS`` is set, over the stand-ins for a GPU (tests/cuda/clocks.py). Raises
    AssertionError for memory that is used out of order and for collectives whose order differs between ranks."""
    if not os.environ.get("ZC_TEST_CLOCKS"):
        return fn(rank, world_size, *args)
    import torch.distributed as dist

    sys.path.append(str(Path(__file__).parents[1] / "cuda"))
    import clocks

    with clocks.recorded() as (gpu, _):
        result = fn(rank, world_size, *args)
    lists: list[Any] = [gpu.collectives]
    if dist.is_initialized() and world_size > 1:
        lists = [None] * world_size
        dist.all_gather_object(lists, gpu.collectives)
    errors = [*gpu.errors, *clocks.compare(lists)]
    assert not errors, "\n".join(errors)
    return result


def _end_job(is_fine: bool) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if is_fine:
        # a rank that is done must not cut off one that is not; where another has failed, its end closes the
        # connection
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    dist.destroy_process_group()  # a failed rank does so at once: whoever waits for it gets an error, not a timeout
    collect()
    freeze_what_stays()


def freeze_what_stays() -> None:
    """What is alive between jobs (modules, caches) stays: to walk it each time takes 0.1 to 0.2 s. A model may still be
    alive, in a thread that waits or an error that something keeps; frozen, it would stay for good, with its groups'
    threads."""
    if not any(thread.name.startswith("zc ") for thread in threading.enumerate()):
        gc.freeze()


def collect() -> None:
    """Between two cases of a job, or two measurements. It freezes nothing: what is alive may be garbage later."""
    import torch._dynamo

    torch._dynamo.reset()  # its caches hold models
    for _ in range(2):  # the first frees compiled graphs, which let go of models then
        gc.collect()


if __name__ == "__main__":
    _fork_templates(socket.socket(fileno=int(sys.argv[1])))
