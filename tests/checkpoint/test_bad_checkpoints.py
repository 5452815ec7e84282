"""Bad input: each named, on every rank, and the state is as before."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from save_and_load import Job, parts
from tiers import FULL
from training_runs import message_of, sgd

import zc
from zc.checkpoint import files as checkpoint_files


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


def refused(cases: list[tuple[Job, Path]]) -> list[str]:
    """What both ranks say of each."""
    texts = []
    for case, ranks in run_cases(_refused, 2, cases):
        for kind, text, same in ranks:
            assert kind == "CheckpointError", (case, kind, text)
            assert same, f"half loaded: {text}"
        texts.append("\n".join(text for _, text, _ in ranks))
    return texts


def damaged(good: Path, folder: Path, damages: Iterable[Callable[[Path], None]]) -> list[tuple[Job, Path]]:
    """A copy of the good checkpoint for each way to damage it."""
    cases = []
    for damage in damages:
        path = shutil.copytree(good, folder / damage.__name__)
        damage(path)
        cases.append((Job("mlp"), path))
    return cases


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


def evil_metadata_of_another(path: Path) -> None:
    evil_metadata(path)
    lose_sums(path)


def lose_sums(path: Path) -> None:
    """As another program leaves a DCP checkpoint."""
    for file in (*path.glob("*.crc32.json"), path / "zc.json"):
        file.unlink()


def flip_without_the_list(path: Path) -> None:
    flip(path)
    (path / "zc.json").unlink()


def lose_sums_and_list(path: Path) -> None:
    flip_without_the_list(path)
    (path / "__0_0.distcp.crc32.json").unlink()


def swap_metadata(path: Path) -> None:
    """Two tensors of one shape change places in the index."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    names = [k for k in metadata.storage_data if k.fqn.startswith("optimizer.state.0.weight.exp_avg")]
    first = next(k for k in names if k.fqn.endswith("exp_avg"))
    second = next(k for k in names if k.fqn.endswith("exp_avg_sq") and k.offset == first.offset)
    places = metadata.storage_data
    places[first], places[second] = places[second], places[first]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def swap_metadata_without_the_list(path: Path) -> None:
    swap_metadata(path)
    (path / "zc.json").unlink()


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "__1_0.distcp is truncated",
    flip: "__0_0.distcp is corrupted: the checksum of",
    lose: "__0_0.distcp is missing",
    lose_metadata: "is no checkpoint: it has no .metadata file",
    cut_metadata: ".metadata is corrupted: the checksum",
    evil_metadata: ".metadata is corrupted: the checksum",
    evil_metadata_of_another: "posix.system, which DCP's metadata does not need",
    flip_without_the_list: "__0_0.distcp is corrupted: the checksum of",
    lose_sums_and_list: "__0_0.distcp.crc32.json is missing",
    swap_metadata: ".metadata is corrupted: the checksum",
    swap_metadata_without_the_list: ".metadata is corrupted: the checksum",
}


def test_a_damaged_checkpoint(good: Path, tmp_path: Path) -> None:
    cases = damaged(good, tmp_path, DAMAGES)
    for (_, path), words, text in zip(cases, DAMAGES.values(), refused(cases), strict=True):
        assert words in text and str(path) in text
    assert not Path("/tmp/zc_was_here").exists()


@pytest.mark.parametrize("seed", range(2))
def test_a_half_damaged_index_without_a_checksum(seed: int, good: Path, tmp_path: Path) -> None:
    """Of another program, so nothing says that it is damaged: it loads, or it is a CheckpointError, on one rank and in
    `zc.export`; KeyError, MemoryError, DCP's CheckpointException (no Exception) came out."""
    path, generator = tmp_path / "damaged", random.Random(seed)
    shutil.copytree(good, path)
    lose_sums(path)
    raw = (path / ".metadata").read_bytes()
    model, optimizer = Job("mlp").compiled()
    zc.load(path, model, optimizer)
    refusals = 0
    for number in range(150 if FULL else 50):
        damaged = bytearray(raw)
        for _ in range(generator.choice((1, 1, 1, 8))):
            damaged[generator.randrange(len(raw))] = generator.randrange(256)
        (path / ".metadata").write_bytes(damaged)
        for use in (lambda: zc.load(path, model, optimizer), lambda n=number: zc.export(tmp_path / str(n), path)):
            try:
                use()
            except zc.CheckpointError:
                refusals += 1
    assert refusals > (50 if FULL else 16)


