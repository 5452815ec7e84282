"""How a process ends whose rank has raised while its threads wait for another rank: as Python does, by the traceback
and code 1. The other rank is killed while the interpreter of the first is torn down, which ends what they wait for."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from harness import patience
from tiers import FULL

LIMIT_S = 120.0  # on an idle machine, where a case takes some 10
# Rank 0 ends by an error. While it is torn down it tells so, and goes on when rank 1 is gone. Rank 1 stands still.
LOOP = """
import os, sys, time
case, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
class Last:
    def __del__(self, write=os.write, read=os.read, sleep=time.sleep):
        write(1, b"torn down\\n")
        read(0, 1)
        sleep(1)  # the network tells rank 0 meanwhile that rank 1 is gone
import torch, zc
import torch.distributed as dist
from zc.engine import streams
torch.set_num_threads(1)
streams._end_lanes.__defaults__ = (1.0,)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def stand_still():
    print("stands", flush=True)
    sys.stdin.read()

if case == "compile" and rank == 1:
    stand_still()
if rank == 0:
    last = Last()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
if case == "lane" and rank == 1:
    optimizer.register_step_post_hook(lambda *_: stand_still())  # before zc's own, which gathers the weights
zc.compile(model, optimizer, stage=2, backend="eager", overlap_gather=case == "lane")
try:
    model(torch.ones(2, 64)).sum().backward()
    if case == "step" and rank == 1:
        zc.clip_grad_norm_(model, 1.0)
    optimizer.step()
except zc.ZcError:
    if rank == 1:
        stand_still()
    raise
raise ValueError("of the script")
"""
ENDS = {
    "step": "RankMismatchError",  # the calling thread has handed its wait to another one
    "lane": "ValueError: of the script",  # a gather of the weights is under way
    "compile": "RankLostError",  # it waits in the caller's group
}


# `make test`: the two whose waits are of threads of zc's
@pytest.mark.parametrize("case", ENDS if FULL else ["step", "lane"])
def test_a_rank_that_raises_ends_by_its_error(case: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZC_HOST_MEMORY": "0", "ZC_RANK_TIMEOUT": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOOP, case, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    limit = LIMIT_S * patience()
    try:
        output = ranks[0].stdout
        assert output is not None
        has_told, _, _ = select.select([output], [], [], limit)
        assert has_told and output.readline() == "torn down\n", ranks[0].poll()
        ranks[1].kill()
        ranks[1].wait()
        _, text = ranks[0].communicate(timeout=limit)
        assert ranks[0].returncode == 1 and "terminate" not in text, text
        assert ENDS[case] in text, text
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
