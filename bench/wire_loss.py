"""What fewer bits between hosts cost in loss: the demo's GPT by real ranks that exchange messages, once per option.

    ZC_HOST_MEMORY=0 python -m torch.distributed.run --nproc_per_node 2 -m bench.wire_loss --out wire_loss.csv

A row per option and seed: held-out loss, its distance from fp32's of the same seed, and the largest distance of the
training loss in the first 20 updates. ``overflow``: a GradScaler begins with a scale that overflows.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zc
from bench.cases import data
from bench.cases.models import GPT, GPTConfig
from bench.measure import commit
from bench.report import rows

MOVED = "fp32, first weights moved by 1e-6"  # how far two runs that should be equal come apart
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"reduce_dtype": torch.int8},
    "int8, int8": {"reduce_dtype": torch.int8, "gather_dtype": torch.int8},
    "int8, int4": {"reduce_dtype": torch.int8, "gather_dtype": "int4"},
    MOVED: {},
}
FIRST = 20


def train(args: argparse.Namespace, corpus: Any, name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, overflow = GPT(GPTConfig(layers=args.layers, width=args.width, heads=4)), args.overflow
    if name == MOVED:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    zc.compile(model, optimizer, backend="aot_eager", **OPTIONS[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if overflow else 1.0, enabled=overflow)
    losses = []
    for step in range(args.updates):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / args.updates))
            group["lr"] = 1e-3 * min(1.0, (step + 1) / FIRST) * (1.0 if args.constant else cosine)
        x, y = data.train_batch(corpus.train, batch=args.batch, seq=128, seed=seed, step=step, rank=dist.get_rank())
        loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        zc.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    batches = data.held_out_batches(corpus.held_out, batch=8, seq=128, num_batches=16)
    with torch.no_grad():
        held_out = statistics.fmean(float(model(x, y)) for x, y in batches)
    return {"held_out": held_out, "losses": losses, "numel": sum(p.numel() for p in model.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.wire_loss", description=__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="the first: compared with")
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--constant", action="store_true", help="learning rate after its warm-up; else a cosine to 0")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--overflow", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    assert os.environ.get("ZC_HOST_MEMORY") == "0", "ZC_HOST_MEMORY=0: else ranks of one host send nothing"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    corpus = data.load()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        exact: dict[str, Any] = {}
        for name in args.options:
            result = train(args, corpus, name, seed)
            exact = exact or result
            first = zip(result["losses"][:FIRST], exact["losses"][:FIRST], strict=True)
            row = {
                "date": datetime.date.today().isoformat(), "commit": commit(), "torch": torch.__version__,
                "parameters": result["numel"], "ranks": dist.get_world_size(), "updates": args.updates, "seed": seed,
                "overflow": args.overflow, "batch": args.batch, "rate": "constant" if args.constant else "cosine",
                "options": name, "held_out_loss": f"{result['held_out']:.5f}",
                "from_fp32": f"{result['held_out'] - exact['held_out']:+.5f}",
                "largest_of_first_20": f"{max(abs(a - b) for a, b in first):.5f}",
                "command": shlex.join(["python", "-m", "bench.wire_loss", *sys.argv[1:]]).replace(str(args.out), "OUT"),
            }  # fmt: skip
            if dist.get_rank() == 0:
                print(row, flush=True)
                rows.append(args.out, row, tuple(row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