def test_an_index_that_python_3_13_has_written(good: Path, tmp_path: Path) -> None:
    """Its paths are of ``pathlib._local``, a module that earlier versions do not have."""
    path = shutil.copytree(good, tmp_path / "of 3.13")
    lose_sums(path)
    raw = pickle.dumps(pickle.loads((path / ".metadata").read_bytes()), protocol=2)
    (path / ".metadata").write_bytes(raw.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert b"cpathlib._local\n" in (path / ".metadata").read_bytes()
    zc.load(path, *Job("mlp").compiled())


def lose_chunk(metadata: Any) -> None:
    del metadata.storage_data[next(k for k in metadata.storage_data if k.fqn == "model.0.weight")]


def lose_path(metadata: Any) -> None:
    del metadata.planner_data["model.0.weight"]


def grow(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].size = torch.Size([2**40, 16])


def lengthen(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 2**60


def other_path(metadata: Any) -> None:
    metadata.planner_data["model.0.weight"] = ("model",)


def test_an_index_that_does_not_agree_with_itself(good: Path, tmp_path: Path) -> None:
    cases = []
    for damage in (lose_chunk, lose_path, grow, lengthen, other_path):
        path = shutil.copytree(good, tmp_path / damage.__name__)
        lose_sums(path)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        damage(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        if damage is not lose_path and damage is not other_path:  # export reads no paths
            with pytest.raises(zc.CheckpointError, match=str(path)):
                zc.export(tmp_path / "out", path)
        cases.append((Job("mlp"), path))
    for (_, path), text in zip(cases, refused(cases), strict=True):
        assert str(path) in text


MISFITS = {
    "names": (
        Job("gpt_tied"),
        ["is of another model than this", "missing (", "4 extra (0.bias, 0.weight, 2.bias, 2.weight)"],
    ),
    "shapes": (Job("narrow_mlp"), ["has shape", "the model's is"]),
    "optimizer": (Job("mlp", sgd), ["another optimizer than SGD", "lacks dampening"]),
    "nothing": (Job("mlp"), ["no .metadata file"]),
}


def test_a_checkpoint_of_something_else(good: Path, tmp_path: Path) -> None:
    texts = refused([(job, tmp_path if name == "nothing" else good) for name, (job, _) in MISFITS.items()])
    for (name, (_, words)), text in zip(MISFITS.items(), texts, strict=True):
        assert all(word in text for word in words), (name, text)


def _unsavable(rank: int, world_size: int, path: Path) -> list[tuple[str, str]]:
    model, optimizer = Job("mlp").compiled()
    messages = []
    (path / "taken").mkdir(exist_ok=True)
    messages.append(message_of(lambda: zc.save(path / "taken", model, optimizer)))
    messages.append(message_of(lambda: zc.save(path / "extra", model, optimizer, extra={"f": Evil()} if rank else {})))
    messages.append(message_of(lambda: zc.save(path / ".hidden", model, optimizer)))
    usage = checkpoint_files.shutil.disk_usage
    checkpoint_files.shutil.disk_usage = lambda where: usage(where)._replace(free=1000)
    messages.append(message_of(lambda: zc.save(path / "full", model, optimizer)))
    checkpoint_files.shutil.disk_usage = usage
    # The disk fills up while rank 1 writes: no file of this process grows past 1 MiB. A process group that earlier
    # tests left, and that a thread of theirs ends just now, still finds room in its FileStore, which has a few kB.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    large = {"large": torch.zeros(2**19)}
    messages.append(message_of(lambda: zc.save(path / "fills_up", model, optimizer, extra=large)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    messages.append(message_of(lambda: zc.load(zc.latest(path), model, optimizer)))
    messages.append(message_of(lambda: zc.save(None, model, optimizer)))  # type: ignore[arg-type]
    messages.append(message_of(lambda: zc.export(path / "rounded", model, dtype=torch.int8)))
    zc.save(path / "good", model, optimizer)
    return messages


def test_what_can_not_be_saved(tmp_path: Path) -> None:
    wanted = [
        "taken exists already: nothing is overwritten",
        "extra holds what torch.load(weights_only=True) refuses",
        "a checkpoint can't be named '.hidden'",
        "has room for 1000 bytes, the checkpoint full needs",
        "fills_up failed",
        "zc.load was given None for a path",
        "zc.save was given None for a path",
        "zc.export was given dtype=torch.int8",
    ]
    for result in run_ranks(_unsavable, 2, tmp_path):
        for (kind, text), words in zip(result, wanted, strict=True):
            assert kind == "CheckpointError"
            assert words in text
    assert zc.latest(tmp_path) == tmp_path / "good"
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["good", "taken"]
