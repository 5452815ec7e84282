"""Ranks that differ: a file per rank when it happens, and `python -m zc diff` to lay them side by side.

A rank's file has what it has called last, from which lines, where it stands and what it waits for. When a
RankMismatchError or a RankLostError comes, each rank writes ``rank-<r>.json``. The thread of the watch does so where
the program computes or hangs. A rank that ends by an error of its own writes at its end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zc.engine.agreement import BOUNDARY, END
from zc.errors import RankLostError, RankMismatchError, ZcError, some
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
        journal.report = partial(_report, weakref.ref(runtime), weakref.ref(journal), [])


def _report(
    to_runtime: weakref.ref[Runtime], to_journal: weakref.ref[Journal], said: list[str], error: BaseException
) -> str | None:
    """Writes the file once, and says the same ever after."""
    runtime, journal = to_runtime(), to_journal()
    if not said and runtime is not None and journal is not None:
        said.append(write(runtime, journal, error))
    return said[0] if said else None


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


# --- side by side ---

_COMMAND = """``python -m zc diff FOLDER``: the files of ranks that differ, side by side, and their first difference.

All ranks make each *shared* call, so its number says which call of another rank it belongs to. Announcements may
differ: ranks may have other branches, and other numbers of microbatches. So two things are told. **The first
difference** is the first call, since all ranks last agreed on an update, that some rank made otherwise or from another
line. **No way on** is from the first shared call that can't be matched, where that is another one.
"""
SAME, DIFFERENT, REFUSED = 0, 1, 2
WIDTH = 46  # characters of a column
MAX_COLUMNS = 4
T = TypeVar("T")


def run(arguments: Sequence[str]) -> int:
    """The exit status: 0 no difference, 1 a difference, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m zc diff", description=_COMMAND)
    parser.add_argument("folder", type=Path, help="where the ranks have written their files; the error has a note")
    parser.add_argument("--calls", type=int, default=12, help="the last calls to show")
    args = parser.parse_args(arguments)
    if args.calls < 1:
        parser.error(f"--calls must be at least 1, got {args.calls}")
    try:
        files = read(args.folder)
    except ZcError as error:
        print(f"zc diff refused: {error}", file=sys.stderr)
        return REFUSED
    text, is_different = report(files, args.calls)
    print(text)
    return DIFFERENT if is_different else SAME


def report(files: Sequence[RankFile], num_calls: int = 12) -> tuple[str, bool]:
    """The whole text, and whether there is a difference."""
    model = files[0].model
    one = [file for file in files if file.model == model]
    comparison = compare(one)
    absent = sorted(set(files[0].ranks) - {file.rank for file in one})
    lines = [f"{len(one)} of {len(files[0].ranks)} ranks, run {files[0].run}; {one[0].error.splitlines()[0]}", ""]
    lines += _table(one, comparison, num_calls)
    if comparison.first is None:
        lines.append("The calls of all these ranks are the same.")
    else:
        lines += _named("First difference", comparison.first, one)
    if comparison.no_way_on is not None and comparison.no_way_on != comparison.first:
        lines += _named("They can't go on", comparison.no_way_on, one)
    if absent:
        lines.append(f"No file of {span(absent)}: killed, or on a host that writes elsewhere (set ZC_DIVERGED_DIR).")
    lines += _standing(one)
    others = [file.rank for file in files if file.model != model]
    if others:
        lines.append(f"Not compared, since another model failed there first: {span(others)}.")
    return "\n".join(lines), comparison.first is not None or bool(absent)


def _named(title: str, difference: Difference, files: Sequence[RankFile]) -> Iterator[str]:
    stands = {file.rank: file.stands for file in files}
    yield f"{title}: call {difference.number}"
    for ranks, call, last in difference.behaviours:
        if call is not None:
            yield f"  {span(ranks)}: {_words(call)} at {call.line}"
            continue
        after = "" if last is None else f" after call {last.number} ({last.what}) at {last.line}"
        yield f"  {span(ranks)}: made no call{after}; stands at {stands[ranks[0]]}"
    yield ""


def _standing(files: Sequence[RankFile]) -> Iterator[str]:
    """Where ranks stand, what they wait for, and an error of their own."""
    texts = {
        file.rank: f"stands at {file.stands}" + (f", waits in: {some(file.waits)}" if file.waits else "")
        for file in files
    }
    for text, ranks in _grouped(texts):
        yield f"{span(ranks)}: {text}"
    errors = {file.rank: file.error for file in files if not file.error.startswith(("RankMismatch", "RankLost"))}
    for error, ranks in _grouped(errors):
        yield f"{span(ranks)}: ended by {error}"


