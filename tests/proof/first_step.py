"""What the passes and the proof cost a warm first step: CPU seconds of rank 0's thread that runs them, beside those of
all of rank 0's threads in its first step. The model is that of ``bench.scale depth``.

    python -m tests.proof.first_step --layers 8 32 96 --ranks 2

Each line is a run of new processes; all but the first of a depth find every cache full.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import launch

# as in bench.scale, but for the number of steps
NARROW = (
    "--vocab 256 --seq 32 --width 64 --heads 4 --batch 1 --steps 1 --settle 1 --clip 0 --eval-batches 0 --quiet "
    "--stage 2 --model gpt"
)


def train(out: str, layers: int) -> None:
    """One rank: trains one step, and writes what it cost into the folder ``out``."""
    from bench import train as trainer
    from zc.compiler import blocks, graphs
    from zc.engine import program
    from zc.passes.base import run_passes

    seconds, calls = collections.Counter[str](), collections.Counter[str]()

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.thread_time() - start
                calls[part] += 1

        return run

    def run_timed_passes(graph: Any, plan: Any, passes: Any, **options: Any) -> Any:
        return run_passes(graph, plan, [p._replace(run=timed(p.run, p.name)) for p in passes], **options)

    program.run_passes = timed(run_timed_passes, "all passes")
    graphs.verify.verify = timed(graphs.verify.verify, "all proofs")
    blocks.rebased = timed(blocks.rebased, "rebased")
    blocks.shifts = timed(blocks.shifts, "shifts")

    trainer.main([*NARROW.split(), "--layers", str(layers), "--out", out])
    assert calls["all proofs"] >= calls["verify"] > 0, "these names are called where they were replaced"
    if int(os.environ["RANK"]) == 0:
        record = json.loads((Path(out) / "run.json").read_text())["ranks"][0]
        cost = {"seconds": seconds, "calls": calls, "first step": record["cpu_s"][0]}
        (Path(out) / "cost.json").write_text(json.dumps(cost))


def report(layers: int, start: str, cost: dict[str, Any]) -> None:
    whole = cost["first step"]
    print(f"{layers} layers, {start}: the first step takes {whole:.2f} s", flush=True)
    for part, part_s in sorted(cost["seconds"].items(), key=lambda item: -item[1]):
        calls = cost["calls"][part]
        print(f"    {1e3 * part_s:8.1f} ms, {100 * part_s / whole:4.1f} %: {part} ({calls} calls)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.proof.first_step", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=2, help="warm runs of each depth")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # one rank of a run
    args = parser.parse_args()
    if args.out:
        train(args.out, args.layers[0])
        return
    for layers in args.layers:
        with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
            for number in range(1 + args.repeat):
                flags = ["--layers", str(layers), "--out", folder]
                env = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
                launch("tests.proof.first_step", flags, ranks=args.ranks, env=env)
                report(layers, "warm" if number else "cold", json.loads((Path(folder) / "cost.json").read_text()))


if __name__ == "__main__":
    main()
