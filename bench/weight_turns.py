"""Weights that can't be read at once, against another checkout: bytes, compiled graphs, and the first step, in turn.

    git worktree add /tmp/before ca16af7 && python -m bench.weight_turns /tmp/before [--turns 5] [--backend inductor]

Each way (`WAYS`) trains and evaluates a small model of blocks, in a process of its own with empty caches, as one rank
of ``--world`` on a network that costs nothing: A B, then B A. *persistent*: bytes of live tensors between steps;
*transient*: the most bytes that a step has allocated beside these and not yet freed. Two checkouts whose bytes differ
by more than `TOLERANCE`, or whose numbers of graphs, frames or graph breaks differ at all, are not alike: exit status
1. Times are for the reader; on a busy machine they mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measure import ROOT

if TYPE_CHECKING:
    from torch.profiler import profile

WAYS: dict[str, dict[str, Any]] = {"stage 3": {"stage": 3}, "overlap_gather": {"stage": 2, "overlap_gather": True}}
BYTES, COUNTS, TIMES = ("persistent", "transient"), ("graphs", "frames", "breaks"), ("first_ms", "step_ms")
TOLERANCE = 1.01
VOCAB, WIDTH, BLOCKS, STEPS = 512, 128, 4, 8


def most_nbytes(seen: profile) -> int:
    """The most bytes that were allocated and not yet freed, of those allocated inside."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measured(way: str, backend: str) -> dict[str, float]:
    """What one process sees. The modules are those of the checkout that it was started in."""
    import torch
    from torch import Tensor, nn
    from torch._dynamo.utils import counters
    from torch.profiler import ProfilerActivity, profile

    import zc
    from bench.measure import live_nbytes, storages

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            loss: Tensor = nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())
            return loss

    torch.manual_seed(0)
    tokens, before = torch.randint(0, VOCAB, (4, 16)), storages()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, backend=backend, bucket_nbytes=2**19, **WAYS[way])

    def step() -> float:
        started = time.perf_counter()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - started) * 1e3

    first = step()
    with torch.no_grad():
        model(tokens)
    steady = statistics.median(step() for _ in range(STEPS))
    zc.synchronize(model)
    persistent = live_nbytes(before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
        zc.synchronize(model)
    zc.close(model)
    return {
        "first_ms": first, "step_ms": steady, "persistent": persistent, "transient": most_nbytes(seen),
        "graphs": counters["stats"]["unique_graphs"], "frames": counters["frames"]["total"],
        "breaks": sum(counters["graph_break"].values()),
    }  # fmt: skip


def run(tree: Path, way: str, world: int, backend: str) -> dict[str, float]:
    """`measured` in a process whose zc and bench are those of ``tree``."""
    with tempfile.TemporaryDirectory() as cache:
        own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "ZC_LOG": "error", "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", way, "--backend", backend]
        done = subprocess.run(
            [*command, "--world", str(world)], cwd=tree, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True,
            check=True,
        )  # fmt: skip
    seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seen


def compared(mine: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> tuple[list[str], bool]:
    """A line for each number of one way, and whether the two checkouts are alike. Of times the median counts, of all
    else the largest."""
    lines, is_alike = [], True
    for key in (*BYTES, *COUNTS, *TIMES):
        here, there = ([turn[key] for turn in turns] for turns in (mine, other))
        a, b = (statistics.median(v) if key in TIMES else max(v) for v in (here, there))
        differs = (key in COUNTS and a != b) or (key in BYTES and max(a, b) > TOLERANCE * min(a, b))
        is_alike &= not differs
        ratio = f"{a / b:.4f}" if b else "-"
        lines.append(f"{key:>10}  {a:14,.0f} here  {b:14,.0f} there  {ratio:>7}{'  NOT ALIKE' * differs}")
    return lines, is_alike


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.weight_turns", description=__doc__.split("\n")[0])
    parser.add_argument("tree", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--world", type=int, default=8, help="ranks that the network pretends; 1: none")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        import torch

        from bench.network.paced import init_paced

        torch.set_num_threads(1)
        if args.world > 1:
            init_paced("zero", args.world)
        print(json.dumps(measured(args.serve, args.backend)), flush=True)
        return 0
    if args.tree is None or not (args.tree / "zc").is_dir():
        parser.error(f"{args.tree} is no checkout of zc")
    trees, status = (ROOT, args.tree.resolve()), 0
    for way in WAYS:
        seen: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for turn in range(args.turns):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                seen[which].append(run(trees[which], way, args.world, args.backend))
        lines, is_alike = compared(*seen)
        print(f"{way}, W={args.world}, {args.backend}, {args.turns} turns", *lines, sep="\n", flush=True)
        status |= not is_alike
    return status


if __name__ == "__main__":
    sys.exit(main())