def _grouped(by_rank: dict[int, T]) -> list[tuple[T, list[int]]]:
    """The ranks that have the same, in the order of the first ones."""
    result: dict[T, list[int]] = {}
    for rank, item in by_rank.items():
        result.setdefault(item, []).append(rank)
    return list(result.items())


def _table(files: Sequence[RankFile], comparison: Comparison, num_calls: int) -> Iterator[str]:
    """A column for ranks that did the same; the last calls before the first difference, and what came after it."""
    ways = {rank: tuple(map(_way, calls)) for rank, calls in comparison.windows.items()}
    groups = [ranks for _, ranks in _grouped(ways)]
    shown, left = groups[:MAX_COLUMNS], groups[MAX_COLUMNS:]
    columns = [comparison.windows[ranks[0]] for ranks in shown]
    rows = list(itertools.zip_longest(*columns))
    at = next((k for k, row in enumerate(rows) if len({_way(call) for call in row}) > 1), len(rows))
    first = max(0, min(at - num_calls // 2, len(rows) - num_calls))
    heads = [span(ranks) for ranks in shown]
    yield "  call  " + "  ".join(f"{head:{WIDTH}}" for head in heads).rstrip()
    for number, row in enumerate(rows[first : first + num_calls], first):
        mark = ">" if number == at else " "
        cells = [_cell(call) for call in row]
        first_call = next(call for call in row if call is not None)
        for k, parts in enumerate(itertools.zip_longest(*cells, fillvalue="")):
            label = f"{mark} {first_call.number:4}" if k == 0 else "      "
            yield (label + "  " + "  ".join(f"{part:{WIDTH}}" for part in parts)).rstrip()
    if left:
        yield f"  {len(left)} more ways to go, of {span(list(itertools.chain(*left)))}, are not shown"
    yield ""


def _cell(call: Call | None) -> list[str]:
    if call is None:
        return ["-"]
    place = f"{os.path.basename(call.line.file)}:{call.line.number} {call.line.function}" if call.line.file else ""
    return [*textwrap.wrap(_words(call), WIDTH, max_lines=2), f"  {place}"[:WIDTH]]


def _words(call: Call) -> str:
    return call.what + (f" ({call.times} times)" if call.times > 1 else "")


_ANNOUNCED = (BOUNDARY, END, "end a microbatch")


class Behaviour(NamedTuple):
    """What some ranks did; ``call`` None: they made no further one after ``last``."""

    ranks: tuple[int, ...]
    call: Call | None
    last: Call | None


class Difference(NamedTuple):
    """``number``: of the shared call, or of the one after it."""

    number: int
    behaviours: Sequence[Behaviour]


class Comparison(NamedTuple):
    """``windows``: by rank, the calls that were compared."""

    windows: dict[int, list[Call]]
    first: Difference | None
    no_way_on: Difference | None


def compare(files: Sequence[RankFile]) -> Comparison:
    """Of ranks that train one model."""
    start = min(file.agreed for file in files)
    # a rank that has made more calls than it keeps has lost the first ones
    kept = (file.calls[0].number for file in files if file.calls)
    start = max([start, *(number - 1 for number in kept)])
    windows = {file.rank: [call for call in file.calls if call.number > start] for file in files}
    shared = {rank: [call for call in calls if call.shared] for rank, calls in windows.items()}
    return Comparison(windows, _differ(windows, _way), _differ(shared, _meets))


def _way(call: Call | None) -> object:
    return call and (call.model, call.what, call.line, call.times)


def _meets(call: Call | None) -> object:
    """Equal for calls that other ranks can answer: all announcements are."""
    if call is None:
        return None
    return call.model, "" if call.what in _ANNOUNCED or call.what.startswith("reduce buckets") else call.what


def _differ(lists: dict[int, list[Call]], key: Callable[[Call | None], object]) -> Difference | None:
    for at in range(max(map(len, lists.values()), default=0)):
        found = _grouped({rank: key(calls[at] if at < len(calls) else None) for rank, calls in lists.items()})
        if len(found) > 1:
            behaviours = []
            for _, ranks in found:
                calls = lists[ranks[0]]
                call = calls[at] if at < len(calls) else None
                last = calls[min(at, len(calls)) - 1] if at and calls else None
                behaviours.append(Behaviour(tuple(ranks), call, last))
            number = min(each.call.number for each in behaviours if each.call is not None)
            return Difference(number, behaviours)
    return None


def span(ranks: Sequence[int]) -> str:
    """"rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
