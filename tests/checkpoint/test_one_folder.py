"""All ranks save and load one folder: what happens where they don't."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from save_and_load import Job
from test_deepspeed import FOLDER, maker
from torch import Tensor
from training_runs import message_of

import zc
from zc import machine
from zc.checkpoint import save_load
from zc.checkpoint.files import Writer
from zc.integrations import load_beside, save_beside

Said = list[tuple[str, str]]


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in zc.iter_weights(model)}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _saves(rank: int, world_size: int, folder: Path) -> tuple[Said, list[str]]:
    model, optimizer = Job("mlp").compiled()
    zc.save(folder / "good", model, optimizer)
    calls: list[Callable[[], Any]] = [
        lambda: zc.save(folder / f"step_{rank}", model, optimizer, keep=1),  # a clock or a rank in the name
        lambda: zc.save(folder / "a", model, optimizer, keep=1 + rank),
        lambda: zc.save(folder / "a", model, optimizer, keep=rank),  # no number for rank 0
        lambda: zc.save(folder / "good", model, optimizer, overwrite=rank == 0),
        lambda: zc.save(folder / "a", model, optimizer, asynchronous=rank == 0),
        lambda: zc.load(folder / "good" if rank == 0 else None, model, optimizer),  # type: ignore[arg-type]
        lambda: (zc.save if rank == 0 else zc.load)(folder / "good", model, optimizer),
        lambda: zc.save(folder / "a", model, optimizer, keep=0),  # on all ranks
        lambda: zc.load(None, model, optimizer),
    ]
    said = [message_of(call) for call in calls]
    dist.barrier()
    names = sorted(entry.name for entry in folder.iterdir())
    dist.barrier()
    zc.save(folder / "next", model, optimizer, keep=1)  # the calls of both ranks are in step
    assert zc.latest(folder) == folder / "next"
    zc.load(folder / "next", model, optimizer)
    return said, names


def test_ranks_that_are_called_with_something_else(tmp_path: Path) -> None:
    """Each rank wrote a folder of its own, rank 0's became visible without the others' files, and ``keep`` removed the
    last good one. A bad ``keep`` on one rank was an error there alone, and its partner met the next save."""
    path = f"path {tmp_path}"
    wanted = [
        f"rank 0 has {path}/step_0, rank 1 has {path}/step_1.",
        "rank 0 has keep=1, rank 1 has keep=2.",
        "rank 0 has keep=0, rank 1 has keep=1.",
        "rank 0 has overwrite=True, rank 1 has overwrite=False.",
        "rank 0 has asynchronous=True, rank 1 has asynchronous=False.",
        f"rank 0 has {path}/good, rank 1 has path None.",
        "rank 0 has zc.save, rank 1 has zc.load.",
    ]
    results = run_ranks(_saves, 2, tmp_path)
    assert results[0][0][0][1].startswith(f"zc.save with {path}/step_0 differs between ranks: ")
    for said, names in results:
        for (kind, text), words in zip(said, wanted, strict=False):
            assert kind == "RankMismatchError" and words in text, (kind, text)
        assert [kind for kind, _ in said[len(wanted) :]] == ["ValueError", "CheckpointError"], said
        assert names == ["good"], "something was made or removed"


def _relative(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    """One folder by two names; then one name for two folders."""
    model, optimizer = Job("mlp").compiled()
    for name in ("shared", "rank_0", "rank_1"):
        (folder / name).mkdir(exist_ok=True)
    with _inside(folder / "shared"):
        path = Path("good") if rank else folder / "shared" / "good"
        zc.save(path, model, optimizer)
        zc.load(path, model, optimizer)
    for name in ("rank_0", "rank_1"):
        if rank == 0:
            shutil.copytree(folder / "shared" / "good", folder / name / "good")
    dist.barrier()
    with _inside(folder / f"rank_{rank}"):
        zc.load("good", model, optimizer)  # a copy is the same
        said = message_of(lambda: zc.save("next", model, optimizer, keep=1))
        zc.load("good", model, optimizer)
    return said


def test_a_folder_that_ranks_do_not_share(tmp_path: Path) -> None:
    """As on machines without a shared file system: rank 0 looks for what the other ranks have written."""
    for kind, text in run_ranks(_relative, 2, tmp_path):
        assert kind == "CheckpointError" and "not all ranks see the folder" in text, (kind, text)
        assert "__1_0.distcp is missing, and rank 1 has written" in text and str(tmp_path / "rank_0") in text, text
    for name in ("rank_0", "rank_1"):
        assert [entry.name for entry in (tmp_path / name).iterdir()] == ["good"], "the last good one alone"


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_0.distcp.crc32.json"])
def test_what_was_written_is_there_before_a_save_is_visible(name: str, tmp_path: Path) -> None:
    """As much as was written, too: a file that is cut off."""
    model, optimizer = Job("mlp").compiled()
    zc.save(tmp_path / "good", model, optimizer)

    def loses(writer: Writer, *args: Any) -> Any:
        written = writing(writer, *args)
        file = Path(writer.path) / name
        os.truncate(file, 100) if file.suffix == ".distcp" else file.unlink()
        return written

    writing = Writer.write_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "write_data", loses)
        words = f"{name} {'has 100 bytes' if name.endswith('distcp') else 'is missing'}, and rank 0 has written"
        with pytest.raises(zc.CheckpointError, match=words):
            zc.save(tmp_path / "next", model, optimizer, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["good"]


def _loads(rank: int, world_size: int, folder: Path) -> tuple[Said, list[bool]]:
    """Two checkpoints by two names; and by one name, which each rank takes for another folder."""
    job = Job("mlp")
    model, optimizer = job.compiled()
    for number in range(2):
        zc.save(folder / f"s{number}", model, optimizer)
        if rank == number:
            shutil.copytree(folder / f"s{number}", folder / f"rank_{rank}" / "s")
        job.steps(model, optimizer, number, number + 1)
    before = _weights(model)
    said = [message_of(lambda: zc.load(folder / f"s{rank}", model, optimizer))]
    with _inside(folder / f"rank_{rank}"):
        said.append(message_of(lambda: zc.load("s", model, optimizer)))
    same = [_same(_weights(model), before)]
    job.steps(model, optimizer, 3, 4)  # and it goes on
    zc.load(folder / "s0", model, optimizer)
    return said, same


def test_a_load_of_two_checkpoints_is_refused(tmp_path: Path) -> None:
    """Rank 0 took its elements of one, rank 1 of the other, and no rank said a word: weights that never were."""
    for said, same in run_ranks(_loads, 2, tmp_path):
        assert [kind for kind, _ in said] == ["RankMismatchError"] * 2, said
        assert f"rank 0 has path {tmp_path}/s0, rank 1 has path {tmp_path}/s1." in said[0][1]
        assert "holds differs between ranks: rank 0 has an index (.metadata) with the SHA-256" in said[1][1]
        assert all(same)


def test_a_checkpoint_that_is_overwritten_while_it_is_read(tmp_path: Path) -> None:
    """By another job, with ``overwrite=True``: the index was of one checkpoint, the tensors of the next."""
    job = Job("mlp")
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 1)
    zc.save(tmp_path / "last", model, optimizer)
    job.steps(model, optimizer, 1, 2)
    zc.save(tmp_path / "newer", model, optimizer)
    before, reading = _weights(model), save_load.dcp_load

    def overwritten(*args: Any, **options: Any) -> None:
        machine.swap_paths(tmp_path / "last", tmp_path / "newer")
        reading(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_load, "dcp_load", overwritten)
        with pytest.raises(zc.CheckpointError, match="last was overwritten while it was read"):
            zc.load(tmp_path / "last", model, optimizer)
    assert _same(_weights(model), before)
    zc.load(tmp_path / "last", model, optimizer)


def _beside(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    """Rank 1 does not see the newest yet."""
    model, optimizer = Job("mlp").compiled()
    assert not load_beside(folder, "zc", model, optimizer)
    save_beside(folder, "zc", model, optimizer)
    save_beside(folder, "zc", model, optimizer)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("zc.integrations.latest", lambda root: root / "0")
        said = message_of(lambda: load_beside(folder, "zc", model, optimizer))
    assert load_beside(folder, "zc", model, optimizer)
    zc.close(model)
    assert not load_beside(folder, "other", model, optimizer)
    return said


def test_the_newest_one_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    for kind, text in run_ranks(_beside, 2, tmp_path):
        assert kind == "RankMismatchError", (kind, text)
        assert f"rank 0 has path {tmp_path}/zc/1, rank 1 has path {tmp_path}/zc/0." in text


def _universal(rank: int, world_size: int, folder: Path) -> tuple[Said, bool]:
    model = maker().make_model()
    model, optimizer = zc.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), backend="eager")
    mine = folder / f"rank_{rank}"
    shutil.copytree(FOLDER / "zero", mine / "zero")
    if rank == 1:
        for file in mine.rglob("step.pt"):
            torch.save(torch.tensor(4.0), file)
    before = _weights(model)
    said = [message_of(lambda: zc.load_universal(mine, model, optimizer))]
    with _inside(mine):
        said.append(message_of(lambda: zc.load_universal(".", model, optimizer)))
    is_same = _same(_weights(model), before)
    zc.load_universal(FOLDER, model, optimizer)
    assert not _same(_weights(model), before)
    return said, is_same


def test_a_universal_checkpoint(tmp_path: Path) -> None:
    for said, is_same in run_ranks(_universal, 2, tmp_path):
        assert [kind for kind, _ in said] == ["RankMismatchError"] * 2, said
        assert f"rank 0 has path {tmp_path}/rank_0, rank 1 has path {tmp_path}/rank_1." in said[0][1]
        assert "step.pt with the number 3.0, rank 1 has " in said[1][1], said[1]
        assert is_same


def _pretrained(rank: int, world_size: int, folder: Path) -> tuple[Said, bool]:
    """Rank 1's folder has the same tensors in several files."""
    model, _ = Job("mlp").compiled()
    for number in range(2):
        where = folder / f"rank_{number}" / "model"
        files = zc.export(where if rank == 0 else None, model, shard_nbytes=10**9 if number == 0 else 100)  # type: ignore[arg-type]
        assert len(files) > number, "rank 0 alone needs the path"
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    before = _weights(model)
    said = [message_of(lambda: zc.load_pretrained(model, folder / f"rank_{rank}" / "model"))]
    with _inside(folder / f"rank_{rank}"):
        said.append(message_of(lambda: zc.load_pretrained(model, "model")))
    is_same = _same(_weights(model), before)
    zc.load_pretrained(model, folder / "rank_1" / "model")
    assert not _same(_weights(model), before)
    return said, is_same


def test_safetensors(tmp_path: Path) -> None:
    for said, is_same in run_ranks(_pretrained, 2, tmp_path):
        assert [kind for kind, _ in said] == ["RankMismatchError"] * 2, said
        assert f"rank 0 has path {tmp_path}/rank_0/model, rank 1 has path {tmp_path}/rank_1/model." in said[0][1]
        assert "of model.safetensors, rank 1 has for " in said[1][1], said[1]
        assert is_same
    assert json.loads((tmp_path / "rank_1" / "model" / "model.safetensors.index.json").read_text())
