"""The file of a rank's optimizer state on a disk, in one process: a crash at any moment leaves nothing that a restart
trusts, and what is damaged or of another plan is refused."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from zc.errors import PlanError
from zc.offload import disk
from zc.offload.disk import StateFile, place

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
GUESSES = OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "0"  # whether there is memory for a mapping
SIZES = {"0/a": (1000, torch.float32), "0/b": (3, torch.float64), "1/a": (0, torch.float32), "1/b": (7, torch.float32)}


def content(file: StateFile) -> list[float]:
    return [float(file.tensor(name).sum()) for name in file.regions]


def life(folder: Path, snapshot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with two updates and a flush after each; ``snapshot()`` wherever the process could be killed: after each
    write, and before and after each call that changes a file or waits for the disk."""
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def around(*args: Any, real: Any = real) -> Any:
            snapshot()
            result = real(*args)
            snapshot()
            return result

        monkeypatch.setattr(disk.os, name, around)
    file = StateFile(folder, 0, 1, place(SIZES), ["plan"])
    for update in (1.0, 2.0):
        file.begin_update()
        for name in file.regions:
            snapshot()
            half = file.tensor(name).numel() // 2
            file.tensor(name)[:half] = update
            snapshot()
            file.tensor(name)[half:] = update
        snapshot()
        file.flush({"update": update})
        snapshot()


def trusted(folder: Path) -> tuple[float, list[float]] | None:
    """What a restart would take up."""
    file = StateFile(folder, 0, 1, place(SIZES), ["plan"])
    return None if file.mark is None else (file.mark["update"], content(file))


