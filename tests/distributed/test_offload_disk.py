"""offload="disk": bitwise the same training, across a restart too; and what is refused, before anything is moved."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RanksFailed, run_cases, run_ranks
from models import mean_square, mlp, vectors
from oracle import weights
from torch import Tensor, nn

import zc
from zc.errors import PlanError
from zc.offload import disk
from zc.offload.host_step import HostStep
from zc.optim.trials import whole_keys

DIM = 16


def halve(model: nn.Module) -> None:
    """The caller writes a weight in place."""
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}


def build(kind: str = "AdamW", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, 2)
    cls, arguments = OPTIMIZERS[kind]
    model, optimizer = zc.compile(
        model, cls(model.parameters(), **arguments), backend="eager", bucket_nbytes=1500, **options
    )  # type: ignore[call-arg]
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = vectors(DIM)(rank, step, 0)
        mean_square(model, (x.to(dtype), y)).backward()
        if step == 1:
            zc.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def restarted(rank: int, world_size: int, folder: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Job: four steps without offload, a weight written by hand after two; the same on a disk, with a restart there."""
    plain, optimizer = build(kind, **options)
    train(plain, optimizer, rank, range(2))
    halve(plain)
    train(plain, optimizer, rank, range(2, 4))
    first, optimizer = build(kind, offload="disk", offload_dir=folder, **options)
    train(first, optimizer, rank, range(2))
    halve(first)
    zc.flush_state(first)
    where = zc.explain(first).sections["offload"]
    saved = weights(first)
    del first, optimizer
    gc.collect()
    torch.manual_seed(0)
    second: nn.Module = mlp(DIM, 2)
    if rank == 0:  # the others get theirs from it
        second.load_state_dict({name: value.float() for name, value in saved.items()})
    cls, arguments = OPTIMIZERS[kind]
    second, optimizer = zc.compile(
        second, cls(second.parameters(), **arguments), backend="eager", bucket_nbytes=1500, offload="disk",
        offload_dir=folder, **options,
    )  # type: ignore[call-arg]  # fmt: skip
    notes = zc.explain(second).sections["notes"]
    train(second, optimizer, rank, range(2, 4))
    states = zc.registry.sharded(second).optimizers[0].local.state.values()
    tensors = [v for s in states for v in s.values() if v.dim() > 0]
    return {
        "same": all(torch.equal(value, weights(second)[name]) for name, value in weights(plain).items()),
        "notes": notes,
        "where": where,
        "mapped": sum(v.numel() for v in tensors),
    }


def test_bitwise_the_same_and_across_a_restart(tmp_path: Path) -> None:
    """Fresh state would not do: see the next test for what it gives."""
    cases = []
    for kind in OPTIMIZERS:
        (tmp_path / kind).mkdir()
        options = {"param_dtype": torch.bfloat16} if kind in ("AdamW", "amsgrad") else {"stage": 1}
        cases.append((str(tmp_path / kind), kind, options))
    for (folder, kind, _), ranks in run_cases(restarted, 2, cases):
        for result in ranks:
            assert result["same"] and result["mapped"] > 0, kind
            assert "state after update 2 taken up" in result["notes"], kind
            assert f"optimizer state: {folder}" in result["where"], kind


def dropped(rank: int, world_size: int, folder: str, how: str) -> dict[str, Any]:
    """Job: a run that is gone after a flush and one more update, then another in the same folder."""
    model, optimizer = build(offload="disk", offload_dir=folder)
    train(model, optimizer, rank, range(2))
    zc.flush_state(model)
    at_flush = weights(model)
    backup = Path(folder) / "kept"
    backup.mkdir(exist_ok=True)
    if how == "one rank only" and rank == 0:
        _copy(folder, backup, rank)
    train(model, optimizer, rank, range(2, 3))
    if not (how == "one rank only" and rank == 0):
        _copy(folder, backup, rank)  # what a killed process leaves
    torch.distributed.barrier()
    torch.manual_seed(0)
    again: nn.Module = mlp(DIM, 2)
    again.load_state_dict(at_flush)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    again, optimizer = zc.compile(
        again, optimizer, backend="eager", bucket_nbytes=1500, offload="disk", offload_dir=backup
    )
    return {"notes": zc.explain(again).sections["notes"], "state": len(optimizer.state)}


