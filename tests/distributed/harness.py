"""Rank processes for the tests: started once a session, used by every test, killed and restarted when one hangs.

`run_ranks(fn, world_size, *args)` calls the top-level function ``fn(rank, world_size, *args)`` in ``world_size``
processes that share a fresh gloo group, and returns their results by rank. Processes stay: a pool grows to the largest
world size that was asked for, and a smaller job uses its first ranks. `import torch` costs seconds, so two processes
import it for all of xdist's workers, and fork a template for each, which forks its ranks: two, because ranks with one
hash seed would hide an order that depends on it.

A rank's exception comes back as a `RanksFailed` that names the rank and holds its traceback. A rank that does not
return within the limit (most often: it waits in a collective that the others never entered) is asked for the
stacks of all its threads, then killed, and the pool is rebuilt: one hanging test costs one test.

Limits are for a machine that does nothing else: `patience` makes them longer on another. Inductor compiles into one
folder per run (`compiled_code`), where only the C++ kernels of earlier runs are when that begins.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from rank_process import RUNNING, collect

START_S = 300.0  # for `import torch` on a machine that does other things too; no job's own time
GRACE_S = 10.0  # how long the other ranks may go on after one has failed: time for their own error to come up
ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("rank_process.py")
NUM_TEMPLATES = 2
# Inductor believes the processor of its vector instructions, in all processes of the tests. Else each starts Python six
# times to try them, 0.9 CPU s, and the first of a checkout compiles three probes, 8 CPU s. Set it to "" for that.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def patience() -> float:
    """How many times longer than on an idle machine work may take: processes that want a core, by cores. Or
    ``ZC_PATIENCE``, where that is set."""
    setting = os.environ.get("ZC_PATIENCE")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, float(setting) if setting else os.getloadavg()[0] / cores)


def kept_kernels(cache: Path = ROOT / "build" / "kernels") -> Path:
    """The folder where C++ kernels stay between runs, of this Python and its torch."""
    version = importlib.metadata.version("torch")
    folder = cache / f"{version}-{sys.version_info.major}.{sys.version_info.minor}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiled_code(alone: Path) -> Path:
    """The folder where Inductor keeps what it compiles: that of this run of pytest, which all its processes share, or
    one in ``alone`` where there is none."""
    folder = Path(os.environ.get("ZC_TEST_COMPILED") or alone) / "inductor"
    if not folder.exists():
        making = Path(tempfile.mkdtemp(dir=folder.parent))
        shutil.copytree(kept_kernels(), making, dirs_exist_ok=True)
        with contextlib.suppress(OSError):  # another process was first
            making.rename(folder)
    return folder


def keep_kernels(compiled: Path) -> None:
    """What the C++ compiler has made in this run of pytest (1.3 s a kernel) is there in the next one of this checkout:
    Inductor names it after a hash of its source and of the command. Graphs are not kept, every run compiles those."""
    for library in compiled.glob("inductor/*/*.main.so"):
        for file in (library.with_suffix(".cpp"), library):
            place = kept_kernels() / file.relative_to(compiled / "inductor")
            if not place.exists():
                place.parent.mkdir(exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as copy:
                    copy.write(file.read_bytes())
                os.chmod(copy.name, file.stat().st_mode)
                os.rename(copy.name, place)


class RanksFailed(AssertionError):
    """Some ranks raised, died or hung. ``errors``: rank -> its traceback, its stacks, or how it died."""

    def __init__(self, job: str, errors: dict[int, str]) -> None:
        self.errors = errors
        body = "\n\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
        super().__init__(f"{job}: rank(s) {sorted(errors)} failed\n{body}")


class _Template:
    """A process that forks ranks (rank_process.py)."""

    def __init__(self, path: Path, compiled: Path) -> None:
        """``path``: where the process listens that forks templates. The first that finds nobody there starts it."""
        self._socket, self.log = socket.socket(socket.AF_UNIX), path.with_suffix(".log")
        self._imported: subprocess.Popen[bytes] | None = None
        try:
            self._socket.connect(str(path))
        except OSError:
            self._imported = self._import_torch(path, compiled)
            self._socket.connect(str(path))

    def _import_torch(self, path: Path, compiled: Path) -> subprocess.Popen[bytes]:
        left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED")
        env = {k: v for k, v in os.environ.items() if k not in left_out}
        env.update(
            OMP_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # a process that has asked CUDA can't fork
            TORCHINDUCTOR_CACHE_DIR=str(compiled),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            PYTHONUNBUFFERED="1",
        )
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("ab") as output:
            listener.bind(f"{path}-{os.getpid()}")
            listener.listen()
            os.rename(f"{path}-{os.getpid()}", path)  # who finds it can connect, and waits for torch in `ask`
            return subprocess.Popen(
                [sys.executable, str(SERVER), str(listener.fileno())], pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env,
            )  # fmt: skip

    def ask(self, *request: Any, descriptors: tuple[int, ...] = ()) -> int:
        """One request, one answer. The first answer comes when torch is imported; that is no job's time."""
        limit = START_S * patience()
        self._socket.settimeout(limit)
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            if answer := self._socket.recv(16):
                return int(answer)
        raise RuntimeError(f"no answer from the template of the ranks in {limit:.0f} s\n{tail(self.log)}")

    def close(self) -> None:
        self._socket.close()
        if self._imported is not None:  # the templates that it has forked for others stay
            self._imported.kill()
            self._imported.communicate()


