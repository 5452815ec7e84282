"""Trains a GPT on the standard library's sources, alone or under torchrun; writes one JSON file a run.

    torchrun --nproc_per_node 2 -m bench.train --system zc --steps 100 --out out/zc
    python -m bench.train --system local --backend eager --steps 20 --out out/alone

The loop below is an ordinary training loop: what a system needs beside it stands in bench/systems.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from bench.baton import InTurn, Seat
from bench.cases import data
from bench.cases.models import MODELS, GPTConfig, make_model, num_parameters
from bench.measure import device_name, live_nbytes, peak_rss_nbytes, reset_peak_rss, storages, versions
from bench.network import NETWORKS
from bench.network.paced import init_paced
from bench.report.progress import Progress
from bench.resume import Resume
from bench.systems import AdamW, MuonAndAdamW, Options, System
from bench.systems.peers import SYSTEMS, TAKE_SEVERAL

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.train", description=__doc__.split("\n")[0])
    add, sizes = parser.add_argument, GPTConfig()
    add("--system", choices=SYSTEMS, default="zc")
    add("--backend", choices=("inductor", "aot_eager", "eager"), default="inductor")
    add("--stage", type=int, default=2, help="ZeRO stage (zc, deepspeed; fsdp2: 3 frees weights after a forward)")
    add("--param-dtype", choices=DTYPES, help="dtype of the weights (zc); masters stay fp32")
    add("--bucket-mb", type=float, help="size of a gradient bucket in MiB; without: what zc takes for the model")
    add("--reduce", choices=("exact", "native"), default="exact", help="how gradients are reduced (zc)")
    add("--reduce-dtype", choices=("int8",), help="how gradients leave a host (zc)")
    add("--gather-dtype", choices=("int8", "int4"), help="how differences of weights leave a host (zc)")
    add("--offload", choices=("cpu",), help="where masters and moments are kept (zc, deepspeed)")
    add("--write-in-place", action="store_true", help="matmuls make gradients in their place in the bucket (zc)")
    add("--overlap-gather", action="store_true", help="the next forward waits for gathered weights, not the step (zc)")
    add("--compute-dtype", choices=("bfloat16",), help="by the system's own means: param_dtype, autocast, a policy")
    add("--model", choices=MODELS, default="gpt")
    for name in ("vocab", "seq", "layers", "width", "heads"):
        add(f"--{name}", type=int, default=getattr(sizes, name))
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=4, help="windows a rank and microbatch")
    add("--accum", type=int, default=1, help="microbatches a step")
    add("--lr", type=float, default=6e-4, help="at the end of the warm-up")
    add("--warmup", type=int, default=20, help="steps of linear warm-up, before the cosine")
    add("--weight-decay", type=float, default=0.1)
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: for the matrices in blocks")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: neither clip nor measure it")
    add("--seed", type=int, default=0)
    add("--eval-batches", type=int, default=32, help="held-out batches over all ranks together; 0: no held-out loss")
    add("--settle", type=int, default=5, help="steps before the steady-state memory peak is taken")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--paced", choices=tuple(NETWORKS), help="one process plays rank 0 of --world ranks on a modelled network")
    add("--world", type=int, default=8, help="ranks that --paced pretends")
    add("--quiet", action="store_true", help="no progress bar")
    add("--save-every", type=int, default=0, help="steps between checkpoints (zc); 0: none")
    add("--checkpoints", type=Path, help="their folder; the run goes on from the newest complete one in it")
    add("--keep", type=int, default=2, help="checkpoints that are kept")
    add("--async-save", action="store_true", help="checkpoints are written while the training goes on")
    add("--global-accum", type=int, help="microbatches a step over all ranks: the same data on any number of ranks")
    add("--baton", type=Seat.parse, help=argparse.SUPPRESS)  # bench.baton: several runs take turns
    add("--out", type=Path, required=True, help="folder for run.json (and explain.txt, .html)")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "accum"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.param_dtype and args.system != "zc":
        parser.error(f"--param-dtype is zc's: --system {args.system} keeps no fp32 masters")
    if args.offload and args.system not in ("zc", "deepspeed"):
        parser.error(f"--offload is zc's and DeepSpeed's: --system {args.system} keeps its state on the device")
    if args.optimizer != "adamw" and (args.system not in TAKE_SEVERAL or args.checkpoints is not None):
        parser.error(f"--optimizer {args.optimizer} is for {', '.join(TAKE_SEVERAL)}, without --checkpoints")
    if args.save_every and (args.system != "zc" or args.checkpoints is None):
        parser.error("--save-every needs --system zc and --checkpoints FOLDER")
    return args


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Factor on the learning rate: up to 1 over ``warmup`` steps, then a cosine down to 0.1 at ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def options_of(args: argparse.Namespace) -> Options:
    return Options(
        backend=args.backend,
        stage=args.stage,
        param_dtype=DTYPES.get(args.param_dtype),
        bucket_nbytes=None if args.bucket_mb is None else int(args.bucket_mb * 2**20),
        reduce=args.reduce,
        reduce_dtype=DTYPES.get(args.reduce_dtype),
        gather_dtype=DTYPES.get(args.gather_dtype, args.gather_dtype),
        offload=args.offload,
        overlap_gather=args.overlap_gather,
        write_in_place=args.write_in_place,
        compute_dtype=DTYPES.get(args.compute_dtype),
        accum=args.accum,
        clip=args.clip,
    )


def model_of(args: argparse.Namespace, device: torch.device) -> nn.Module:
    sizes = GPTConfig(args.vocab, args.seq, args.layers, args.width, args.heads)
    return make_model(args.model, sizes, args.seed, device)


class Schedules:
    """The learning rate of every optimizer."""

    def __init__(self, args: argparse.Namespace, system: System) -> None:
        self.first, *self.others = (
            LambdaLR(optimizer, lambda step: warmup_cosine(step, args.warmup, args.steps))
            for optimizer in system.optimizers
        )

    def step(self) -> None:
        for scheduler in (self.first, *self.others):
            scheduler.step()


def system_of(args: argparse.Namespace, model: nn.Module) -> tuple[System, Schedules]:
    """The model under the system that the flags name, and its learning rate's schedule."""
    kind = MuonAndAdamW if args.optimizer == "muon" else AdamW
    system = SYSTEMS[args.system](model, kind(args.lr, args.weight_decay), options_of(args))
    return system, Schedules(args, system)


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


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """One run; returns this rank's record: losses, seconds, bytes."""
    with _progress(args, rank, world_size) as progress:
        return _train(args, rank, world_size, device, progress)


