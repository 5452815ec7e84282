"""Asynchronous saves; what is visible when; keep-N; extra."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from harness import run_ranks
from save_and_load import Job, joined, parts
from test_reshard import assert_same
from training_runs import message_of

import zc
from zc import machine
from zc.checkpoint import save_load
from zc.checkpoint.files import Reader, Unfinished, Writer
from zc.checkpoint.saving import Call, channel_of
from zc.ranks.group import Group
from zc.registry import sharded


def _async(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Trains on while the save is held up: what is written is the state at the call."""
    job = Job()
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 2)
    saved = parts(model, optimizer)
    saving = zc.save(path, model, optimizer, extra={"step": 2}, asynchronous=True)
    job.steps(model, optimizer, 2, 5)
    changed = parts(model, optimizer)
    saving.wait()
    visible = zc.latest(path.parent)
    zc.load(path, model, optimizer)
    return {"saved": saved, "changed": changed, "loaded": parts(model, optimizer), "visible": visible}


def test_an_asynchronous_save_holds_the_state_of_its_call(tmp_path: Path) -> None:
    results = run_ranks(_async, 2, tmp_path / "a")
    wanted = joined([rank["saved"] for rank in results])
    assert_same(joined([rank["loaded"] for rank in results]), wanted)
    changed = joined([rank["changed"] for rank in results])
    assert not any(torch.equal(changed[name], wanted[name]) for name in wanted), "training stood still"
    assert [rank["visible"] for rank in results] == [tmp_path / "a"] * 2


AT_THE_END = """
import sys
sys.path[:0] = sys.argv[2:]
from save_and_load import Job
import zc
zc.save(sys.argv[1], *Job("mlp").compiled(), asynchronous=True)
"""


def test_a_process_that_ends_ends_its_save(tmp_path: Path) -> None:
    """Nobody waits for it, and its thread is a daemon."""
    tests = Path(__file__).parents[1]
    folders = [str(tests / name) for name in ("checkpoint", "distributed", ".")]
    subprocess.run([sys.executable, "-c", AT_THE_END, str(tmp_path / "a"), *folders], check=True)
    assert zc.latest(tmp_path) == tmp_path / "a"


def test_who_has_waited_for_a_call_finds_its_thread_gone() -> None:
    """What it lets go of on its way out, it lets go of before the process may end."""
    let_go = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.3)
            let_go.append(True)

    go = threading.Event()  # once nobody but the thread holds it
    call = Call(partial(lambda plan: go.wait(), Slow()), torch.device("cpu"))
    go.set()
    assert call()
    assert let_go


def _failing(rank: int, world_size: int, path: Path) -> list[tuple[str, str]]:
    """The rename fails on rank 0, in the background: every rank hears of it, from `wait` or from the next save. Nobody
    keeps what the frames of its error have."""
    model, optimizer = Job("mlp").compiled()
    working = Unfinished.make_visible
    kept: list[weakref.ref[torch.Tensor]] = []

    def failing(*args: Any) -> None:
        kept.append(weakref.ref(held := torch.ones(1)))
        raise OSError(f"the disk is gone with {held}")

    texts = []
    for ask in (lambda s: s.wait(), lambda s: zc.save(path / "next", model, optimizer)):
        Unfinished.make_visible = failing
        saving = zc.save(path / "a", model, optimizer, asynchronous=True)
        texts.append(message_of(partial(ask, saving)))
        Unfinished.make_visible = working
    del saving
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)
    zc.save(path / "next", model, optimizer)
    return texts


def test_a_failed_asynchronous_save_is_heard_of(tmp_path: Path) -> None:
    for texts in run_ranks(_failing, 2, tmp_path):
        for kind, text in texts:
            assert kind == "CheckpointError"
            assert "rank 0" in text and "OSError: the disk is gone with" in text and str(tmp_path / "a") in text
    assert zc.latest(tmp_path) == tmp_path / "next"


def _at_once(rank: int, world_size: int, path: Path) -> None:
    model, optimizer = Job("mlp").compiled()

    def save(name: str) -> None:
        with contextlib.suppress(zc.RankMismatchError):  # where ranks' threads come in two orders
            zc.save(path / name, model, optimizer)

    inside, most, finish = list[str](), list[int](), save_load.finish_pending

    def slow(*args: Any) -> None:
        inside.append("a save")
        time.sleep(0.1)  # where the others would come in
        most.append(len(inside))
        inside.pop()
        finish(*args)

    threads = [threading.Thread(target=save, args=(str(k),)) for k in range(3)]
    with patch.object(save_load, "finish_pending", slow):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1, 1, 1]
    zc.save(path / "next", model, optimizer)