@pytest.mark.parametrize("broken", [None, "the mark is kept", "the mark is first"])
def test_killed_at_any_moment(broken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state of the folder that a killed process can leave: what is trusted is whole. Controls: a mark that stays
    while the update writes, and one that is made before the data is there."""
    live, taken = tmp_path / "live", []
    live.mkdir()

    def snapshot() -> None:
        taken.append(tmp_path / f"{len(taken)}")
        shutil.copytree(live, taken[-1])

    with monkeypatch.context() as patched:
        if broken == "the mark is kept":
            patched.setattr(StateFile, "begin_update", lambda self: None)
        if broken == "the mark is first":
            begin = StateFile.begin_update
            patched.setattr(StateFile, "begin_update", lambda self: (begin(self), self.flush({"update": 9.0})))
        life(live, snapshot, patched)
    assert len(taken) > 30
    whole = {update: [update * n for n, _ in SIZES.values() if n] for update in (1.0, 2.0)}
    states = [trusted(folder) for folder in taken]
    torn = [one for one in states if one is not None and one[1] != whole.get(one[0])]
    assert bool(torn) == (broken is not None), torn
    assert {one[0] for one in states if one is not None} >= {1.0, 2.0} and None in states


def test_one_run_a_folder_and_nothing_is_left_of_one_that_just_ends(tmp_path: Path) -> None:
    file = StateFile(tmp_path, 0, 1, place(SIZES), ["plan"])
    with pytest.raises(PlanError, match=r"zc-rank00000-of-00001.state is in use by another process"):
        StateFile(tmp_path, 0, 1, place(SIZES), ["plan"])
    assert file.path.stat().st_size == file.nbytes
    del file
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("how", ["close", "discard"])
def test_a_file_that_was_given_up_can_be_opened_again(how: str, is_flushed: bool, tmp_path: Path) -> None:
    """While somebody has a tensor of its mapping, and a forked worker its descriptor."""
    file = StateFile(tmp_path, 0, 1, place(SIZES), ["plan"])
    if is_flushed:
        file.flush({})
        file.close()
        file = StateFile(tmp_path, 0, 1, place(SIZES), ["plan"])
    held = file.tensor("0/a")
    worker = os.dup(file._fd)
    getattr(file, how)()
    assert len(list(tmp_path.iterdir())) == (2 if is_flushed else 0)
    again = StateFile(tmp_path, 0, 1, place(SIZES), ["plan"])
    assert (again.mark is not None) == is_flushed and float(held.sum()) == 0.0
    del file, held  # the end of what was given up is over
    assert again.path.exists()
    os.close(worker)


def flushed(folder: Path) -> StateFile:
    """A folder with a finished run's state."""
    file = StateFile(folder, 0, 1, place(SIZES), ["plan", "weight (3, 4) at 0 of bucket 0"])
    file.flush({})
    return file


def test_a_truncated_file_and_another_plan_are_refused_and_left_alone(tmp_path: Path) -> None:
    path, size = flushed(tmp_path).path, place(SIZES)[-1].offset + 28
    with pytest.raises(PlanError, match=r"another plan: it has weight \(3, 4\) .* bucket 0, this one weight \(4, 4\)"):
        StateFile(tmp_path, 0, 1, place(SIZES), ["plan", "weight (4, 4) at 0 of bucket 0"])
    with pytest.raises(PlanError, match=r"it has nothing, this one more: to start without .* remove zc-rank00000"):
        StateFile(tmp_path, 0, 1, place(SIZES)[:0], ["plan", "weight (3, 4) at 0 of bucket 0",
                  *(f"{r.name}: {r.numel} {r.dtype} at {r.offset}" for r in place(SIZES)), "more"])  # fmt: skip
    os.truncate(path, 4096)
    with pytest.raises(PlanError, match=rf"has 4,096 bytes, and had {size:,} when its state was complete"):
        StateFile(tmp_path, 0, 1, place(SIZES), ["plan", "weight (3, 4) at 0 of bucket 0"])
    path.unlink()
    with pytest.raises(PlanError, match=rf"has 0 bytes, and had {size:,} when"):
        StateFile(tmp_path, 0, 1, place(SIZES), ["plan", "weight (3, 4) at 0 of bucket 0"])
    assert [p.suffix for p in tmp_path.iterdir()] == [".mark"]
    next(tmp_path.iterdir()).write_text("{")
    with pytest.raises(PlanError, match=r"\.mark can't be read: to start without that state"):
        StateFile(tmp_path, 0, 1, place(SIZES), ["plan"])


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 12)])
def test_state_of_another_number_of_ranks_is_refused_and_left_alone(before: int, now: int, tmp_path: Path) -> None:
    """The name of a file has the number of ranks, so a run with another one found none and started afresh."""
    for rank in range(before):
        StateFile(tmp_path, rank, before, place(SIZES), ["plan"]).flush({})
    entries = sorted(tmp_path.iterdir())
    words = rf"holds the state of {before} rank\(s\) .*and this run has {now}: .* remove zc-rank\*-of-0000{before}"
    for rank in range(now):
        with pytest.raises(PlanError, match=words):
            StateFile(tmp_path, rank, now, place(SIZES), ["plan"])
    assert sorted(tmp_path.iterdir()) == entries
    for path in entries:
        if path.suffix == ".mark":
            path.unlink()  # as in the next update: nothing to take up, but to mention
    file = StateFile(tmp_path, 0, now, place(SIZES), ["plan"])
    assert file.has_earlier and not file.existed and file.mark is None


@pytest.mark.skipif(not GUESSES, reason="not Linux, or with a vm.overcommit_memory of its own")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_file_larger_than_all_memory_can_be_flushed(
    is_allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are mapped privately count as memory that may be needed, unless the mapping says otherwise. Where that
    is not allowed, an edit is in the file, as it has always been."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    more = sum(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal")) + (1 << 30)
    monkeypatch.setattr(StateFile, "_reserve", lambda self: os.ftruncate(self._fd, self.nbytes))  # a file of holes
    file = StateFile(tmp_path, 0, 1, place({"0/a": (more // 4, torch.float32)}), ["plan"])
    first = file.tensor("0/a")[:1]
    first.fill_(1.0)
    if not is_allowed:
        monkeypatch.setattr(disk, "_MAP_NORESERVE", 0)
    file.flush({})
    first.fill_(2.0)
    with file.path.open("rb") as content:
        written = struct.unpack("f", content.read(4))[0]
    assert (file.is_private, written) == ((True, 1.0) if is_allowed else (False, 2.0)) and first.item() == 2.0
    file.discard()
