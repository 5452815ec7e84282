"""Bad input: each named, on every rank, and the state is as before."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from loops import message_of, sgd
from saved import Job, parts

import zc
from zc import checkpoint_files


def _made(rank: int, world_size: int, path: Path) -> None:
    job = Job("mlp")
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 1)
    zc.save(path, model, optimizer)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("good") / "a"
    run_ranks(_made, 2, path)
    return path


def _refused(rank: int, world_size: int, job: Job, path: Path) -> tuple[str, str, bool]:
    """What `zc.load` says, and whether weights, masters, states and options are what they were."""
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 5, 6)
    before, weights = parts(model, optimizer), [p.detach().clone() for p in model.parameters()]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    kind, text = message_of(lambda: zc.load(path, model, optimizer))
    after = parts(model, optimizer)
    same = before.keys() == after.keys() and all(torch.equal(before[n][1], after[n][1]) for n in before)
    same &= all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    same &= options == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    job.steps(model, optimizer, 6, 7)  # and it goes on
    return kind, text, same


def refused(job: Job, path: Path) -> str:
    """The same words on both ranks."""
    found = run_ranks(_refused, 2, job, path)
    for kind, text, same in found:
        assert kind == "CheckpointError", (kind, text)
        assert same, f"half loaded: {text}"
    return str(found[0][1]) + "\n" + str(found[1][1])


def truncate(path: Path) -> None:
    file = path / "__1_0.distcp"
    os.truncate(file, file.stat().st_size // 2)


def flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    sums = json.loads((path / "__0_0.distcp.crc32.json").read_text())
    offset, length, _ = max(sums, key=lambda chunk: chunk[1])
    raw[offset + length // 2] ^= 1
    file.write_bytes(raw)


def lose(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def lose_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def cut_metadata(path: Path) -> None:
    os.truncate(path / ".metadata", 1000)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/zc_was_here",)


def evil_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "__1_0.distcp is truncated",
    flip: "__0_0.distcp is corrupted: the checksum of",
    lose: "__0_0.distcp is missing",
    lose_metadata: "is no checkpoint: it has no .metadata file",
    cut_metadata: ".metadata is damaged",
    evil_metadata: "posix.system, which DCP's metadata does not need",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__))
def test_a_damaged_checkpoint(damage: Callable[[Path], None], good: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(good, path)
    damage(path)
    text = refused(Job("mlp"), path)
    assert DAMAGES[damage] in text and str(path) in text
    assert not Path("/tmp/zc_was_here").exists()


MISFITS = {
    "names": (
        Job("gpt_tied"),
        ["is of another model than this", "missing (", "4 extra (0.bias, 0.weight, 2.bias, 2.weight)"],
    ),
    "shapes": (Job("narrow_mlp"), ["has shape", "the model's is"]),
    "optimizer": (Job("mlp", sgd), ["another optimizer than SGD", "lacks dampening"]),
    "nothing": (Job("mlp"), ["no .metadata file"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_of_something_else(name: str, good: Path, tmp_path: Path) -> None:
    job, words = MISFITS[name]
    text = refused(job, tmp_path if name == "nothing" else good)
    for word in words:
        assert word in text


def _unsavable(rank: int, world_size: int, path: Path) -> list[tuple[str, str]]:
    model, optimizer = Job("mlp").compiled()
    found = []
    (path / "taken").mkdir(exist_ok=True)
    found.append(message_of(lambda: zc.save(path / "taken", model, optimizer)))
    found.append(message_of(lambda: zc.save(path / "extra", model, optimizer, extra={"f": Evil()} if rank else {})))
    found.append(message_of(lambda: zc.save(path / ".hidden", model, optimizer)))
    usage = checkpoint_files.shutil.disk_usage
    checkpoint_files.shutil.disk_usage = lambda where: usage(where)._replace(free=1000)
    found.append(message_of(lambda: zc.save(path / "full", model, optimizer)))
    checkpoint_files.shutil.disk_usage = usage
    if rank == 1:  # the disk fills up while rank 1 writes
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    found.append(message_of(lambda: zc.save(path / "fills_up", model, optimizer)))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    zc.save(path / "good", model, optimizer)
    return found


def test_what_can_not_be_saved(tmp_path: Path) -> None:
    wanted = [
        "taken exists already: nothing is overwritten",
        "extra holds what torch.load(weights_only=True) refuses",
        "a checkpoint can't be named '.hidden'",
        "has room for 1000 bytes, the checkpoint full needs",
        "fills_up failed",
    ]
    for found in run_ranks(_unsavable, 2, tmp_path):
        for (kind, text), words in zip(found, wanted, strict=True):
            assert kind == "CheckpointError"
            assert words in text
    assert zc.latest(tmp_path) == tmp_path / "good"
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["good", "taken"]