def _progress(args: argparse.Namespace, rank: int, world_size: int) -> Progress:
    title = f"{args.system} {args.backend}"
    if args.baton is not None:
        return InTurn(args.baton, title, rank, world_size)
    return Progress(args.steps, title, shown=rank == 0 and not args.quiet)


def _train(
    args: argparse.Namespace, rank: int, world_size: int, device: torch.device, progress: Progress
) -> dict[str, Any]:
    progress.say("reads the standard library's sources")
    corpus = data.load(vocab=args.vocab)
    pairs = data.held_out_batches(corpus.held_out, batch=args.batch, seq=args.seq, num_batches=args.eval_batches)
    batches = [(x.to(device), y.to(device)) for x, y in pairs]
    before = storages()
    model = model_of(args, device)
    record: dict[str, Any] = {"rank": rank, "num_params": num_parameters(model)}
    if batches:
        progress.say("takes the held-out loss before training")
        record["held_out_loss_before"] = held_out_loss(model, batches, rank, world_size)

    if args.global_accum is not None:
        if args.global_accum % world_size:
            raise SystemExit(f"--global-accum {args.global_accum} is not a multiple of {world_size} ranks")
        args.accum = args.global_accum // world_size
    progress.say("shards the model and its optimizer" if args.system == "zc" else "wraps the model")
    started = time.perf_counter()
    system, scheduler = system_of(args, model)
    setup_s = time.perf_counter() - started

    resume = Resume(args, model, system.optimizer, scheduler.first) if args.checkpoints is not None else None
    first = resume.first_step() if resume is not None else 0
    losses, norms, step_s, host_s, cpu_s = [], [], [], [], []
    peaks, resident = [0], peak_rss_nbytes()
    tokens_per_step = args.batch * args.seq * args.accum * world_size
    progress.say("the first step" if args.backend == "eager" else "traces the forward")
    for step in range(first, args.steps):
        if step == first + args.settle:
            peaks.append(peak_rss_nbytes())
            record["peak_is_steady"] = reset_peak_rss()
            resident = peak_rss_nbytes()  # at this moment, with the interpreter and what compiling left behind
        start, cpu = time.perf_counter(), time.process_time()
        loss, norm = one_step(args, system, corpus.train, step, rank, device)
        scheduler.step()
        host_s.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        losses.append(float(loss))
        norms.append(float(norm))
        step_s.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - cpu)
        if resume is not None:
            resume.after_step(step, losses[-1], rank, world_size)
        progress.update(losses[-1], norms[-1], tokens_per_step / step_s[-1])
    if resume is not None:
        resume.finish()
    if not step_s:
        raise SystemExit(f"{args.checkpoints} holds a run of {first} steps already: nothing is left to train")
    record["first_step"] = first
    record["peak_steady_nbytes"] = peak_rss_nbytes()  # before the held-out loss, which compiles one more graph
    record["added_nbytes"] = record["peak_steady_nbytes"] - resident  # by a step, to what lives between steps
    record["persistent_nbytes"] = system.persistent_nbytes()
    record["held_nbytes"] = live_nbytes(before) + system.unseen_nbytes
    if batches:
        again = "" if args.backend == "eager" else ", which compiles one more graph"
        progress.say(f"takes the held-out loss{again}")
        record["held_out_loss"] = held_out_loss(system.model, batches, rank, world_size)
    record["peak_nbytes"] = max(*peaks, peak_rss_nbytes())
    if device.type == "cuda":
        record["peak_device_nbytes"] = torch.cuda.max_memory_allocated(device)
    # host_s: until all of a step is queued. On a GPU what the host needs; on the CPU the step itself
    record.update(losses=losses, grad_norms=norms, step_s=step_s, host_s=host_s, cpu_s=cpu_s)
    record.update(first_step_s=setup_s + step_s[0], tokens_per_step=tokens_per_step)
    if args.system == "zc" and rank == 0:
        import zc

        page = args.out / "explain.html"
        page.with_suffix(".txt").write_text(str(zc.explain(model, format="html", path=page)))
    return record


