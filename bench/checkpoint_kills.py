"""Saves that are killed, and two jobs that save the same names: `bench.checkpoint` ``kill`` and ``jobs``."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zc
from bench.report.progress import Progress

RANKS = 2


def start_group(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def small(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and moments that say which step they are of. 33 x 1000: cut by every number of ranks."""
    model = nn.Sequential(nn.Linear(1000, 33), nn.Linear(33, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, betas=(0.0, 0.0))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    model, optimizer = zc.compile(model, optimizer, backend="eager", bucket_nbytes=2**16)
    return model, optimizer


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """Masters and moments <- value, in place: the state of step ``value``."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            with torch.no_grad():
                param.fill_(value)
                optimizer.state[param] = {
                    "step": torch.tensor(value),
                    "exp_avg": torch.full_like(param, value),
                    "exp_avg_sq": torch.full_like(param, value),
                }


def save_for_ever(rank: int, port: int, folder: Path, first: int, started: Connection) -> None:
    start_group(rank, port)
    model, optimizer = small(0.0)
    started.send("ready")
    step = first
    while True:
        set_state(model, optimizer, float(step))
        zc.save(folder / f"step_{step}", model, optimizer, extra={"step": step}, asynchronous=step % 3 == 0, keep=3)
        step += 1


def check(folder: Path) -> int:
    """Loads the newest checkpoint on one rank and compares every value in it with its step; -1: there is none yet."""
    newest = zc.latest(folder)
    if newest is None:
        return -1
    extra = check_one(newest)
    if newest.name != f"step_{extra['step']}":
        raise SystemExit(f"{newest} holds step {extra['step']}")
    return int(extra["step"])


def check_one(path: Path) -> dict[str, Any]:
    """Loads a checkpoint on one rank; every value in it must be that of its step and job. Returns its ``extra``."""
    model, optimizer = small(-1.0)
    extra: dict[str, Any] = zc.load(path, model, optimizer)
    wanted = extra["step"] + extra.get("job", 0) / 2
    values = [p.detach() for p in model.parameters()]
    values += [v for state in optimizer.state.values() for v in state.values()]
    if len(values) != 16 or not all(bool((v == wanted).all()) for v in values):
        raise SystemExit(f"{path} does not hold the state of {extra}")
    return extra


def kill(args: argparse.Namespace) -> dict[str, Any]:
    """Returns counts; raises SystemExit at the first checkpoint that does not load or is not what was saved."""
    context = mp.get_context("fork")  # torch is imported once: 200 starts take minutes and not an hour
    folder: Path = args.out / "checkpoints"
    generator = random.Random(args.seed)
    newest, unfinished, saves = -1, 0, 0
    with Progress(args.kills, "kills", shown=not args.quiet) as progress:
        for _ in range(args.kills):
            port = free_port()
            pipes = [context.Pipe() for _ in range(RANKS)]
            ranks = [
                context.Process(target=save_for_ever, args=(r, port, folder, newest + 1, pipes[r][1]), daemon=True)
                for r in range(RANKS)
            ]
            for process in ranks:
                process.start()
            for mine, _ in pipes:
                if not mine.poll(120):
                    raise SystemExit("a rank did not come up within 120 s")
                mine.recv()
            time.sleep(generator.uniform(0.0, args.longest_s))
            for process in generator.sample(ranks, RANKS):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                time.sleep(generator.choice((0.0, 0.0, 0.01)))
            for process in ranks:
                process.join()
            unfinished += any(folder.glob(".*.partial")) if folder.exists() else False
            step = int(in_child(context, partial(check, folder)))
            if step < newest:
                raise SystemExit(f"the newest checkpoint is of step {step}, step {newest} was complete before")
            saves += step - newest
            newest = step
            progress.tick(f"newest: step {newest}  killed inside a save: {unfinished}")
    return {"kills": args.kills, "inside_a_save": unfinished, "saves": saves, "newest_loaded": args.kills}


def in_child(context: Any, ask: Callable[[], Any]) -> Any:
    """``ask()`` in a process of its own: the parent stays without threads and process groups, it is forked from."""
    mine, theirs = context.Pipe()

    def run() -> None:
        torch.set_num_threads(1)
        try:
            theirs.send(ask())
        except BaseException as error:  # noqa: BLE001  (it goes to the parent)
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=run)
    process.start()
    if not mine.poll(120):
        raise SystemExit("the load did not end within 120 s")
    answer = mine.recv()
    process.join()
    if isinstance(answer, str):
        raise SystemExit(answer)
    return answer


# --- two jobs ---

NAMES = 3


def save_names(rank: int, job: int, port: int, folder: Path, start: Any, out: Connection) -> None:
    """One rank of one job: saves each name, at the moment at which the other job does."""
    start_group(rank, port)
    model, optimizer = small(0.0)
    said = []
    for step in range(NAMES):
        set_state(model, optimizer, step + job / 2)
        start.wait(120)
        try:
            zc.save(folder / f"step_{step}", model, optimizer, extra={"step": step, "job": job}, keep=2)
            said.append("")
        except zc.CheckpointError as error:
            said.append(str(error))
    out.send(said)
    start.wait(120)  # a rank that ends takes the store with it
    dist.destroy_process_group()


def check_all(folder: Path) -> dict[str, int]:
    """The job of each checkpoint."""
    return {path.name: int(check_one(path)["job"]) for path in sorted(folder.iterdir())}


def jobs(args: argparse.Namespace) -> dict[str, Any]:
    """Returns counts; raises SystemExit at the first checkpoint that is not one job's, whole."""
    context = mp.get_context("fork")
    refused = 0
    with Progress(args.runs, "two jobs", shown=not args.quiet) as progress:
        for number in range(args.runs):
            folder, start = args.out / f"run_{number}", context.Barrier(2 * RANKS)
            ranks, pipes = [], []
            for job in range(2):
                port = free_port()
                for rank in range(RANKS):
                    mine, theirs = context.Pipe()
                    ranks.append(context.Process(target=save_names, args=(rank, job, port, folder, start, theirs)))
                    pipes.append(mine)
            for process in ranks:
                process.start()
            said: list[list[str]] = []
            for mine in pipes:
                if not mine.poll(120):
                    raise SystemExit(f"run {number}: a rank did not end within 120 s")
                said.append(mine.recv())
            for process in ranks:
                process.join()
            for step, texts in enumerate(zip(*said, strict=True)):
                refusals = ["" if not text else "exists" if "exists" in text else text for text in texts]
                if refusals not in (["exists"] * RANKS + [""] * RANKS, [""] * RANKS + ["exists"] * RANKS):
                    raise SystemExit(f"run {number}, step_{step}: not one job was refused, by name: {texts}")
            contents = in_child(context, partial(check_all, folder))
            wanted = {f"step_{step}": int(said[0][step] != "") for step in range(NAMES)[-2:]}
            if contents != wanted:  # and nothing unfinished is left
                raise SystemExit(f"run {number}: the folder has {contents}, the jobs saved {wanted}")
            refused += NAMES
            progress.tick(f"refused: {refused}")
    return {"runs": args.runs, "names": args.runs * NAMES, "refused": refused}
