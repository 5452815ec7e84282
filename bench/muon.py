"""What Muon's update costs a rank, by number of ranks: each orthogonalises the matrices that it owns.

    python -m bench.muon [--ranks 1 2 4] [--steps 5]

A GPT of 30 M parameters, its matrices with torch's Muon and the rest with AdamW, under zc (stage 2, eager: the update
is what counts) and with plain DDP, where every rank does all of it. *update*: the slowest rank's time in Muon's and
AdamW's ``step()``, exchanges included; *processor*: of one rank. Where there are more ranks than cores the former
can't fall any more, the latter still does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench import train
from bench.cases import CASES, data
from bench.measure import ROOT, device_name, launch, versions
from bench.report import rows

RESULTS = ROOT / "bench" / "results" / "muon.csv"
COLUMNS = (
    "time", "system", "ranks", "cores", "update_ms", "p20_ms", "p80_ms", "cpu_ms", "owned_matrices", "device", "torch",
    "python", "commit",
)  # fmt: skip
SYSTEMS = ("zc", "ddp")
SETTLE = 2


def work(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    flags = [*CASES["gpt30m-muon"].all_flags, "--system", args.system, "--backend", "eager", "--out", str(args.out)]
    given = train.parse(flags)
    model = train.model_of(given, device)
    system, _ = train.system_of(given, model)
    tokens = data.load(vocab=given.vocab).train
    update_s, cpu_s = [], []
    for step in range(SETTLE + args.steps):
        x, y = data.train_batch(tokens, batch=1, seq=64, seed=0, step=step, rank=rank)
        system.model(x, y).backward()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for optimizer in system.optimizers:
            optimizer.step()
        update_s.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - cpu)
        for optimizer in system.optimizers:
            optimizer.zero_grad()
    held = sum(p.dim() == 2 for group in system.optimizer.param_groups for p in group["params"])
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"update_s": update_s[SETTLE:], "cpu_s": cpu_s[SETTLE:], "held": held})
    if rank == 0:
        args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(system: str, ranks: int, steps: int) -> dict[str, object]:
    """A row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launch("bench.muon", ["--work", "--system", system, "--steps", str(steps), "--out", str(out)], ranks=ranks)
        seen = json.loads(out.read_text())
    slowest = [max(step) * 1e3 for step in zip(*(r["update_s"] for r in seen), strict=True)]
    p20, p50, p80 = (f"{value:.1f}" for value in rows.percentiles(slowest))
    cpu = max(statistics.median(r["cpu_s"]) for r in seen) * 1e3
    owned = " ".join(str(r["held"]) for r in seen)
    return {
        "time": rows.now(), "system": system, "ranks": ranks, "cores": len(os.sched_getaffinity(0)), "update_ms": p50,
        "p20_ms": p20, "p80_ms": p80, "cpu_ms": f"{cpu:.1f}", "owned_matrices": owned,
        "device": device_name(torch.device("cpu")), **versions(),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.muon", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5, help="updates that are timed")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--system", choices=SYSTEMS, default="zc", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        work(args)
        return 0
    for ranks in args.ranks:
        for system in args.systems:
            row = measured(system, ranks, args.steps)
            rows.append(args.csv, row, COLUMNS)
            print(f"{system}, {ranks} rank(s): {row['update_ms']} ms, processor {row['cpu_ms']} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
