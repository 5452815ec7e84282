"""Host time of a step against another checkout's, in turn: two processes that run a few steps each, A B, B A.

    git worktree add /tmp/before ae2620c && python -m bench.host_turns /tmp/before [--world 8] [--turns 48]

The model is that of `bench.scale host`: matrices of 16 x 16, a bucket each, on a network that costs nothing. Two
processes that follow each other differ by up to 30 % on a shared machine; in turn a slow spell falls on both. *ratio*:
this checkout's median over the other's in the same turn; its median, p20 and p80 over the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import ROOT

LAYERS, WIDTH, STEPS = 64, 16, 12


def serve(world: int) -> None:
    """Runs STEPS steps for each line of stdin, and writes their median in ms. In a process of its own: the modules are
    those of the checkout that it was started in, which may have another bench."""
    import torch
    from torch import nn

    import zc
    from bench.network.paced import init_paced

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world > 1:
        init_paced("zero", world)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    zc.compile(model, optimizer, bucket_nbytes=4 * WIDTH * WIDTH)
    x = torch.randn(1, WIDTH)

    def step() -> float:
        started = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - started) * 1e3

    for _ in range(8):  # compiles
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(statistics.median(step() for _ in range(STEPS)), flush=True)


def start(tree: Path, world: int) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "ZC_LOG": "error"}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--world", str(world)]
    return subprocess.Popen(command, cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None and process.stdout is not None
    print("go", file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.host_turns", description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--world", type=int, default=8, help="ranks that the network pretends; 1: none")
    parser.add_argument("--turns", type=int, default=48)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.world)
        return
    if args.tree is None or not (args.tree / "zc").is_dir():
        parser.error(f"{args.tree} is no checkout of zc")
    processes = [start(tree, args.world) for tree in (ROOT, args.tree.resolve())]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                sys.exit("a process ended before its first turn")
        times: list[tuple[float, float]] = []
        for turn in range(args.turns):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            took = {k: ask(processes[k]) for k in order}
            times.append((took[0], took[1]))
    finally:
        for process in processes:
            process.kill()
    ratios = sorted(mine / other for mine, other in times)
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    p20, p80 = ratios[len(ratios) // 5], ratios[4 * len(ratios) // 5]
    print(f"W={args.world}, {len(times)} turns: {mine:.2f} ms here, {other:.2f} there; "
          f"ratio {statistics.median(ratios):.3f} (p20 {p20:.3f}, p80 {p80:.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
