"""``python -m zc diff FOLDER``: the files of ranks that differ, side by side, and their first difference.

All ranks make each *shared* call, so its number says which call of another rank it belongs to. Announcements may
differ: ranks may have other branches, and other numbers of microbatches. So two things are told. **The first
difference** is the first call, since all ranks last agreed on an update, that some rank made otherwise or from another
line. **No way on** is from the first shared call that can't be matched, where that is another one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zc.diverged.files import Call, RankFile, read
from zc.engine.announcements import BOUNDARY, END
from zc.errors import ZcError, some

SAME, DIFFERENT, REFUSED = 0, 1, 2
WIDTH = 46  # characters of a column
MAX_COLUMNS = 4


def run(arguments: Sequence[str]) -> int:
    """The exit status: 0 no difference, 1 a difference, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m zc diff", description=__doc__)
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


def _grouped(texts: dict[int, str]) -> list[tuple[str, list[int]]]:
    result: dict[str, list[int]] = {}
    for rank, text in texts.items():
        result.setdefault(text, []).append(rank)
    return list(result.items())


def _table(files: Sequence[RankFile], comparison: Comparison, num_calls: int) -> Iterator[str]:
    """A column for ranks that did the same; the last calls before the first difference, and what came after it."""
    groups = alike(comparison.windows)
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
    """Equal for calls that other ranks can answer."""
    return call and (call.model, "" if is_announcement(call) else call.what)


def is_announcement(call: Call) -> bool:
    return call.what in _ANNOUNCED or call.what.startswith("reduce buckets")


def _differ(lists: dict[int, list[Call]], key: Callable[[Call | None], object]) -> Difference | None:
    for at in range(max(map(len, lists.values()), default=0)):
        found: dict[object, list[int]] = {}
        for rank, calls in lists.items():
            found.setdefault(key(calls[at] if at < len(calls) else None), []).append(rank)
        if len(found) > 1:
            behaviours = []
            for ranks in found.values():
                calls = lists[ranks[0]]
                call = calls[at] if at < len(calls) else None
                last = calls[min(at, len(calls)) - 1] if at and calls else None
                behaviours.append(Behaviour(tuple(ranks), call, last))
            number = min(each.call.number for each in behaviours if each.call is not None)
            return Difference(number, behaviours)
    return None


def alike(windows: dict[int, list[Call]]) -> list[list[int]]:
    """The ranks in groups that made the same calls."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, calls in windows.items():
        groups.setdefault(tuple(map(_way, calls)), []).append(rank)
    return list(groups.values())


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
