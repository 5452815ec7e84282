"""``python tests/gpu/first.py``: the first ten minutes on a GPU, what says most first. ``--more``: the next thirty.

It needs pytest, torch and this folder, no install. Every step is a process of its own. A test that hangs ends its
process after 120 s and the others of its step go on; what does not begin in time is listed as not run. What was seen
goes to one JSON and one page, in ``--out``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = "test_two_ranks_on_one_gpu.py"


class Step(NamedTuple):
    """``arguments``: of pytest; ``before``: a command that pytest runs under; ``command``: in place of pytest."""

    name: str
    arguments: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    before: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


FIRST = (
    Step("NCCL with two ranks on one GPU", (RANKS, "-k", "nccl_takes")),
    Step("streams under delays", ("test_cuda_streams.py",)),
    Step("kernels against their references", ("test_cuda_kernels.py", "-k", "not int32")),
    Step("training on one rank", ("test_cuda_training.py",)),
    Step("offload", ("test_cuda_offload.py",)),
    Step("two ranks over NCCL", (RANKS, "-k", "weights and nccl and eager")),
    Step("two ranks over NCCL, compiled", (RANKS, "-k", "weights and nccl and not eager and not native")),
)
MORE = (
    Step("two ranks over gloo", (RANKS, "-k", "weights and gloo and eager")),
    Step("two ranks with reduce='native'", (RANKS, "-k", "weights and native and not two")),
    Step("torch's CUDA sanitizer", ("test_cuda_training.py",), env=(("TORCH_CUDA_SANITIZER", "1"),)),
    Step("memcheck", ("test_cuda_kernels.py", "-k", "not int32 and not thousands"), before=("compute-sanitizer",)),
    Step("large kernels", ("test_cuda_kernels.py", "-k", "int32")),
    Step("two GPUs", ("test_two_gpus.py",)),
    Step("step times", command=(sys.executable, "-m", "bench.gpu")),
)


class Seen(NamedTuple):
    """``tests``: by name, outcome, seconds and text. ``note``: why the step is not complete."""

    name: str
    seconds: float
    tests: dict[str, dict[str, Any]]
    note: str = ""

    @property
    def counts(self) -> Counter[str]:
        return Counter(test["outcome"] for test in self.tests.values())


def run_step(step: Step, folder: Path, end: float, tests: Path = HERE) -> Seen:
    """Runs it until ``end``, of time.monotonic."""
    began, note = time.monotonic(), ""
    report = folder / f"{step.name}.jsonl".replace(" ", "_").replace("/", "_")
    report.unlink(missing_ok=True)
    env = {**os.environ, **dict(step.env), "ZC_GPU_REPORT": str(report)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if step.before and shutil.which(step.before[0]) is None:
        return Seen(step.name, 0.0, {}, f"{step.before[0]} is not installed")
    seen: dict[str, dict[str, Any]] = {}
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return Seen(step.name, time.monotonic() - began, seen, note or "no time was left")
        paths = [str(tests / part) if part.endswith(".py") else part for part in step.arguments]
        known = [argument for name in seen for argument in ("--deselect", name)]
        pytest = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *paths, *known]
        command = step.command or (*step.before, *pytest)
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=left)
            code, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, output = None, str(error)
            note = "the time was over"
        (folder / f"{report.stem}.txt").write_text(output)
        if step.command:
            return Seen(step.name, time.monotonic() - began, {}, note or f"exit code {code}, {report.stem}.txt")
        hung = _read(report, seen)
        if hung is None or code is None:  # all have ended, or the time
            if code not in (None, 0, 1, 5):
                note = f"pytest ended with {code}: {output[-500:]}"
            return Seen(step.name, time.monotonic() - began, seen, note)


def _read(report: Path, seen: dict[str, dict[str, Any]]) -> str | None:
    """Adds what the file says to ``seen``. Returns the test in which the process ended, if it did."""
    current = None
    for line in report.read_text().splitlines() if report.exists() else ():
        event = json.loads(line)
        name = event.pop("test")
        if event["outcome"] == "began":
            current = name if name not in seen else None
        else:
            seen[name] = event
            current = None
    if current is not None:
        seen[current] = {"outcome": "hung or died", "seconds": 0.0, "text": "its process ended in it"}
    return current


def page(about: dict[str, Any], steps: list[Seen]) -> str:
    """What ran, as Markdown."""
    lines = ["# First minutes on a GPU", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| step | outcome | seconds | |", "|---|---|--:|---|"]
    for step in steps:
        outcome = ", ".join(f"{n} {kind}" for kind, n in step.counts.most_common()) or "nothing ran"
        lines.append(
            f"| {step.name} | {outcome} | {step.seconds:.0f} | {step.note.splitlines()[0] if step.note else ''} |"
        )
    for step in steps:
        for name, test in step.tests.items():
            if test["outcome"] not in ("passed", "skipped"):
                lines += ["", f"## {name}: {test['outcome']}", "", "```", test["text"], "```"]
    return "\n".join(lines) + "\n"


def about() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "device": device, "torch": torch.__version__, "triton": triton, "Python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    arguments = parser.parse_args()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * (arguments.minutes or (30 if arguments.more else 10))
    name, facts, steps = "more" if arguments.more else "first", about(), []
    for step in MORE if arguments.more else FIRST:
        steps.append(run_step(step, folder, end))
        print(f"{step.name}: {dict(steps[-1].counts)} in {steps[-1].seconds:.0f} s {steps[-1].note}", flush=True)
        # after each step: whoever stops it has what was seen
        (folder / f"{name}.json").write_text(
            json.dumps({"about": facts, "steps": [s._asdict() for s in steps]}, indent=1)
        )
        (folder / f"{name}.md").write_text(page(facts, steps))
    print(f"{folder / name}.json, {folder / name}.md")
    return int(any(kind not in ("passed", "skipped") for step in steps for kind in step.counts))


if __name__ == "__main__":
    sys.exit(main())
