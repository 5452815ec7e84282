"""Ranks that are killed with SIGKILL at a random moment of a small job: `bench.checkpoint` ``ranks``.

One kill in ten is inside of zc.compile. All other ranks must end with a RankLostError that names the rank, within
`LIMIT_S` of the kill.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zc
from bench.report.progress import Progress

RANKS = 3
LIMIT_S = 30.0
CALLS = 1800  # of Python functions of zc's in one zc.compile, at least: the moment is drawn among them


def train_for_ever(rank: int, store: str, stage: int, calls_left: int | None, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
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
        zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=20_000)
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
            lost, stage = generator.randrange(RANKS), generator.choice((1, 2))
            calls = generator.randrange(1, CALLS) if number % args.inside_every == 0 else None
            pipes = [context.Pipe() for _ in range(RANKS)]
            store = str(Path(args.out).resolve() / f"store_{number}")
            ranks = [
                context.Process(
                    target=train_for_ever, args=(r, store, stage, calls if r == lost else None, pipes[r][1])
                )
                for r in range(RANKS)
            ]
            for process in ranks:
                process.start()
            said = [pipes[r][0].recv() if calls is None or r == lost else "" for r in range(RANKS)]
            inside += said[lost] == "inside"
            if calls is None or said[lost] != "inside":
                time.sleep(generator.uniform(0.0, args.longest_s))
                os.kill(ranks[lost].pid or 0, signal.SIGKILL)
            started, texts = time.monotonic(), []
            for r in range(RANKS):
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
                others.append(f"kill {number} of rank {lost}, stage {stage}, call {calls}: {texts}")
            progress.tick(f"named: {named}  inside zc.compile: {inside}")
    print(*others, sep="\n")
    report = {"kills": args.kills, "named": named, "inside_compile": inside, "longest_s": longest_s}
    if others:
        raise SystemExit(str(report))
    return report
