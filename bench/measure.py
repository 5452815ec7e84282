"""What a training process can say about itself: memory, versions; and starting such processes with torchrun."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

LONGEST_REASON = 160  # characters of an error that a row keeps
LINES_OF_A_TAIL = 30  # of a failed run's output that are shown
# For every system alike, as PyTorch's tuning guide asks for an allocator that keeps memory: glibc's gives the top of
# its heap back between steps or does not, by what happens to lie there (docs/decisions.md says what that costs).
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
ROOT = Path(__file__).resolve().parent.parent


def peak_rss_nbytes() -> int:
    """Largest resident set of this process, in bytes, since it started or since `reset_peak_rss`."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> bool:
    """Starts `peak_rss_nbytes` anew; False where the system can't.

    Pages that malloc only keeps are given back first: what compiling needed is not what a step needs.
    """
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # another libc, no /proc, or it is read-only
        return False
    return True


def storages() -> dict[int, int]:
    """Address -> bytes of every storage that a Python object or a gradient of one holds; of two at one address the
    larger."""
    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():  # some libraries' objects warn when they are looked at
        warnings.simplefilter("ignore")
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    for tensor in tensors:
        parts = [tensor, tensor.grad] if tensor.is_leaf and tensor.grad is not None else [tensor]
        for part in parts:
            local = part.to_local() if hasattr(part, "to_local") else part
            try:
                storage = local.untyped_storage()
                if storage.device.type != "meta":  # a fake tensor's
                    found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
            except (RuntimeError, NotImplementedError):  # a wrapper has no storage of its own
                continue
    found.pop(0, None)  # freed
    return found


def live_nbytes(before: Mapping[int, int]) -> int:
    """Bytes of tensors that live now and did not in ``before`` (`storages`), each byte once: a parameter of zc's has a
    storage inside its bucket's."""
    total = stop = 0
    for address, n in sorted(storages().items()):
        if before.get(address) != n:
            total += max(address + n, stop) - max(address, stop)
            stop = max(stop, address + n)
    return total


def device_name(device: torch.device) -> str:
    """The processor's name, for a row of results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Short commit of the checkout, with + where its code differs from it; "unknown" outside of one."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = _output([*git, "rev-parse", "--short=10", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!*.md"])
        return head + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _output(call: list[str]) -> str:
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> dict[str, str]:
    """torch, python and zc's commit."""
    return {"torch": str(torch.__version__), "python": platform.python_version(), "commit": commit()}


def torchrun_command(module: str, flags: Sequence[str], ranks: int, python: str = sys.executable) -> list[str]:
    """``python -m module flags`` on ``ranks`` processes of this machine."""
    torchrun = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    return [python, *torchrun, "--nproc_per_node", str(ranks), "-m", module, *flags]


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    for name, value in KEEP_MEMORY.items():
        variables.setdefault(name, value)
    if sys.platform == "linux":
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo else looks the host's name up, which may not resolve
    return variables


def launch(module: str, flags: Sequence[str], *, ranks: int, env: Mapping[str, str] | None = None) -> None:
    """Runs `torchrun_command` with one thread a process; raises CalledProcessError if one fails."""
    subprocess.run(torchrun_command(module, flags, ranks), env=_environment(env), cwd=ROOT, check=True)


def start(
    module: str, flags: Sequence[str], *, ranks: int, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """As `launch`, and returns at once."""
    return subprocess.Popen(torchrun_command(module, flags, ranks), env=_environment(env), cwd=ROOT)


class Launched(NamedTuple):
    """How a run ended: ``reason`` is the error's own line where there is one, ``tail`` the end of its output."""

    status: int
    reason: str
    tail: str = ""


def launch_quietly(
    module: str, flags: Sequence[str], *, ranks: int, env: Mapping[str, str], log: Path, timeout_s: float
) -> Launched:
    """As `launch`, with all output in ``log``; raises for no failure, and ends the processes after ``timeout_s``."""
    with log.open("w") as file:
        process = subprocess.Popen(
            torchrun_command(module, flags, ranks),
            env=_environment(env),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Launched(-signal.SIGTERM, f"not at its end after {timeout_s:g} s", tail_of(log))
        except BaseException:  # an interrupted benchmark leaves no ranks behind (`end_on_sigterm`)
            _end(process)
            raise
    if not status:
        return Launched(0, "")
    return Launched(status, error_line(log.read_text(errors="replace")) or f"exit status {status}", tail_of(log))


def tail_of(log: Path) -> str:
    """The last lines of a run's output, up to where torchrun begins to report what the rank has said already."""
    lines = log.read_text(errors="replace").splitlines()
    theirs = next((n for n, line in enumerate(lines) if "elastic/multiprocessing/api.py" in line), len(lines))
    return "\n".join(lines[:theirs][-LINES_OF_A_TAIL:])


def end_on_sigterm() -> None:
    """`timeout` and service managers end a benchmark with SIGTERM: it then ends the run that it waits for, too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks, each a session of its own, when it is asked to; killed, it would leave them behind."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def error_line(text: str) -> str | None:
    """What a run died of, from its log: a compiler's fatal error, else the end of the first traceback with what it led
    to; torchrun's own report comes after it."""
    lines = [re.match(r"(\[?rank\d+\]?: ?)?(.*)", raw) for raw in text.splitlines()]
    pairs = [(m[1] or "", m[2]) for m in lines if m is not None]
    first = next((n for n, (_, line) in enumerate(pairs) if line.startswith("Traceback (most recent")), None)
    fatal = next((line for _, line in pairs if "fatal error: " in line), None)
    if first is None:
        return None
    if fatal is not None:
        return fatal[fatal.index("fatal error: ") :][:LONGEST_REASON]
    rank = pairs[first][0]
    found = None
    for prefix, line in pairs[first:]:
        if prefix != rank:  # another rank's, or torchrun's
            if found:
                break
            continue
        if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line):
            found = line[:LONGEST_REASON]
            if not rank:
                break
    return found
