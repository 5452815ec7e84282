"""Many programs in one job of the rank processes.

Each rank puts what it found into a file a program, so that a rank that hangs or dies costs one program: the driver
reads the files, and starts the next job after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import linecache
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fuzz_oracle
import fuzz_script
import torch
import torch._functorch.config
from fuzz_judge import Outcome, Verdict, is_refusal, judge
from fuzz_program import Program, suffix
from harness import RanksFailed, run_ranks

LIMIT_S = {"eager": 60.0, "aot_eager": 120.0, "inductor": 300.0}  # of one program: many times what it takes
GRACE_S = 20.0  # for the others, once a rank has failed
Item = tuple[str, str, str, float]  # its files, the folder of its checkpoints, its text, its limit


def verdicts(
    programs: Sequence[Program], side: str = "zc", *, prepare: str = "", a_job: int = 30
) -> Iterator[tuple[int, Verdict]]:
    """(index, verdict) of each, as they come. ``side``: "zc" or "ddp". ``prepare``: ``module.function``, called in each
    rank before the first program: a planted fault."""
    with tempfile.TemporaryDirectory(prefix="zc-fuzz-") as folder, ThreadPoolExecutor(1) as pool:
        wanted = {k: pool.submit(fuzz_oracle.run, program) for k, program in enumerate(programs)}  # while ranks run
        outcomes: list[list[list[Outcome | None]]] = [[] for _ in programs]  # by program, launch and rank
        going = set(range(len(programs)))
        for launch in range(max((len(program.launches) for program in programs), default=0)):
            left = [k for k in going if launch < len(programs[k].launches)]
            for k, seen_by_ranks, why in _launched(programs, left, launch, side, prepare, folder, a_job):
                outcomes[k].append(seen_by_ranks)
                is_last = launch + 1 == len(programs[k].launches)
                if is_last or any(outcome is None or outcome.error for outcome in seen_by_ranks):
                    going.discard(k)
                    yield k, judge(programs[k], outcomes[k], wanted.pop(k).result(), why)


def _launched(
    programs: Sequence[Program], left: list[int], launch: int, side: str, prepare: str, folder: str, a_job: int
) -> Iterator[tuple[int, list[Outcome | None], str]]:
    """One launch of the programs ``left``: number, outcomes by rank, and why some rank has none."""
    sizes = {k: programs[k].launches[launch].world_size for k in left}
    for world_size in sorted(set(sizes.values())):
        those = [k for k in left if sizes[k] == world_size]
        while those:
            now, those = those[:a_job], those[a_job:]
            while now:
                items = [_item(programs[k], k, launch) for k in now]
                why = _job(items, world_size, side, prepare, folder)
                for k in list(now):
                    outcomes = [_read(Path(folder, f"{k}.{launch}.{rank}")) for rank in range(world_size)]
                    is_first = items[0][0] == f"{k}.{launch}"
                    if all(outcome is None for outcome in outcomes) and not (why and is_first):
                        break  # not reached: the job ended after another program
                    now.remove(k)
                    yield k, outcomes, why
                    if any(outcome is None for outcome in outcomes):
                        break


def _item(program: Program, number: int, launch: int) -> Item:
    limit = max(LIMIT_S[part.backend] for part in program.parts) * len(program.parts)
    return f"{number}.{launch}", f"saved{number}", fuzz_script.body(program, launch), limit


def _job(items: Sequence[Item], world_size: int, side: str, prepare: str, folder: str) -> str:
    """Why it ended before its last program, if it did."""
    try:
        run_ranks(run_items, world_size, items, side, prepare, folder, timeout=sum(item[-1] for item in items) + 60)
    except RanksFailed as error:
        return str(error)
    return ""


def _read(path: Path) -> Outcome | None:
    return pickle.loads(path.read_bytes()) if path.exists() else None


# --- in a rank ---


def run_items(rank: int, world_size: int, items: Sequence[Item], side: str, prepare: str, folder: str) -> None:
    """Job."""
    os.environ["ZC_RANK_TIMEOUT"] = "10"
    with contextlib.ExitStack() as stack:
        if prepare:
            module, _, name = prepare.rpartition(".")
            stack.enter_context(getattr(__import__(module), name)())
        stack.callback(os.environ.pop, "ZC_RANK_TIMEOUT")
        stacks = stack.enter_context(open(Path(folder, f"stacks.{rank}"), "w"))
        for number, saved, text, limit in items:
            faulthandler.dump_traceback_later(limit, exit=True, file=stacks)  # a hang ends the process
            outcome = run_one(rank, world_size, text, side, f"{folder}/{saved}")
            _write(Path(folder, f"{number}.{rank}"), outcome)
            is_compiled = limit > LIMIT_S["eager"]
            _forget(is_compiled)
            _wait_for_all(number, world_size, folder, GRACE_S if outcome.error else limit)
            faulthandler.cancel_dump_traceback_later()
            everyone = [_read(Path(folder, f"{number}.{other}")) for other in range(world_size)]
            if any(one and one.error and not is_refusal(one.error) for one in everyone):
                return  # connections may be broken: the next program gets a group of its own


def run_one(rank: int, world_size: int, text: str, side: str, folder: str) -> Outcome:
    """Executes one program's text. Whatever it raises is an outcome."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    notes: dict[int, Any] = {}

    def note(k: int, value: Any) -> None:
        notes[k] = fuzz_oracle.copied(value)

    names: dict[str, Any] = {"os": os, "torch": torch, "dist": dist, "F": F, "nn": nn, "checkpoint": checkpoint}
    names.update(rank=rank, world_size=world_size, note=note, folder=folder)
    if side == "ddp":
        exec(fuzz_script.STANDIN, names)
        names["zc"] = names["WithDdp"]()
    else:
        import zc

        names["zc"] = zc
    linecache.cache["<program>"] = (len(text), None, text.splitlines(keepends=True), "<program>")  # for tracebacks
    error: tuple[str, str, str] | None = None
    weights: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(text, "<program>", "exec"), names)
            for part in filter(lambda part: f"model{part}" in names, map(suffix, range(4))):
                model = names[f"model{part}"]
                names["zc"].synchronize(model)
                with names["zc"].whole_parameters(model):
                    weights.update({part + name: p.detach().clone() for name, p in model.named_parameters()})
    except Exception as raised:  # noqa: BLE001  (the judge says which may be)
        trace = "".join(traceback.format_exception(raised)[-12:])
        error = type(raised).__name__, str(raised), trace
    finally:
        os.environ.pop("GROUP_RANK", None)
        names.clear()
    return Outcome(error, notes, weights)


def _write(path: Path, outcome: Outcome) -> None:
    unfinished = path.with_suffix(path.suffix + ".new")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.rename(path)


def _wait_for_all(number: str, world_size: int, folder: str, seconds: float) -> None:
    """Until every rank is through: what this one does next must not look like an answer to the others."""
    end = time.monotonic() + seconds
    missing = [Path(folder, f"{number}.{rank}") for rank in range(world_size)]
    while missing := [path for path in missing if not path.exists()]:
        if time.monotonic() > end:
            raise RuntimeError(f"program {number}: {[path.name for path in missing]} did not come in {seconds:.0f} s")
        time.sleep(0.002)


def _forget(is_compiled: bool) -> None:
    """Models, threads and compiled code of the last program go. Nothing is frozen, which would make a walk 0.1 s
    faster: a thread or an error may keep a model alive a little longer, and a frozen one would keep threads."""
    if is_compiled:
        torch._functorch.config.donated_buffer = True
        torch._dynamo.reset()
    for _ in range(2):  # the first frees models in cycles, or compiled graphs, and zc lets go of the rest only then
        gc.collect()
