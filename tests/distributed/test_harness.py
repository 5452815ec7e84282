"""The harness itself: a test of distributed code is worth what its harness does when the code under it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, patience, run_ranks
from tiers import full_only


def _pid_and_sum(rank: int, world_size: int, factor: float) -> tuple[int, float, float, int]:
    value = torch.tensor(factor * (rank + 1))
    dist.all_reduce(value)
    return os.getpid(), value.item(), torch.rand(()).item(), hash("rank")


def _raises_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("rank one's own words")
    return rank


def _rank_0_waits_for_ever(rank: int, world_size: int) -> int:
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    return rank


def _rank_0_waits_for_a_failed_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own words")
    dist.recv(torch.zeros(1), src=1)


def _dies(rank: int, world_size: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os._exit(7)


def test_processes_stay_and_each_job_starts_the_same() -> None:
    """`import torch` is paid once; group and seed are fresh, so no test depends on the one before it. Python's hash
    seed differs between ranks, as between processes of a launcher: an order that depends on it shows."""
    first = run_ranks(_pid_and_sum, 2, 1.0)
    second = run_ranks(_pid_and_sum, 2, 10.0)
    assert [r[0] for r in first] == [r[0] for r in second] and first[0][0] != first[1][0]
    assert [r[1] for r in first] == [3.0, 3.0] and [r[1] for r in second] == [30.0, 30.0]
    assert len({r[2] for r in first + second}) == 1
    assert first[0][3] != first[1][3]


def test_an_exception_names_its_rank_and_keeps_the_pool() -> None:
    """A traceback without its rank says nothing; and a rank that raised can go on with the next job."""
    with pytest.raises(RanksFailed, match="rank one's own words") as failed:
        run_ranks(_raises_on_rank_1, 2)
    assert list(failed.value.errors) == [1] and "_raises_on_rank_1" in failed.value.errors[1]
    assert [r[1] for r in run_ranks(_pid_and_sum, 2, 1.0)] == [3.0, 3.0]


def test_a_hang_is_killed_named_and_the_pool_rebuilt() -> None:
    """A collective that one rank never enters hangs the others: the test ends, and shows where they wait."""
    run_ranks(_pid_and_sum, 2, 1.0)
    before = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"timed out after \d+ s; ranks that had not finished: \[0\], finished: \[1\]"
    ) as failed:
        run_ranks(_rank_0_waits_for_ever, 2, timeout=3)
    assert "_rank_0_waits_for_ever" in failed.value.errors[0], "the stack of the waiting rank"
    assert time.monotonic() - before < 60 * patience()
    assert [r[1] for r in run_ranks(_pid_and_sum, 2, 1.0)] == [3.0, 3.0]


def test_limits_grow_with_what_the_machine_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for an idle machine makes false failures on a loaded one."""
    monkeypatch.delenv("ZC_PATIENCE", raising=False)
    cores = len(os.sched_getaffinity(0))
    for load, expected in ((0.0, 1.0), (cores, 1.0), (5.0 * cores, 5.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert patience() == expected
    monkeypatch.setenv("ZC_PATIENCE", "3")
    assert patience() == 3.0
    with pytest.raises(RanksFailed, match="timed out after 3 s"):
        run_ranks(_rank_0_waits_for_ever, 2, timeout=1)


def test_a_rank_that_fails_lets_the_others_go_at_once() -> None:
    """Its group is closed, so who waits for it raises too: no test waits for a timeout when an error is known."""
    run_ranks(_pid_and_sum, 2, 1.0)  # starts the processes where the test before has ended them
    before = time.monotonic()
    with pytest.raises(RanksFailed, match="rank one's own words") as failed:
        run_ranks(_rank_0_waits_for_a_failed_one, 2)
    assert sorted(failed.value.errors) == [0, 1]
    assert time.monotonic() - before < 40 * patience(), "it waited for the time limit"


def test_a_rank_that_dies_is_named() -> None:
    """A crash in C++ has no traceback: the exit code and the last output must do."""
    with pytest.raises(RanksFailed, match="exit code 7") as failed:
        run_ranks(_dies, 2)
    assert "last words" in failed.value.errors[1]


def _tells_and_stays(rank: int, world_size: int, folder: str) -> None:
    Path(folder, f"{rank}.new").write_text(str(os.getpid()))
    Path(folder, f"{rank}.new").rename(Path(folder, f"{rank}.pid"))
    signal.pause()


_DRIVER = """
import sys
import harness, test_harness
harness.run_ranks(test_harness._tells_and_stays, 2, sys.argv[1])
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_ranks_end_with_a_killed_harness(tmp_path: Path) -> None:
    """In the middle of a job."""
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path)], env=_environment())
    files, deadline = [tmp_path / f"{rank}.pid" for rank in range(2)], time.monotonic() + 120 * patience()
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in files]
    driver.kill()
    driver.wait()
    try:
        while any(map(_is_there, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for pid in filter(_is_there, pids):
            os.kill(pid, signal.SIGKILL)


_ENDS = """
import os
def test_a(): pass
def test_b(): os._exit(1)
def test_c(): pass
"""
_SENDS_LATE = """
import time
from xdist.workermanage import WorkerController
plain = WorkerController.send_runtest_some
def send(self, tests):
    time.sleep(0.3)  # the worker ends meanwhile
    plain(self, tests)
WorkerController.send_runtest_some = send
"""


@full_only
def test_a_worker_of_xdist_that_ends_costs_one_test(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_1.py").write_text(_ENDS)
    (tmp_path / "conftest.py").write_text(_SENDS_LATE)
    for k in range(2, 5):
        (tmp_path / f"test_{k}.py").write_text("def test_a(): pass")
    for workers in ("1", "2"):
        options = ["-n", workers, "--dist", "loadfile", "-p", "crashed_workers", "-p", "no:cacheprovider"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, "--rootdir", str(tmp_path), str(tmp_path)],
            env=_environment(), capture_output=True, text=True, timeout=60 * patience(),
        )  # fmt: skip
        assert "1 failed, 5 passed" in run.stdout, run.stdout


def test_kernels_are_kept_for_the_next_run_and_graphs_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = tmp_path / "run" / "inductor" / "ab", tmp_path / "kept"
    made.mkdir(parents=True)
    kept.mkdir()
    for name in ("key.main.so", "key.main.cpp", "graph.py"):
        (made / name).write_text(name)
    monkeypatch.setattr(harness, "kept_kernels", lambda: kept)
    for _ in range(2):  # two runs make the same
        harness.keep_kernels(tmp_path / "run")
    assert {file.name: file.read_text() for file in (kept / "ab").iterdir()} == {
        name: name for name in ("key.main.so", "key.main.cpp")
    }
