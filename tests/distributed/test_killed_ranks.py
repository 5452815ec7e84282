"""kill -9 of a rank at any moment, in the middle of an exchange too: the others end with its name, and nothing is left
behind: no process, no file, no segment of shared memory."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from harness import Script
from tiers import FULL, full_only

KILLS = range(50) if FULL else (1,)  # one of stage 1 with overlap_gather; the one among replicas is of stage 2
RANKS = 3
LIMIT_S = 30.0
LOOP = """
import os, sys, time, torch, zc
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
rank, ranks, stage, overlap = (int(arg) for arg in sys.argv[1:5])
replicas = int(sys.argv[6])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[5]}", rank=rank, world_size=ranks)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
mesh = init_device_mesh("cpu", (replicas, ranks // replicas)) if replicas > 1 else None
zc.compile(
    model, optimizer, mesh=mesh, stage=stage, backend="eager", bucket_nbytes=200_000, overlap_gather=bool(overlap)
)
step = 0
try:
    while True:
        model(torch.ones(2, 300)).sum().backward()
        if step % 3 == 0:
            zc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 2:
            child = os.fork()  # as of a loader: it has this rank's connections, and outlives it
            if child == 0:
                os.closerange(0, 3)
                time.sleep(600)
            print("ready", child, flush=True)
except zc.RankLostError as error:
    print("lost", error, flush=True)
    os._exit(7)
"""


def _shared_segments() -> set[str]:
    names = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    sysv = Path("/proc/sysvipc/shm")
    return names | (set(sysv.read_text().splitlines()) if sysv.exists() else set())


@pytest.mark.parametrize("number", KILLS)
def test_a_killed_rank_is_named_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    _kill_one(number, tmp_path, RANKS, 1)


@full_only
def test_a_killed_rank_is_named_by_those_of_other_replicas(tmp_path: Path) -> None:
    _kill_one(0, tmp_path, 4, 2)


def _kill_one(number: int, tmp_path: Path, num_ranks: int, replicas: int) -> None:
    rng = random.Random(number)
    gone, stage, overlap = rng.randrange(num_ranks), rng.choice((1, 2)), rng.randrange(2)
    before = _shared_segments()
    # ranks end by themselves: whoever holds the store does not go first, which is the launcher's part
    ranks = [Script(LOOP, r, num_ranks, stage, overlap, tmp_path / "store", replicas) for r in range(num_ranks)]
    children = []
    try:
        for rank in ranks:
            children.append(int(rank.read("ready ").partition("ready ")[2].split()[0]))
        time.sleep(rng.random() * 0.5)
        ranks[gone].kill()
        started = time.monotonic()
        for number, rank in enumerate(ranks):
            if number != gone:
                text = rank.read()
                assert rank.exit_code() == 7, f"rank {number} of stage {stage}, rank {gone} was killed:\n{text}"
                assert f"rank {gone} " in text.partition("lost")[2].partition(" waits for it")[0], text
                assert time.monotonic() - started < LIMIT_S
    finally:
        for rank in ranks:
            rank.close()
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert _shared_segments() <= before