def _copy(folder: str, backup: Path, rank: int) -> None:
    for path in Path(folder).glob(f"zc-rank{rank:05d}*"):
        shutil.copy(path, backup)


@pytest.mark.parametrize(
    ("how", "says"), [("all", "it is not complete"), ("one rank only", "on some ranks it is not complete")]
)
def test_state_of_a_run_that_did_not_end_is_not_used(how: str, says: str, tmp_path: Path) -> None:
    for result in run_ranks(dropped, 2, str(tmp_path), how):
        assert says in result["notes"] and "is not used" in result["notes"] and result["state"] == 0


def refuses(match: str, **options: Any) -> None:
    """`zc.compile` raises, and model, optimizer and folder are what they were."""
    model: nn.Module = mlp(DIM, 2)
    make = options.pop("optimizer", torch.optim.AdamW)
    optimizer = make(model.parameters(), lr=1e-3)
    before = [p.data_ptr() for p in model.parameters()]
    folder = options.get("offload_dir")
    entries = sorted(folder.iterdir()) if isinstance(folder, Path) and folder.is_dir() else None
    with pytest.raises(PlanError, match=match):
        zc.compile(model, optimizer, backend="eager", offload="disk", **options)
    assert [p.data_ptr() for p in model.parameters()] == before and len(optimizer.param_groups[0]["params"]) == 4
    assert entries is None or sorted(folder.iterdir()) == entries


def test_what_is_refused_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(r"offload='disk' needs the folder for its files", offload_dir=None)
    refuses(r"offload_dir must be a path, got 3", offload_dir=3)
    refuses(rf"offload_dir {tmp_path}/none is not a folder", offload_dir=tmp_path / "none")
    refuses(r"takes torch's elementwise optimizers \(SGD, .*\), not Custom", offload_dir=tmp_path, optimizer=Custom)
    with pytest.raises(PlanError, match=r"offload='cpu' and offload_dir='x'"):
        zc.compile(mlp(DIM, 2), torch.optim.SGD(mlp(DIM, 2).parameters()), offload="cpu", offload_dir="x")
    with monkeypatch.context() as patched:
        free = os.statvfs(tmp_path)
        patched.setattr(disk.os, "statvfs", lambda path: os.statvfs_result([*free[:4], 1, *free[5:]]))
        refuses(
            rf"offload_dir {tmp_path} has {free.f_frsize:,} bytes for rank 0, whose optimizer state takes [\d,]+",
            offload_dir=tmp_path,
        )
    with monkeypatch.context() as patched:  # the disk has filled up since it was asked

        def full(fd: int, offset: int, nbytes: int) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(disk.os, "posix_fallocate", full)
        refuses(r"bytes for rank 0, whose optimizer state takes", offload_dir=tmp_path)
    with monkeypatch.context() as patched:  # root may write anywhere

        def denied(*args: Any) -> int:
            raise PermissionError(13, "Permission denied")

        patched.setattr(disk.os, "open", denied)
        refuses(r"can't be written to: Permission denied \(zc-rank00000-of-00001.state\)", offload_dir=tmp_path)
    with pytest.raises(PlanError, match="flush_state is for offload='disk'"):
        zc.flush_state(build()[0])


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that refuses even root")
def test_a_folder_that_really_is_not_writable() -> None:
    refuses(r"offload_dir /proc/self can't be written to", offload_dir="/proc/self")


class Custom(torch.optim.SGD):
    """No optimizer of torch's."""