def one_step(
    args: argparse.Namespace,
    system: System,
    tokens: Tensor,
    step: int,
    rank: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """One update over ``accum`` microbatches. Returns this rank's mean loss and the gradient norm, both 0-d."""
    total = torch.zeros((), device=device)
    for micro in range(args.accum):
        number, reader = step * args.accum + micro, rank
        if args.global_accum is not None:  # the step's microbatches have the same numbers on any number of ranks
            number, reader = step, rank * args.accum + micro
        x, y = data.train_batch(tokens, batch=args.batch, seq=args.seq, seed=args.seed, step=number, rank=reader)
        last = micro == args.accum - 1
        with nullcontext() if last else system.no_sync():
            with system.precision():
                loss = system.model(x.to(device), y.to(device)) / args.accum
            system.backward(loss, last)
        total += loss.detach()
    norm = system.clip(args.clip) if args.clip else torch.tensor(math.nan)
    system.update()
    return total, norm


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if args.paced:
        rank, world_size = 0, args.world
        init_paced(args.paced, args.world)
    elif "RANK" in os.environ:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    elif args.system not in ("zc", "local"):
        raise SystemExit(f"--system {args.system} needs torchrun: torchrun --nproc_per_node 2 -m bench.train ...")
    args.out.mkdir(parents=True, exist_ok=True)
    record = train(args, rank, world_size, device)
    records: list[object] = [record]
    if dist.is_initialized() and not args.paced:
        records = [None] * world_size
        dist.all_gather_object(records, record)
    if rank == 0:  # before the group is torn down: what goes wrong there is not the run's
        flags = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        run = {"flags": flags, "world_size": world_size, "device": device_name(device), **versions(), "ranks": records}
        (args.out / "run.json").write_text(json.dumps(run, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
