"""Whether a model trains where a rank may allocate no more than a share of 16 bytes per parameter.

    python -m bench.memory_limit [--model llama-0.3b] [--share 0.6] [--stages 2 3] [--ranks 2]

16 bytes per parameter are fp32 weights, gradients and Adam's two moments on one rank. Each stage runs in processes of
its own. The limit is the kernel's, on private memory that can be written (RLIMIT_DATA): what the process has after it
has trained a small model, whose code and compiler stay, and the share above that. It holds from before the model is
made. Rows: bench/results/memory_limit.csv.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.cases.models import MODELS, GPTConfig, make_model
from bench.measure import ROOT, device_name, launch, versions
from bench.report import rows

RESULTS = ROOT / "bench" / "results" / "memory_limit.csv"
COLUMNS = (
    "time", "model", "stage", "status", "losses", "num_params", "limit_mb", "least_mb", "peak_mb", "share", "seq",
    "ranks", "device", "torch", "python", "commit", "command",
)  # fmt: skip


def kilobytes(what: str) -> int:
    match = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def work(args: argparse.Namespace) -> None:
    """One rank of one stage."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sizes = GPTConfig(args.vocab, args.seq, 1, 1, 1)
    with torch.device("meta"):
        num_params = sum(p.numel() for p in make_model(args.model, sizes, 0, "meta").parameters())
    train(args, "qwen3-64m", GPTConfig(256, args.seq, 1, 1, 1), {"losses": []})
    gc.collect()
    start, allowed = kilobytes("VmData"), int(args.share * 16 * num_params) // 1024
    resource.setrlimit(resource.RLIMIT_DATA, ((start + allowed) * 1024,) * 2)
    record: dict[str, Any] = {"num_params": num_params, "limit_mb": allowed * 1024 / 1e6, "losses": []}
    try:
        train(args, args.model, sizes, record)
        record["status"] = "ok"
    except (RuntimeError, MemoryError) as error:
        record["status"] = str(error).splitlines()[0][:200]
    record["peak_mb"] = (kilobytes("VmHWM") * 1024) / 1e6
    if "allocate memory" in record["status"] or (rank == 0 and not args.out.exists()):  # the cause, on whatever rank
        args.out.write_text(json.dumps(record))
    if record["status"] != "ok":
        os._exit(0)  # the other ranks may wait for this one
    dist.destroy_process_group()


def train(args: argparse.Namespace, name: str, sizes: GPTConfig, record: dict[str, Any]) -> None:
    import zc

    model = make_model(name, sizes, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zc.compile(model, optimizer, stage=args.stages[0], backend=args.backend)
    record["least_mb"] = zc.plan(model).device_nbytes / 1e6
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(0, sizes.vocab, (1, args.seq + 1), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record["losses"].append(round(loss.item(), 5))
    if name != args.model:  # what is closed gets whole weights
        zc.close(model)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.memory_limit", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama-0.3b")
    add("--vocab", type=int, default=8192)
    add("--seq", type=int, default=64)
    add("--share", type=float, default=0.6, help="of 16 bytes per parameter")
    add("--stages", type=int, nargs="+", default=[2, 3])
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=3)
    add("--backend", default="aot_eager")
    add("--csv", type=Path, default=RESULTS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    if "RANK" in os.environ:
        work(args)
        return 0
    for stage in args.stages:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            try:
                launch("bench.memory_limit", [*arguments, "--stages", str(stage), "--out", str(out)], ranks=args.ranks)
            except subprocess.CalledProcessError as error:
                print(f"stage {stage}: {error}")
            record = json.loads(out.read_text()) if out.exists() else {"status": "no rank said how it ended"}
        row = {"time": rows.now(), "model": args.model, "stage": stage, "share": args.share, "seq": args.seq}
        row |= {"ranks": args.ranks, "device": device_name(torch.device("cpu")), **versions(), **record}
        row["command"] = shlex.join(["python", "-m", "bench.memory_limit", *arguments])
        rows.append(args.csv, row, COLUMNS)
        print(f"stage {stage}: {record}")
        time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