def full_on_one(rank: int, world_size: int, folder: str) -> None:
    """Job: only rank 1's disk is too small."""
    if rank == 1:
        free = os.statvfs(folder)
        original, disk.os.statvfs = disk.os.statvfs, lambda path: os.statvfs_result([*free[:4], 1, *free[5:]])
    try:
        build(offload="disk", offload_dir=folder)
    finally:
        if rank == 1:
            disk.os.statvfs = original


def test_one_ranks_full_disk_stops_all_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(full_on_one, 2, str(tmp_path))
    assert "RankMismatchError: rank 1 refused" in caught.value.errors[0]
    assert "bytes for rank 1, whose optimizer state takes" in caught.value.errors[1]
    assert not list(tmp_path.iterdir())


def flush_fails_on_one(rank: int, world_size: int, folder: str) -> None:
    """Job: rank 1 can't write its mark."""
    model, optimizer = build(offload="disk", offload_dir=folder)
    train(model, optimizer, 0, range(1))
    if rank == 0:
        zc.flush_state(model)
    else:
        with mock.patch.object(disk, "write_synced", side_effect=OSError("no mark")):
            zc.flush_state(model)


def test_a_flush_that_fails_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(flush_fails_on_one, 2, str(tmp_path))
    assert "rank 1 failed in zc.flush_state, rank 0 did not: OSError: no mark" in caught.value.errors[0]
    assert "OSError: no mark" in caught.value.errors[1]


def test_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(offload="disk", offload_dir=tmp_path)
    train(model, optimizer, 0, range(1))
    zc.flush_state(model)
    del model, optimizer
    gc.collect()
    refuses(r"holds the state of other weights \(0.weight differs\), those of update 1:", offload_dir=tmp_path,
            bucket_nbytes=1500)  # fmt: skip


def on_more_ranks(rank: int, world_size: int, folder: str) -> None:
    """Job: the folder has the state of one rank."""
    refuses(rf"offload_dir {folder} holds the state of 1 rank\(s\) .*and this run has 2: start as many ranks as then",
            offload_dir=Path(folder))  # fmt: skip


def test_state_of_another_number_of_ranks_is_refused_on_all(tmp_path: Path) -> None:
    """They trained on with fresh state, in silence: off by 100 % of a weight after 3 updates."""
    model, optimizer = build(offload="disk", offload_dir=tmp_path)
    train(model, optimizer, 0, range(1))
    zc.flush_state(model)
    run_ranks(on_more_ranks, 2, str(tmp_path))


def test_state_that_was_loaded_moves_to_the_file_and_new_state_is_announced(tmp_path: Path) -> None:
    model, optimizer = build(offload="disk", offload_dir=tmp_path)
    train(model, optimizer, 0, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    updater = zc.registry.sharded(model).optimizers[0].updater
    assert isinstance(updater, HostStep) and updater.disk is not None
    file = updater.disk.file
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in map(file.tensor, file.regions)]

    def outside() -> int:
        tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() > 0]
        return sum(not any(low <= t.data_ptr() < high for low, high in spans) for t in tensors)

    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    assert outside() == 4
    train(model, optimizer, 0, range(1))
    assert outside() == 0
    optimizer.param_groups[0]["amsgrad"] = True
    for state in optimizer.state.values():
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 0, range(1))
    assert any("the state max_exp_avg_sq was not there when the file was made" in str(w.message) for w in caught)
    with pytest.raises(PlanError, match=r"the state max_exp_avg_sq of .* is not in the file"):
        zc.flush_state(model)


def worker_of_a_loader(ends: Any) -> None:
    ends.wait(60)


