"""Saves that are killed, two jobs that save the same names, and the speed of a save: `kill`, `jobs` and `speed`.

    python -m bench.checkpoint kill --kills 200 --out out/kill
    python -m bench.checkpoint jobs --runs 20 --out out/jobs
    python -m bench.checkpoint ranks --kills 50 --out out/ranks [--wire]
    python -m bench.checkpoint speed --gb 1 --out out/speed --csv bench/results/checkpoint.csv

`kill`: two ranks save one checkpoint after the other (each third one asynchronously, keeping 3); both are killed with
SIGKILL at a seeded random moment; what is then newest must load, on one rank, and must hold the state of its step.
`jobs`: in each run two jobs of two ranks save the same three names at once, keeping 2, as a job that was given up does
beside its restart; each name must become one job's, whole, and the other job must be refused.
`ranks`: three or four ranks train, and one is killed (bench/rank_kills.py); the others must end with its name.
`speed`: 2 ranks save and load a state of so many GB, against a plain sequential write (with fsync) and read of the same
bytes by one process in the same run, in turns; the printed figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zc
from bench.checkpoint_kills import RANKS, free_port, jobs, kill, set_state, start_group
from bench.measure import device_name, peak_rss_nbytes, reset_peak_rss, versions
from bench.rank_kills import kill_ranks
from bench.report.rows import append, now


def large(gb: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """fp32 weights and two moments: 12 bytes a parameter, in matrices of 16 MB."""
    count = max(1, round(gb * 1e9 / 12 / 2**22))
    model = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(count))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled: tuple[nn.Module, torch.optim.Optimizer] = zc.compile(model, optimizer, backend="eager")
    return compiled


def speed_rank(rank: int, port: int, args: argparse.Namespace, out: Connection) -> None:
    start_group(rank, port)
    model, optimizer = large(args.gb)
    set_state(model, optimizer, 1.0)
    nbytes = sum(v.untyped_storage().nbytes() for s in optimizer.state.values() for v in s.values())
    nbytes += sum(p.numel() * 4 for g in optimizer.param_groups for p in g["params"])
    total = torch.tensor(nbytes)
    dist.all_reduce(total)
    report: dict[str, Any] = {"state_nbytes": int(total), "rounds": []}
    for number in range(args.rounds):
        path = args.out / f"save_{number}"
        row: dict[str, float] = {}
        if rank == 0 and number % 2 == 0:  # first touches of memory cost whoever comes first: take turns
            row.update(plain(args.out / "plain", int(total)))
        for name, asynchronous in (("save", False), ("async", True)):
            dist.barrier()
            reset_peak_rss()
            before, start = rss(), time.perf_counter()
            saving = zc.save(path / name, model, optimizer, asynchronous=asynchronous)
            row[f"{name}_blocked_s"] = time.perf_counter() - start
            saving.wait()
            row[f"{name}_s"] = time.perf_counter() - start
            row[f"{name}_extra_nbytes"] = peak_rss_nbytes() - before
        for name in ("save", "async"):
            drop_cache(path / name)
        dist.barrier()
        reset_peak_rss()
        before, start = rss(), time.perf_counter()
        zc.load(path / "save", model, optimizer)
        row["load_s"] = time.perf_counter() - start
        row["load_extra_nbytes"] = peak_rss_nbytes() - before
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
            if number % 2 == 1:
                row.update(plain(args.out / "plain", int(total)))
        report["rounds"].append(row)
    out.send(report)
    dist.destroy_process_group()


def plain(path: Path, nbytes: int) -> dict[str, float]:
    """Seconds for one process to write and sync so many bytes in pieces of 16 MiB, and to read them: into one small
    buffer (``read_s``), and into memory that holds them all at the end, as a load must (``read_keep_s``)."""
    piece = os.urandom(2**24)
    pieces = max(1, nbytes // len(piece))
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(pieces):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = {"write_s": time.perf_counter() - start}
    for name, numel in (("read_s", len(piece)), ("read_keep_s", pieces * len(piece))):
        drop_cache(path)
        start = time.perf_counter()
        memory = memoryview(torch.empty(numel, dtype=torch.uint8).numpy())
        with open(path, "rb", buffering=0) as file:
            for k in range(pieces):
                first = k * len(piece) % numel
                file.readinto(memory[first : first + len(piece)])
        seconds[name] = time.perf_counter() - start
        del memory
    path.unlink()
    return seconds


def drop_cache(path: Path) -> None:
    """Reads come from the disk again, for the plain file and for the checkpoint alike."""
    for file in [path] if path.is_file() else path.iterdir():
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def speed(args: argparse.Namespace) -> dict[str, Any]:
    context, port = mp.get_context("spawn"), free_port()
    pipes = [context.Pipe() for _ in range(RANKS)]
    ranks = [context.Process(target=speed_rank, args=(r, port, args, pipes[r][1])) for r in range(RANKS)]
    for process in ranks:
        process.start()
    reports = [mine.recv() for mine, _ in pipes]
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
    rounds = []
    for number, rows in enumerate(zip(*(report["rounds"] for report in reports), strict=True)):
        # times as rank 0 sees them, who waits for all; memory of the rank that took most
        extra = {k: max(row[k] for row in rows) for k in rows[0] if k.endswith("extra_nbytes")}
        row = {**rows[0], **extra}
        ratios = {"save_vs_write": row["write_s"] / row["save_s"], "load_vs_read": row["read_s"] / row["load_s"]}
        ratios["load_vs_read_keep"] = row["read_keep_s"] / row["load_s"]
        ratios["async_vs_write"] = row["write_s"] / row["async_s"]
        rounds.append({"round": number, "state_nbytes": reports[0]["state_nbytes"], **row, **ratios})
    if args.csv is not None:
        base = {"session": now(), "device": device_name(torch.device("cpu")), "ranks": RANKS, **versions()}
        for row in rounds:
            cells = base | {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
            append(args.csv, cells, [*base, *rounds[0]])  # what is measured takes turns, and so do the keys
    return {k: statistics.median(row[k] for row in rounds) for k in rounds[0] if k != "round"}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="bench.checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("kill", "jobs", "ranks", "speed"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--inside-every", type=int, default=10, help="ranks: each so many kills one inside zc.compile")
    parser.add_argument("--wire", action="store_true", help="ranks: of several hosts, which send 8 bits or 4")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--longest-s", type=float, default=1.0, help="longest time before a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--csv", type=Path, help="speed: adds a row a round, as to bench/results/checkpoint.csv")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="a new folder, on the disk that is measured")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=False)
    report = {"kill": kill, "jobs": jobs, "ranks": kill_ranks, "speed": speed}[args.what](args)
    (args.out / f"{args.what}.json").write_text(json.dumps(report, indent=1))
    for name, value in report.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value:,}")
    return report


if __name__ == "__main__":
    main()