def tail(log: Path, num_chars: int = 1500) -> str:
    return log.read_text(errors="replace")[-num_chars:] if log.exists() else ""


class _Rank:
    """One process, the pipe to it, and its files: what it prints, and the stacks it writes when it is asked to."""

    def __init__(self, rank: int, folder: Path, template: _Template) -> None:
        self.rank, self._template, self._exit_code = rank, template, RUNNING
        self.log = folder / f"rank{rank}.log"
        self.stacks = folder / f"rank{rank}.stacks"
        self.connection, child = Pipe()
        self.pid = template.ask("start", str(self.log), str(self.stacks), descriptors=(child.fileno(),))
        child.close()

    def exit_code(self, kind: str) -> int:
        """RUNNING before its end. ``kind``: "poll", or "wait" for its end."""
        if self._exit_code == RUNNING:
            self._exit_code = self._template.ask(kind, self.pid)
        return self._exit_code

    def dump_stacks(self) -> str:
        """The Python stacks of all threads, from the process itself; works while it waits inside C++."""
        if (code := self.exit_code("poll")) != RUNNING:
            return f"ended with exit code {code}"
        for number in (signal.SIGUSR2, signal.SIGUSR1):  # the main thread first: of many threads not all are shown
            os.kill(self.pid, number)
            time.sleep(0.3)
        return self.stacks.read_text() if self.stacks.exists() else "(no stacks)"

    def kill(self) -> None:
        self.connection.close()
        if self.exit_code("poll") == RUNNING:
            os.kill(self.pid, signal.SIGKILL)
            self.exit_code("wait")


class _Templates:
    """The templates of this process, which all its pools share."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zc-templates-"))
        self._compiled = compiled_code(self.folder)
        self._started: list[_Template] = []

    def start(self, number: int) -> None:
        while len(self._started) < number:
            self._started.append(_Template(self._compiled.parent / f"template{len(self._started)}", self._compiled))

    def of_rank(self, rank: int) -> _Template:
        return self._started[rank % NUM_TEMPLATES]

    def close(self) -> None:
        for template in self._started:
            template.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RankPool:
    """Rank processes, kept between jobs."""

    def __init__(self) -> None:
        self._templates = _shared_templates()
        self.folder = Path(tempfile.mkdtemp(prefix="zc-ranks-"))
        self._ranks: list[_Rank] = []
        self._num_jobs = 0
        self._num_started = 0
        _pools.append(self)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """See `run_ranks`."""
        self._num_jobs += 1
        job = f"{fn.__module__}.{fn.__qualname__}"
        timeout *= patience()
        self._templates.start(min(world_size, NUM_TEMPLATES))
        while len(self._ranks) < world_size:
            self._num_started += 1
            folder = self.folder / f"process{self._num_started}"
            folder.mkdir()
            number = len(self._ranks)
            self._ranks.append(_Rank(number, folder, self._templates.of_rank(number)))
        ranks = self._ranks[:world_size]
        message = pickle.dumps((fn, args))
        # its group waits for longer: with the job's limit a rank may leave its wait before its stack is written
        header = (list(sys.path), str(self.folder / f"store{self._num_jobs}"), world_size, 2 * timeout)
        for rank in ranks:
            try:
                rank.connection.send((rank.rank, *header, message))
            except OSError:  # it died between two jobs
                self._rebuild()
                raise RanksFailed(job, {rank.rank: f"died before the job started\n{tail(rank.log)}"}) from None
        return self._collect(job, ranks, timeout)

    def _collect(self, job: str, ranks: list[_Rank], timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        open_ranks: dict[Connection, _Rank] = {rank.connection: rank for rank in ranks}
        deadline = time.monotonic() + timeout
        must_rebuild = False
        while open_ranks and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(open_ranks), timeout=left):
                rank = open_ranks.pop(connection)  # type: ignore[arg-type]
                try:
                    is_fine, payload = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    is_fine, payload = False, f"died, exit code {rank.exit_code('wait')}\n{tail(rank.log)}"
                    must_rebuild = True
                if is_fine:
                    results[rank.rank] = payload
                else:
                    errors[rank.rank] = payload
                    deadline = min(deadline, time.monotonic() + GRACE_S * patience())
        if open_ranks:
            names = sorted(rank.rank for rank in open_ranks.values())
            why = f"stopped {GRACE_S:.0f} s after another rank failed" if errors else f"timed out after {timeout:.0f} s"
            finished = sorted(results)
            for rank in open_ranks.values():
                missing = f"ranks that had not finished: {names}, finished: {finished}"
                errors[rank.rank] = f"{why}; {missing}\n{rank.dump_stacks()}\n{tail(rank.log)}"
            must_rebuild = True
        if must_rebuild:
            self._rebuild()
        if errors:
            raise RanksFailed(job, errors)
        return [results[rank.rank] for rank in ranks]

    def _rebuild(self) -> None:
        """All of them: the others may wait for the one that hung, and hold half of a collective."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()

    def close(self) -> None:
        self._rebuild()
        shutil.rmtree(self.folder, ignore_errors=True)