def test_threads_that_save_at_once_take_turns(tmp_path: Path) -> None:
    """gloo ended the process: one's collectives answered the other's."""
    run_ranks(_at_once, 2, tmp_path)
    assert zc.latest(tmp_path) == tmp_path / "next"


def _cut(rank: int, world_size: int, path: Path) -> list[str]:
    """A signal's handler raises while ranks wait, one of which writes or reads later than the other."""
    model, optimizer = Job("mlp").compiled()
    zc.save(path / "first", model, optimizer)
    channel, wait_for = channel_of(sharded(model)), Group.wait_for
    for cls, name, call in ((Writer, "write_data", zc.save), (Reader, "read_data", zc.load)):
        is_there, late = threading.Event(), getattr(cls, name)

        def slow(*args: Any, is_there: threading.Event = is_there, late: Any = late) -> Any:
            is_there.set()
            time.sleep(rank / 2)
            return late(*args)

        def raises(group: Group, call: Call, text: str, is_there: threading.Event = is_there) -> None:
            if call.is_done is not channel._last:
                return wait_for(group, call, text)
            is_there.wait()
            raise KeyboardInterrupt

        with patch.object(cls, name, slow), patch.object(Group, "wait_for", raises), pytest.raises(KeyboardInterrupt):
            call(path / ("cut" if call is zc.save else "first"), model, optimizer)
        call(path / "next", model, optimizer)
    return sorted(p.name for p in path.iterdir())


def test_what_a_signal_cuts_off_ends_before_the_next_call(tmp_path: Path) -> None:
    """Both ran at once, and answered each other's collectives: the second one hung."""
    assert run_ranks(_cut, 2, tmp_path, timeout=30) == [["cut", "first", "next"]] * 2


def _in_updates(rank: int, world_size: int, path: Path) -> list[tuple[str, str]]:
    """A signal's handler saves: inside of every rank's step; then inside of rank 0's, while rank 1 comes to its own."""
    job, texts = Job("mlp", lambda model: torch.optim.SGD(model.parameters(), lr=0.1)), list[tuple[str, str]]()
    model, optimizer = job.compiled()
    save, state = partial(zc.save, path / "a", model, optimizer), partial(zc.full_optimizer_state, model, optimizer)
    module = sys.modules[torch.optim.SGD.__module__]
    update = module.sgd
    for call, is_before in ((save, False), (state, False), (save, rank == 1)):

        def handles(*args: Any, call: Any = call, **kwargs: Any) -> None:
            update(*args, **kwargs)
            texts.append(message_of(call))

        hook = optimizer.register_step_pre_hook(lambda *_, at=is_before: texts.append(message_of(save)) if at else None)
        with patch.object(module, "sgd", update if is_before else handles):
            job.step(model, optimizer, 0)
        hook.remove()
    zc.save(path / "whole", model, optimizer)
    cut = Mock(side_effect=KeyboardInterrupt)  # Ctrl-C inside of rank 0's step, and before rank 1's
    hook = optimizer.register_step_pre_hook(cut if rank else lambda *_: None)
    with patch.object(module, "sgd", cut), pytest.raises(KeyboardInterrupt):
        job.step(model, optimizer, 0)
    hook.remove()
    optimizer.zero_grad()
    texts.append(message_of(save))
    zc.load(path / "whole", model, optimizer)
    texts.append(message_of(save))
    job.step(model, optimizer, 0)
    return texts


def test_a_save_inside_of_an_update_is_refused(tmp_path: Path) -> None:
    """The checkpoint had the weights of one update on some ranks, those of the next on others; it loaded."""
    for texts in run_ranks(_in_updates, 2, tmp_path):
        assert [kind for kind, _ in texts] == [*2 * ["ZcError"], *2 * ["RankMismatchError"], ""], texts
        assert "zc.save was called with update 1 of SGD begun and not done" in texts[0][1]
        assert "rank 0 has update 3 of SGD begun, rank 1 has update 2 of SGD done" in texts[2][1]


def _keep(rank: int, world_size: int, path: Path) -> tuple[list[str], dict[str, Any]]:
    model, optimizer = Job("mlp").compiled()
    for step in range(5):
        extra = {"step": step, "python": random.getstate(), "torch": torch.get_rng_state(), "rank": rank}
        zc.save(path / f"step_{step}", model, optimizer, extra=extra, keep=2)
    newest = zc.latest(path)
    assert newest is not None
    extra = zc.load(newest, model, optimizer)
    random.setstate(extra["python"])
    torch.set_rng_state(extra["torch"])
    return sorted(p.name for p in path.iterdir()), {"step": extra["step"], "rank": extra["rank"]}


