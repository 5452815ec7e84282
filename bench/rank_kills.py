"""Ranks that are killed with SIGKILL at a random moment of a small job: `bench.checkpoint` ``ranks``.

One kill in ten is inside of zc.compile. All other ranks must end with a RankLostError that names the rank, within
`LIMIT_S` of the kill. With ``--wire`` ranks stand for 3 hosts of one rank, or for 2 hosts of two, and send 8 bits or 4.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zc
from bench.report.progress import Progress

RANKS = 3
LIMIT_S = 30.0
CALLS = 1800  # of Python functions of zc's in one zc.compile, at least: the moment is drawn among them


class Job(NamedTuple):
    """What the ranks of one kill run: ``options`` of zc.compile; ``per_host``: ranks of a host, None: all of them."""

    num_ranks: int
    options: dict[str, Any]
    per_host: int | None = None


def draw_job(generator: random.Random, *, wire: bool) -> Job:
    options: dict[str, Any] = {"stage": generator.choice((1, 2))}
    if not wire:
        return Job(RANKS, options)
    which = generator.choice(("gradients", "weights", "both", "both"))
    if which != "weights":
        options["reduce_dtype"] = torch.int8
    if which != "gradients":
        options["gather_dtype"] = generator.choice((torch.int8, "int4"))
    options["overlap_gather"] = generator.random() < 0.5
    return generator.choice((Job(RANKS, options, per_host=1), Job(4, options, per_host=2)))


def train_for_ever(rank: int, store: str, job: Job, calls_left: int | None, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if job.per_host is not None:
        os.environ["GROUP_RANK"] = str(rank // job.per_host)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.num_ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    left = [calls_left]

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("zc") and left[0] is not None:
            left[0] -= 1
            if left[0] == 0:
                pipe.send("inside")
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        dist.barrier()
        if calls_left is not None:
            sys.setprofile(count)
        zc.compile(model, optimizer, backend="eager", bucket_nbytes=20_000, **job.options)
        sys.setprofile(None)
        pipe.send("ready")
        for step in range(10**9):
            model(torch.ones(2, 64)).sum().backward()
            if step % 3 == 0:
                zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except BaseException as error:  # noqa: BLE001  (it goes to the parent)
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def kill_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Returns counts, and raises SystemExit at the end where a kill ended otherwise."""
    context, generator = mp.get_context("fork"), random.Random(args.seed)
    named, inside, longest_s, others = 0, 0, 0.0, []
    with Progress(args.kills, "kills", shown=not args.quiet) as progress:
        for number in range(args.kills):
            job = draw_job(generator, wire=args.wire)
            every = range(job.num_ranks)
            lost = generator.choice(every)
            calls = generator.randrange(1, CALLS) if number % args.inside_every == 0 else None
            pipes = [context.Pipe() for _ in every]
            store = str(Path(args.out).resolve() / f"store_{number}")
            ranks = [
                context.Process(target=train_for_ever, args=(r, store, job, calls if r == lost else None, pipes[r][1]))
                for r in every
            ]
            for process in ranks:
                process.start()
            said = [pipes[r][0].recv() if calls is None or r == lost else "" for r in every]
            inside += said[lost] == "inside"
            if calls is None or said[lost] != "inside":
                time.sleep(generator.uniform(0.0, args.longest_s))
                os.kill(ranks[lost].pid or 0, signal.SIGKILL)
            started, texts = time.monotonic(), []
            for r in every:
                while r != lost:
                    left = started + LIMIT_S - time.monotonic()
                    text = pipes[r][0].recv() if pipes[r][0].poll(max(0.0, left)) else "nothing"
                    if text != "ready":
                        texts.append(text)
                        break
            longest_s = max(longest_s, time.monotonic() - started)
            for process in ranks:
                process.kill()
                process.join()
            is_named = all(t.startswith("RankLostError") and f"rank {lost} has not answered" in t for t in texts)
            named += is_named
            if not is_named:
                others.append(f"kill {number} of rank {lost}, {job}, call {calls}: {texts}")
            progress.tick(f"named: {named}  inside zc.compile: {inside}")
    print(*others, sep="\n")
    report = {"kills": args.kills, "named": named, "inside_compile": inside, "longest_s": longest_s}
    if others:
        raise SystemExit(str(report))
    return report
