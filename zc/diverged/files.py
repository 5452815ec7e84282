"""A rank's file: what it has called last, from which lines, where it stands and what it waits for.

When a RankMismatchError or a RankLostError comes, each rank writes ``rank-<r>.json``. The thread of the watch does so
where the program computes or hangs. A rank that ends by an error of its own writes at its end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from zc.errors import RankLostError, RankMismatchError, ZcError
from zc.ranks.journal import Journal, TrailEntry, frame_of_program
from zc.version import __version__

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime

FORMAT = "zc diverged 1"
NUM_EXCHANGES = 20  # of the model, the last ones


class Line(NamedTuple):
    """A line of the program."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}" if self.file else "(no line of the program)"


class Call(NamedTuple):
    """See `zc.ranks.journal.TrailEntry`."""

    number: int
    shared: bool
    model: str
    what: str
    line: Line
    times: int


class RankFile(NamedTuple):
    """``ranks``: those that train ``model``, the one that failed. ``run``: the same in all files of one process group.
    ``agreed``: the number of the last call on which all ranks had agreed. ``stands``: where the program stood."""

    rank: int
    run: str
    model: str
    ranks: Sequence[int]
    error: str
    stands: Line
    agreed: int
    calls: Sequence[Call]
    waits: Sequence[str]
    exchanges: Sequence[str]
    notes: Sequence[str]
    host: str = ""
    written: str = ""
    zc: str = __version__


def install(runtime: Runtime) -> None:
    """Lets the model's journal write this rank's file."""
    journal = runtime.group.journal
    if journal is not None:
        to_runtime, to_journal = weakref.ref(runtime), weakref.ref(journal)
        journal.report = _once(to_runtime, to_journal)


def _once(to_runtime: weakref.ref[Runtime], to_journal: weakref.ref[Journal]) -> Callable[[BaseException], str | None]:
    said: list[str] = []

    def report(error: BaseException) -> str | None:
        runtime, journal = to_runtime(), to_journal()
        if not said and runtime is not None and journal is not None:
            said.append(write(runtime, journal, error))
        return said[0] if said else None

    return report


def folder_of(run: str, dump_dir: str | Path | None) -> Path:
    """``ZC_DIVERGED_DIR``, or ``dump_dir``/diverged, or a folder for temporary files, the same for all ranks of a
    host."""
    named = os.environ.get("ZC_DIVERGED_DIR")
    if named:
        return Path(named)
    return Path(tempfile.gettempdir(), f"zc-diverged-{run}") if dump_dir is None else Path(dump_dir, "diverged")


def write(runtime: Runtime, journal: Journal, error: BaseException) -> str:
    """Writes this rank's file. Returns what to say of it. Raises nothing: the error that comes says more."""
    folder, rank = folder_of(journal.watch.run, runtime.config.dump_dir), journal.watch.rank
    try:
        fields = content(runtime, journal, error)._asdict()
        folder.mkdir(parents=True, exist_ok=True)
        making = folder / f".rank-{rank}.{os.getpid()}"
        making.write_text(json.dumps({"format": FORMAT, **fields}, indent=1))
        making.replace(folder / f"rank-{rank}.json")
    except Exception as why:  # noqa: BLE001
        return f"rank {rank} could not write its last calls into {folder}: {type(why).__name__}: {why}"
    return (
        f"the last calls of rank {rank} are in {folder}. `python -m zc diff {folder}` lays those of all ranks side by "
        "side"
    )


def content(runtime: Runtime, journal: Journal, error: BaseException) -> RankFile:
    trail = journal.watch.trail
    return RankFile(
        rank=journal.watch.rank,
        run=journal.watch.run,
        model=journal.name,
        ranks=journal.ranks,
        error=f"{type(error).__name__}: {error}",
        stands=_stands(error),
        agreed=trail.agreed,
        calls=[_call(entry, journal) for entry in list(trail.entries)],
        waits=[journal.words(wait.entry) for wait in list(journal.waits.values())],
        exchanges=[journal.words(entry) for entry in journal.record.entries[-NUM_EXCHANGES:]],
        notes=list(runtime.notes),
        host=socket.gethostname(),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _call(entry: TrailEntry, journal: Journal) -> Call:
    line = Line("", 0, "") if entry.code is None else Line(entry.code.co_filename, entry.line, entry.code.co_name)
    return Call(entry.number, entry.shared, entry.model, journal.words(entry.what), line, entry.times)


def _stands(error: BaseException) -> Line:
    """Where the program stands; after an error of its own, the line that raised it."""
    frames: list[tuple[FrameType, int]] = []
    traceback = None if isinstance(error, RankMismatchError | RankLostError) else error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    for frame, number in reversed(frames):
        if frame_of_program(frame) is frame:
            return Line(frame.f_code.co_filename, number, frame.f_code.co_name)
    found = frame_of_program(sys._current_frames().get(threading.main_thread().ident or 0))
    return Line("", 0, "") if found is None else Line(found.f_code.co_filename, found.f_lineno, found.f_code.co_name)


# --- reading ---


def read(folder: Path) -> list[RankFile]:
    """The files in ``folder``, by rank. Raises ZcError if there are fewer than two, or one is damaged or not of this
    run."""
    if not folder.is_dir():
        raise ZcError(f"{folder} is no folder: give the one that the note at the error names")
    files = [_read(path) for path in sorted(folder.glob("rank-*.json"))]
    if len(files) < 2:
        which = f"only rank {files[0].rank} has" if files else "no rank has"
        raise ZcError(
            f"{which} written a file into {folder}, and a difference takes two. With several hosts set "
            "ZC_DIVERGED_DIR to a folder that all of them see, or copy their files into one"
        )
    runs = {file.run: file.rank for file in files}
    if len(runs) > 1:
        (one, first), (other, second) = list(runs.items())[:2]
        raise ZcError(
            f"{folder} has files of several runs: rank {first}'s is of {one}, rank {second}'s of {other}. Remove "
            "those of the earlier one"
        )
    return sorted(files, key=lambda file: file.rank)


def _read(path: Path) -> RankFile:
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ZcError(f"{path} is no file of '{FORMAT}': remove it, or read it with the zc that has written it")
        calls = [Call(*call)._replace(line=Line(*call[4])) for call in fields.pop("calls")]
        file = RankFile(**{**fields, "calls": calls, "stands": Line(*fields["stands"])})
        if not all(isinstance(number, int) for number in (file.rank, file.agreed, *(c.number for c in calls))):
            raise TypeError("a number is none")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OSError) as error:
        raise ZcError(
            f"{path} is damaged ({type(error).__name__}: {error}): remove it, and the others are compared without it"
        ) from error
    return file