def test_keep_and_extra(tmp_path: Path) -> None:
    (tmp_path / ".step_1.job.removed").mkdir()  # of a removal that was killed
    results = run_ranks(_keep, 2, tmp_path)
    assert results == [(["step_3", "step_4"], {"step": 4, "rank": rank}) for rank in range(2)]


def _dies(path: Path) -> None:
    """A save is begun, and its process ends without a word."""
    Unfinished(path, "dead", 0)
    os._exit(0)


def test_keep_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    """It removed the folder that another job was filling: 6 of 40 checkpoints of two jobs had no .metadata."""
    lives = Unfinished(tmp_path / "b", "other", 0)
    elsewhere = tmp_path / ".c.third.partial"
    elsewhere.mkdir()
    (elsewhere / "zc.owner").write_text("another machine")
    for name in ("a", "d"):
        process = multiprocessing.get_context("fork").Process(target=_dies, args=(tmp_path / name,))
        process.start()
        process.join()
        assert (tmp_path / f".{name}.dead.partial").is_dir()
    model, optimizer = Job("mlp").compiled()
    zc.save(tmp_path / "a", model, optimizer)  # the same name: what was left of it goes
    assert not (tmp_path / ".a.dead.partial").exists() and (tmp_path / ".d.dead.partial").exists()
    with pytest.warns(UserWarning, match="third.partial is an unfinished checkpoint that another machine made"):
        zc.save(tmp_path / "e", model, optimizer, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [lives.folder.name, elsewhere.name, "e"]

    zc.save(tmp_path / "b", model, optimizer)  # the name is free, and the other job comes too late
    (lives.folder / "file").write_bytes(b"1")
    with pytest.raises(zc.CheckpointError, match="another job has saved it in the meantime"):
        lives.make_visible({}, None)
    lives.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [elsewhere.name, "b", "e"]
    zc.load(tmp_path / "b", model, optimizer)


def _again(rank: int, world_size: int, path: Path, can_exchange: bool) -> list[str]:
    model, optimizer = Job("mlp").compiled()
    with pytest.MonkeyPatch.context() as patch:
        if not can_exchange:
            patch.setattr(machine, "_EXCHANGE", 1 << 30)  # refused, as by a file system without it
        for step in range(3):
            keep = 1 if step == 2 else None
            zc.save(path / "last", model, optimizer, extra={"step": step}, overwrite=step > 0, keep=keep)
            newest = zc.latest(path)
            assert newest is not None and zc.load(newest, model, optimizer) == {"step": step}
    said = message_of(lambda: zc.save(path / "last", model, optimizer))
    assert said[0] == "CheckpointError" and "overwrite=True" in said[1]
    said = message_of(lambda: zc.save(path / "other", model, optimizer, overwrite=True))
    assert said[0] == "CheckpointError" and "no checkpoint of zc's" in said[1]
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_same_name_again(can_exchange: bool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("the user's own")
    assert run_ranks(_again, 2, tmp_path, can_exchange) == [["last", "other"]] * 2
    assert (tmp_path / "other" / "notes").exists()


def test_names_change_places_at_once(tmp_path: Path) -> None:
    """Between two renames a killed process would leave nothing under the name; Linux's file systems need none."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", None)
        machine.swap_paths(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "other").exists() and (tmp_path / "other" / "one").exists()


def test_latest_counts_saves_and_reads_no_clock(tmp_path: Path) -> None:
    assert zc.latest(tmp_path / "nothing") is None
    for name in ("b", "a"):
        unfinished = Unfinished(tmp_path / name, "job", 0)
        for file in ("file", ".metadata"):
            (unfinished.folder / file).write_bytes(b"1234")
        assert zc.latest(tmp_path) != tmp_path / name, "visible before it is complete"
        unfinished.make_visible({}, None)
        unfinished.close()
    assert zc.latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / "file").write_bytes(b"123")
    with pytest.warns(UserWarning, match="a is passed over: file has 3 bytes, it was written with 4"):
        assert zc.latest(tmp_path) == tmp_path / "b"
    empty = Unfinished(tmp_path / "c", "job", 0)
    empty.make_visible({}, None)
    empty.close()
    with pytest.warns(UserWarning, match="c is no complete checkpoint .*metadata"):
        assert zc.latest(tmp_path) == tmp_path / "b"


def test_an_overwritten_link_is_gone_and_its_folder_stays(tmp_path: Path) -> None:
    """The link stayed under a hidden name, and the second save of its job raised NotADirectoryError there."""
    for name in ("real", "a", "a"):
        folder = Unfinished(tmp_path / name, "job", 0, overwrite=True)
        folder.make_visible({}, None)
        folder.close()
        if name == "real":
            (tmp_path / "a").symlink_to("real")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "real"] and not (tmp_path / "a").is_symlink()