@pytest.mark.parametrize("flushes", [False, True])
def test_a_closed_model_gives_its_folder_up(flushes: bool, tmp_path: Path) -> None:
    """The file stayed mapped and locked while the optimizer lived: a scheduler has it. So did its lock while a forked
    worker did, which has the descriptor."""
    model, optimizer = build(offload="disk", offload_dir=tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 0, range(2))
    held, also = (next(iter(optimizer.state.values()))[key] for key in ("exp_avg", "exp_avg_sq"))
    before = held.clone()
    if flushes:
        zc.flush_state(model)
        held.mul_(2.0)  # the file keeps what was flushed
    fork = multiprocessing.get_context("fork")
    ends = fork.Event()
    worker = fork.Process(target=worker_of_a_loader, args=(ends,))
    worker.start()
    zc.close(model)
    assert {path.suffix for path in tmp_path.iterdir()} == ({".mark", ".state"} if flushes else set())
    assert scheduler.optimizer is optimizer
    assert torch.equal(held, before * (1 + flushes)), "what the caller holds stays readable"
    again = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zc.compile(model, again, backend="eager", bucket_nbytes=1500, offload="disk", offload_dir=tmp_path)
    assert len(again.state) == (4 if flushes else 0)
    if flushes:
        held.zero_()
        assert torch.equal(next(iter(again.state.values()))["exp_avg"], before)
    kept = held.clone(), also.clone()
    train(model, again, 0, range(2, 3))
    assert torch.equal(held, kept[0]) and torch.equal(also, kept[1]), "the next model has other memory"
    zc.close(model)
    del held, also
    if os.path.isfile("/proc/self/maps"):
        gc.collect()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    ends.set()
    worker.join()


def exchange_states(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    """The caller hands tensors of the file to other parameters, or to this one transposed."""
    first, second = (param for param in model.parameters() if param.shape == (DIM, DIM))
    if how == "whole states":
        optimizer.state[first], optimizer.state[second] = dict(optimizer.state[second]), dict(optimizer.state[first])
    elif how == "a loaded state":
        state = optimizer.state_dict()
        numbers = [k for k, param in enumerate(model.parameters()) if param.shape == (DIM, DIM)]
        a, b = (state["state"][k] for k in numbers)
        optimizer.load_state_dict({**state, "state": {**state["state"], numbers[0]: b, numbers[1]: a}})
    elif how == "halved":
        optimizer.state[first]["exp_avg"].mul_(0.5)
    elif how == "transposed":
        optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"].t()
    else:
        a, b = optimizer.state[first], optimizer.state[second]
        a[how], b[how] = b[how], a[how]


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize(
    ("kind", "how"),
    [("AdamW", "exp_avg"), ("AdamW", "whole states"), ("AdamW", "a loaded state"), ("AdamW", "transposed"),
     ("AdamW", "halved"), ("momentum", "momentum_buffer")],
)  # fmt: skip
def test_states_that_the_caller_exchanges(kind: str, how: str, flushes: bool, tmp_path: Path) -> None:
    """One of the two was written into the other's place before that one was read: both parameters had it."""
    after = []
    for options in ({}, {"offload": "disk", "offload_dir": tmp_path}):
        model, optimizer = build(kind, **options)
        train(model, optimizer, 0, range(2))
        exchange_states(model, optimizer, how)
        if flushes and options:
            zc.flush_state(model)
            states = [item for state in optimizer.state.values() for item in state.values()]
            assert all(item.is_contiguous() for item in states), "as a later run reads it"
        if how == "halved":
            exchange_states(model, optimizer, how)  # in pages of a file that is complete
        train(model, optimizer, 0, range(2, 4))
        after.append(weights(model))
    assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())


@pytest.mark.parametrize("shape", [(3,), ()])
def test_the_state_that_an_optimizer_will_have(shape: tuple[int, ...]) -> None:
    """A scalar parameter has the shape of Adagrad's count of steps."""
    param = nn.Parameter(torch.ones(shape))
    keys = {name: whole_keys(cls([param], **arguments))[0] for name, (cls, arguments) in OPTIMIZERS.items()}
    assert keys == {
        "AdamW": ["exp_avg", "exp_avg_sq"],
        "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        "momentum": ["momentum_buffer"],
        "Adagrad": ["sum"],
        "Rprop": ["prev", "step_size"],
    }