class Script:
    """Code in a process that a template forks: with torch and zc, which a Python of its own would import for 3.4 CPU
    seconds. It ends as Python does. ``text``: what has been read of its output and errors."""

    def __init__(self, code: str, *arguments: object, path: str = "script", **environment: str) -> None:
        templates = _shared_templates()
        templates.start(1)
        self._template, self._exit_code, self.text = templates.of_rank(0), RUNNING, ""
        its_input, self._input = os.pipe()
        self.output, its_output = os.pipe()
        its = (its_input, its_output, its_output)
        self.pid = self._template.ask("script", code, path, [*map(str, arguments)], environment, descriptors=its)
        os.close(its_input)
        os.close(its_output)

    def read(self, stop: str | None = None, limit: float = 120.0) -> str:
        """Its output with a line that begins with ``stop``, or to its end, in so many seconds of an idle machine."""
        deadline = time.monotonic() + limit * patience()
        while stop is None or f"\n{stop}" not in f"\n{self.text.rpartition(chr(10))[0]}":
            assert select.select([self.output], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            chunk = os.read(self.output, 65536)
            if not chunk:
                assert stop is None, self.text
                break
            self.text += chunk.decode()
        return self.text

    def exit_code(self) -> int:
        """At its end."""
        if self._exit_code == RUNNING:
            self._exit_code = self._template.ask("wait", self.pid)
        return self._exit_code

    def close_input(self) -> None:
        os.close(self._input)
        self._input = -1

    def kill(self) -> None:
        if self._exit_code == RUNNING:
            os.kill(self.pid, signal.SIGKILL)
            self.exit_code()

    def close(self) -> None:
        self.kill()
        for descriptor in (self._input, self.output):
            if descriptor >= 0:
                os.close(descriptor)


_templates: _Templates | None = None
_pools: list[RankPool] = []  # ended with the templates, which answer how their ranks have ended
_pool: RankPool | None = None  # of `run_ranks`


def _shared_templates() -> _Templates:
    global _templates
    if _templates is None:
        _templates = _Templates()
        atexit.register(shutdown)
    return _templates


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``[fn(rank, world_size, *args) for rank in ...]``, each in its own process, in a fresh gloo group of them all.
    ``timeout``: seconds on an idle machine.

    ``fn`` is a top-level function of an importable module; arguments and results travel by pickle. Raises RanksFailed.
    """
    global _pool
    if _pool is None:
        _pool = RankPool()
    return _pool.run(fn, world_size, *args, timeout=timeout)


def run_cases(
    fn: Callable[..., Any], world_size: int, cases: Iterable[Any], *, timeout: float = 120.0
) -> list[tuple[Any, tuple[Any, ...]]]:
    """`run_ranks` of each case in one job, where a job of its own would cost more than the case: the case, and its
    results by rank. A case that is no tuple is one argument. ``timeout`` is for all of them."""
    chosen = list(cases)
    ranks = run_ranks(_one_after_the_other, world_size, fn, chosen, timeout=timeout)
    return list(zip(chosen, zip(*ranks, strict=True), strict=True))


def _one_after_the_other(rank: int, world_size: int, fn: Callable[..., Any], cases: list[Any]) -> list[Any]:
    """Job. Each case starts as a job does, and what the one before has dropped is gone."""
    import torch

    results = []
    for case in cases:
        collect()
        torch.manual_seed(0)
        try:
            results.append(fn(rank, world_size, *(case if isinstance(case, tuple) else (case,))))
        except Exception as error:
            raise RuntimeError(f"case {case}") from error
    return results


def shutdown() -> None:
    """Ends the rank processes of all pools and removes their folders."""
    global _pool, _templates
    for pool in _pools:
        pool.close()
    _pools.clear()
    _pool = None
    if _templates is not None:
        _templates.close()
        _templates = None
