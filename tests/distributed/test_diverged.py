"""Planted divergences (deepspeed#2343, megatron-lm#1150, pytorch#150074): a named error on every rank in seconds, never
a hang. Each rank leaves a file, and ``python -m zc diff`` names the first difference with its line."""

from __future__ import annotations

import os
import re
import runpy
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import diverging_loops
import pytest
import torch.distributed as dist
from diverging_loops import ALL, CASES, SAYS, Loop, line_of, model_of
from harness import ROOT, Script, patience, run_ranks
from models import Heads
from training_runs import message_of

import zc
from zc import __main__
from zc.report import diverged

EXAMPLES = ROOT / "docs" / "examples"
LIMIT_S = 30.0  # to the error
AT_ONCE = 7  # pairs of ranks in one job: they wait, most of the time


def _pairs(rank: int, world_size: int, cases: Sequence[tuple[str, int, int]], folder: str) -> tuple[str, str, float]:
    """Job: each pair of ranks has its own store, and runs one case. Returns the error, and after how many seconds."""
    name, stage, odd = cases[rank // 2]
    os.environ.update(ZC_RANK_TIMEOUT="2", ZC_DIVERGED_DIR=f"{folder}/{name}-{stage}-{odd}")
    if name == "evaluates_alone":  # by memory a rank may gather alone
        os.environ["ZC_HOST_MEMORY"] = "0"
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store-{rank // 2}", 2)
    # a rank that stands in a collective of its own gets no verdict, but an error of the network
    limit = timedelta(seconds=15 * patience())
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    model, optimizer = model_of(Heads, stage, group)
    loop = Loop(model, optimizer, rank % 2 == odd, group, f"{folder}/saved-{rank // 2}")
    started = time.monotonic()
    kind, text = message_of(lambda: getattr(diverging_loops, name)(loop))
    seconds = time.monotonic() - started
    end = time.monotonic() + 8 * patience()
    while kind and len(list(Path(os.environ["ZC_DIVERGED_DIR"]).glob("rank-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)  # the harness's barrier would answer that of a rank that stands in its own
    return kind, text, seconds


def test_there_are_fifty() -> None:
    assert len(ALL) >= 50 and {run for run, _, _ in CASES} == {run for run, _, _ in ALL}
    assert {(stage, odd) for _, stage, odd in CASES} == {(stage, odd) for _, stage, odd in ALL}


@pytest.mark.parametrize("start", range(0, len(CASES), AT_ONCE))
def test_the_first_difference_is_named_with_the_users_line(start: int, tmp_path: Path) -> None:
    chosen = CASES[start : start + AT_ONCE]
    named = [(run.__name__, stage, odd) for run, stage, odd in chosen]
    raised = run_ranks(_pairs, 2 * len(chosen), named, str(tmp_path), timeout=90.0)
    wrong = []
    for at, (run, stage, odd) in enumerate(chosen):
        where = f"{run.__name__}, stage {stage}, rank {odd} is odd"
        pair = raised[2 * at : 2 * at + 2]
        for kind, said, seconds in pair if run in SAYS else ():
            is_right = kind == "RankMismatchError" and said == pair[0][1] and seconds < LIMIT_S  # one verdict
            words = ("rank 0", "rank 1", *SAYS[run])
            if run is diverging_loops.leaves_out_clipping and stage < 3:  # the advice: what reads norms
                words += ("clip_grad_norm_, reads of",)
            if not is_right or not all(each in said for each in words):
                wrong.append(f"{where}: {pair}")
        try:
            text, is_different = diverged.report(diverged.read(tmp_path / f"{run.__name__}-{stage}-{odd}"))
        except zc.ZcError as error:
            wrong.append(f"{where}: {error!r}; {pair}")
            continue
        first = re.search(r"First difference: .*?\n\n", text, flags=re.S)
        line = f"{diverging_loops.__file__}:{line_of(run)} in {run.__name__}"
        if not is_different or first is None or line not in first[0]:
            wrong.append(f"{where}: not {line} in\n{text}\n{pair}")
    assert not wrong, "\n\n".join(wrong)


def _example(rank: int, world_size: int, folder: str) -> list[str]:
    """Job: the page's script. Returns the notes of its error."""
    os.environ.update(ZC_RANK_TIMEOUT="1", ZC_DIVERGED_DIR=folder)
    with mock.patch.object(dist, "init_process_group"), pytest.raises(zc.RankMismatchError) as raised:
        runpy.run_path(str(EXAMPLES / "diverged.py"), run_name="__main__")
    return getattr(raised.value, "__notes__", [])


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = run_ranks(_example, 2, str(tmp_path), timeout=60.0)
    for rank, said in enumerate(notes) if sys.version_info >= (3, 11) else ():
        assert f"rank {rank} are in {tmp_path}. `python -m zc diff {tmp_path}` lays" in said[0]
    monkeypatch.setattr(sys, "argv", ["zc", "diff", str(tmp_path)])
    assert __main__.main() == 1
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "diverged.md").read_text()
    _, _, report = printed.replace(f"{EXAMPLES}/", "").split("\n", 2)  # two lines name this run and its folder
    assert report.strip() in page, printed


def _full_disk(rank: int, world_size: int, folder: str) -> str:
    """Job: the files can't be written, since the folder is a file."""
    os.environ.update(ZC_RANK_TIMEOUT="1", ZC_DIVERGED_DIR=folder)
    assert dist.group.WORLD is not None
    model, optimizer = model_of(Heads, 2, dist.group.WORLD)
    loop = Loop(model, optimizer, rank == 1, dist.group.WORLD, "")
    with pytest.raises(zc.RankMismatchError) as raised:
        diverging_loops.drops_gradients_alone(loop)
    return " ".join(getattr(raised.value, "__notes__", []))


def test_a_file_that_can_not_be_written_changes_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in run_ranks(_full_disk, 2, str(tmp_path / "file"), timeout=60.0) if sys.version_info >= (3, 11) else ():
        assert "could not write its last calls into" in said and "FileExistsError" in said


def test_a_rank_that_ends_by_its_own_error_leaves_a_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    started = Script(ENDS, tmp_path, path=str(script), ZC_RANK_TIMEOUT="2", ZC_DIVERGED_DIR=str(tmp_path / "files"))
    started.read()
    started.close()
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert "LookupError" in said[1] and "LookupError" in said[0], said
    text, is_different = diverged.report(diverged.read(tmp_path / "files"))
    line = next(n for n, text in enumerate(ENDS.splitlines(), 1) if "raise" in text)
    assert is_different and "rank 1: ended by LookupError: planted" in text
    assert f"stands at {script}:{line} in <module>" in text, text


ENDS = """
import os, sys, torch, torch.distributed as dist, zc
os.chdir(sys.argv[1])
other = os.fork()
rank = int(other == 0)
os.dup2(os.open(f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
zc.compile(model, optimizer, backend="eager")
try:
    for step in range(3):
        if rank == 1 and step == 2:
            raise LookupError("planted")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
finally:
    other and os.waitpid(other, 0)
"""
