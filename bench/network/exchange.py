"""How long the ranks take to tell each other a few bytes of host memory over gloo, in the two ways that there are.

    python -m bench.scale exchange --ranks 2 4 8 16      (rows to bench/results/scale.csv)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

NBYTES = 300  # what a model of some 290 parameters announces
NUM_TIMES, SETTLE = 200, 20


def median_ms(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_TIMES):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[SETTLE:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.network.exchange", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    row = torch.zeros(NBYTES, dtype=torch.uint8)
    rows = torch.zeros(dist.get_world_size() * NBYTES, dtype=torch.uint8)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    ways = {
        "all_gather": lambda: gather(rows, row),
        "all_to_all": lambda: dist.all_to_all_single(rows, row.repeat(dist.get_world_size())),
    }
    found = {name: statistics.median(times) for name, times in zip(ways, in_turn(list(ways.values())), strict=True)}
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def in_turn(calls: list[Callable[[], object]]) -> list[list[float]]:
    """A B A B A B: milliseconds of each call's three turns."""
    rounds = [[median_ms(call) for call in calls] for _ in range(3)]
    return [list(times) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    main()
