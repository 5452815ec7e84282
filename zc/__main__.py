"""``python -m zc``: versions, devices and distributed backends, for a bug report.

``python -m zc check script.py:make``: whether a loop does on several ranks what it does on one device (docs/check.md).
``python -m zc diff FOLDER``: the last calls of ranks that differ, side by side (docs/diverged.md).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zc
from zc.errors import PlanError, ZcError
from zc.machine import num_threads

_CHECK = """``python -m zc check script.py:make``: `zc.check` of what a function returns, with an exit status.

``make()`` returns (step, model, optimizer, batches), as `zc.check` takes them, on each rank its own; or a dict of
zc.check's arguments, options of `zc.compile` among them. Under torchrun each of its processes is a rank. Alone, the
command starts ``--ranks`` processes on this machine.
"""
FINE, FAULTS, REFUSED = 0, 1, 2
NAMES = ("step", "model", "optimizer", "batches")


def report() -> dict[str, str]:
    """What decides how zc runs here, by name."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none (every kernel runs as its torch reference; pip install 'zero-compile[triton]')"
    devices = [f"cpu ({num_threads(1)} cores)"]
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({props.name}, {props.total_memory / 2**30:.0f} GiB)")
    names = ("gloo", "nccl", "mpi") if dist.is_available() else ()
    backends = [name for name in names if getattr(dist, f"is_{name}_available")()]
    return {
        "zc": zc.__version__,
        "torch": str(torch.__version__),
        "triton": triton,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "devices": ", ".join(devices),
        "threads": str(torch.get_num_threads()),
        "distributed": ", ".join(backends) or "none",
    }


def run_check(arguments: Sequence[str]) -> int:
    """The exit status: 0 no fault, 1 faults, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="python -m zc check", description=_CHECK, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="script.py:make, or package.module:make")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, where torchrun has started none")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--backend")
    parser.add_argument("--json", type=Path, help="a file for the report, written by rank 0")
    parser.add_argument("--status-file", type=Path, help=argparse.SUPPRESS)  # of the processes that it starts
    args = parser.parse_args(arguments)
    if ":" not in args.target:
        parser.error(f"{args.target} names no function: write script.py:make")
    if args.ranks < 1:
        parser.error(f"--ranks must be at least 1, got {args.ranks}")
    if args.json is not None and os.environ.get("RANK", "0") == "0" and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}. Make it first: the report comes last")
    if "WORLD_SIZE" not in os.environ and args.ranks > 1:
        return _start(args.ranks, arguments)
    with _process_group():
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        try:
            status = _check_made(args, is_first=is_first)
        except (ZcError, TypeError) as error:
            print(f"zc.check refused: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            status = REFUSED
        except Exception:  # noqa: BLE001  (the program's own: Python would end with the status of faults)
            traceback.print_exc()
            status = REFUSED
    if args.status_file is None:
        return status
    if is_first:
        args.status_file.write_text(str(status))
    return 0


def _start(ranks: int, arguments: Sequence[str]) -> int:
    """Runs this command again, on ``ranks`` processes. Returns the status that they leave in a file: to the launcher a
    process that ends with another status than 0 has crashed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), **os.environ}
    with tempfile.TemporaryDirectory(prefix="zc-check-") as folder:
        status = Path(folder, "status")
        command = ["-m", "zc", "check", *arguments, "--status-file", str(status)]
        subprocess.run([*launcher, *command], env=env, check=False)
        return int(status.read_text()) if status.exists() else REFUSED


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """The script's own group, or one for it."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cuda:nccl,cpu:gloo" if on_gpus else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_made(args: argparse.Namespace, *, is_first: bool) -> int:
    result = _function(args.target)()
    if not isinstance(result, dict) and len(result) != len(NAMES):
        what = f"{', '.join(NAMES)}, or a dict of arguments"
        raise PlanError(f"{args.target} returned {len(result)} things: let it return {what}")
    arguments = result if isinstance(result, dict) else dict(zip(NAMES, result, strict=True))
    defaults = {"updates": args.updates, "microbatches": args.microbatches, "progress": True}
    options = {name: value for name, value in (("stage", args.stage), ("backend", args.backend)) if value is not None}
    report = zc.check(**{**defaults, **arguments, **options})
    if is_first:
        print(report, flush=True)
        if args.json is not None:
            args.json.write_text(report.to_json() + "\n")
    return FINE if report.is_fine else FAULTS


def _function(target: str) -> Callable[[], Any]:
    """Raises PlanError if there is none."""
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise PlanError(f"{where} is no file: give the path of your script")
        sys.path.insert(0, str(Path(where).resolve().parent))
        value = runpy.run_path(where).get(name)
    else:
        value = getattr(importlib.import_module(where), name, None)
    if not callable(value):
        raise PlanError(f"{where} has no function {name}: write one that returns step, model, optimizer and batches")
    function: Callable[[], Any] = value
    return function


def main() -> int:
    if sys.argv[1:2] == ["check"]:
        return run_check(sys.argv[2:])
    if sys.argv[1:2] == ["diff"]:
        from zc.report import diverged

        return diverged.run(sys.argv[2:])
    if sys.argv[1:]:
        print(f"python -m zc has no command {sys.argv[1]!r}: check and diff are two, and alone it prints versions")
        return 2
    for name, value in report().items():
        print(f"{name:>12}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
