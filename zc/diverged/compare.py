"""Where the calls of ranks first differ.

All ranks make each *shared* call, so its number says which call of another rank it belongs to. Announcements may
differ: ranks may have other branches, and other numbers of microbatches. So two things are told. **The first
difference** is the first call, since all ranks last agreed on an update, that some rank made otherwise or from another
line. **No way on** is from the first shared call that can't be matched, where that is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zc.diverged.files import Call, RankFile
from zc.ranks.announcement import BOUNDARY, END

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
