"""Trains a GPT on the standard library's sources, alone or under torchrun; writes one JSON file a run.

    torchrun --nproc_per_node 2 -m bench.train --system zc --steps 100 --out out/zc
    python -m bench.train --system local --backend eager --steps 20 --out out/alone

The loop below is an ordinary training loop: what a system needs beside it stands in bench/systems.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import data
from bench.measure import device_name, peak_rss_nbytes, reset_peak_rss, versions
from bench.models import GPTConfig, make_gpt, num_parameters, param_groups
from bench.progress import Progress
from bench.systems import SYSTEMS, Options, System

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.train", description=__doc__.split("\n")[0])
    add, sizes = parser.add_argument, GPTConfig()
    add("--system", choices=SYSTEMS, default="zc")
    add("--backend", choices=("inductor", "aot_eager", "eager"), default="inductor")
    add("--stage", type=int, default=2, help="ZeRO stage (zc)")
    add("--param-dtype", choices=DTYPES, help="dtype of the weights (zc); masters stay fp32")
    add("--bucket-mb", type=float, default=25.0, help="size of a gradient bucket in MiB (zc, ddp)")
    add("--copy-gradients", action="store_true", help="make gradients apart and copy them to their bucket (zc)")
    for name in ("vocab", "seq", "layers", "width", "heads"):
        add(f"--{name}", type=int, default=getattr(sizes, name))
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=4, help="windows a rank and microbatch")
    add("--accum", type=int, default=1, help="microbatches a step")
    add("--lr", type=float, default=6e-4, help="at the end of the warm-up")
    add("--warmup", type=int, default=20, help="steps of linear warm-up, before the cosine")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: neither clip nor measure it")
    add("--seed", type=int, default=0)
    add("--eval-batches", type=int, default=32, help="held-out batches over all ranks together; 0: no held-out loss")
    add("--settle", type=int, default=5, help="steps before the steady-state memory peak is taken")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--quiet", action="store_true", help="no progress bar")
    add("--out", type=Path, required=True, help="folder for run.json (and explain.txt)")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "accum"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.param_dtype and args.system != "zc":
        parser.error(f"--param-dtype is zc's: --system {args.system} keeps no fp32 masters")
    return args


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Factor on the learning rate: up to 1 over ``warmup`` steps, then a cosine down to 0.1 at ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def held_out_loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]], rank: int, world_size: int) -> float:
    """Mean loss in nats a token over ``batches``, which the ranks share out; the same number on every rank."""
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for x, y in batches[rank::world_size]:
            total += torch.tensor([float(model(x, y)), 1.0], dtype=torch.float64)
    model.train()
    if world_size > 1:
        device = batches[0][0].device
        total = total.to(device)
        dist.all_reduce(total)
    return float(total[0] / total[1])


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> dict[str, object]:
    """One run; returns this rank's record: losses, seconds, bytes."""
    config = GPTConfig(args.vocab, args.seq, args.layers, args.width, args.heads)
    corpus = data.load(vocab=args.vocab)
    pairs = data.held_out_batches(corpus.held_out, batch=args.batch, seq=args.seq, num_batches=args.eval_batches)
    batches = [(x.to(device), y.to(device)) for x, y in pairs]
    model = make_gpt(config, args.seed, device)
    record: dict[str, object] = {"rank": rank, "num_params": num_parameters(model)}
    if batches:
        record["held_out_loss_before"] = held_out_loss(model, batches, rank, world_size)
    optimizer = torch.optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95), fused=True)

    started = time.perf_counter()
    options = Options(args.backend, args.stage, DTYPES.get(args.param_dtype), int(args.bucket_mb * 2**20))
    options = options._replace(write_in_place=not args.copy_gradients)
    system = SYSTEMS[args.system](model, optimizer, options)
    setup_s = time.perf_counter() - started
    factor = lambda step: warmup_cosine(step, args.warmup, args.steps)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    losses, norms, step_s = [], [], []
    peaks = [0]
    tokens_per_step = args.batch * args.seq * args.accum * world_size
    with Progress(args.steps, f"{args.system} {args.backend}", shown=rank == 0 and not args.quiet) as progress:
        for step in range(args.steps):
            if step == args.settle:
                peaks.append(peak_rss_nbytes())
                record["peak_is_steady"] = reset_peak_rss()
            start = time.perf_counter()
            loss, norm = one_step(args, system, optimizer, corpus.train, step, rank, device)
            scheduler.step()
            losses.append(float(loss))
            norms.append(float(norm))
            step_s.append(time.perf_counter() - start)
            progress.update(losses[-1], norms[-1], tokens_per_step / step_s[-1])
    record["peak_steady_nbytes"] = peak_rss_nbytes()  # before the held-out loss, which compiles one more graph
    record["persistent_nbytes"] = system.persistent_nbytes()
    if batches:
        record["held_out_loss"] = held_out_loss(system.model, batches, rank, world_size)
    record["peak_nbytes"] = max(*peaks, peak_rss_nbytes())
    if device.type == "cuda":
        record["peak_device_nbytes"] = torch.cuda.max_memory_allocated(device)
    record.update(losses=losses, grad_norms=norms, step_s=step_s, first_step_s=setup_s + step_s[0])
    record["tokens_per_step"] = tokens_per_step
    if args.system == "zc" and rank == 0:
        import zc

        (args.out / "explain.txt").write_text(str(zc.explain(model)))
    return record


def one_step(
    args: argparse.Namespace,
    system: System,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    step: int,
    rank: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """One update over ``accum`` microbatches. Returns this rank's mean loss and the gradient norm, both 0-d."""
    total = torch.zeros((), device=device)
    for micro in range(args.accum):
        x, y = data.train_batch(
            tokens, batch=args.batch, seq=args.seq, seed=args.seed, step=step * args.accum + micro, rank=rank
        )
        last = micro == args.accum - 1
        with nullcontext() if last else system.no_sync():
            loss = system.model(x.to(device), y.to(device)) / args.accum
            loss.backward()
        total += loss.detach()
    norm = system.clip(args.clip) if args.clip else torch.tensor(math.nan)
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return total, norm


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    elif args.system.startswith("ddp"):
        raise SystemExit(f"--system {args.system} needs torchrun: torchrun --nproc_per_node 2 -m bench.train ...")
    args.out.mkdir(parents=True, exist_ok=True)
    record = train(args, rank, world_size, device)
    records: list[object] = [None] * world_size
    if dist.is_initialized():
        dist.all_gather_object(records, record)
        dist.destroy_process_group()
    else:
        records = [record]
    if rank == 0:
        flags = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        run = {"flags": flags, "world_size": world_size, "device": device_name(device), **versions(), "ranks": records}
        (args.out / "run.json").write_text(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
