"""What the published states of ranks say: whether two journals differ, and whether all ranks stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zc.ranks.journal import Journal

FORWARDS = "with stage=3 or shard_frozen=True also the same forwards, those of an evaluation included"
JOIN = "Where ranks have different numbers of batches, use zc.join"
State = Mapping[str, Any]  # as zc/ranks/watch.py publishes it
_Places = dict[tuple[str, str], tuple[float, bool]]  # (model's journal, exchange) -> seconds, whether it is a call


def ranks_in(name: str) -> list[int]:
    """Of a journal's name, which is empty for a collective of the program's."""
    return [int(rank) for rank in name.partition("/")[0].split("_")] if name else []


def has_closed(journal: Journal, state: State) -> bool:
    """Whether a rank has closed or dropped this model. It may be late for zc.compile instead."""
    ranks, _, _ = journal.name.partition("/")
    is_open = journal.name in state.get("records", {})
    return not is_open and int(state.get("newest", {}).get(ranks, 0)) >= journal.number


def difference(journal: Journal, own: int, rank: int, state: State) -> str | None:
    """The first exchange in which the journals of the ranks ``own``, this one, and ``rank`` differ."""
    mine, fields = journal.record, state.get("records", {}).get(journal.name)
    theirs = None if fields is None else type(mine)(*fields)
    if theirs is None or theirs.epoch != mine.epoch:
        return None
    start = max(mine.folded, theirs.folded)  # entries that both can name
    pairs = zip(mine.entries[start - mine.folded :], theirs.entries[start - theirs.folded :], strict=False)
    for k, (here, (kind, index)) in enumerate(pairs):
        if here != (kind, index):
            return (
                f"ranks are out of step: exchange {start + k + 1} since the last update is, on rank {rank}: "
                f"{journal.words((kind, index))}; on rank {own}: {journal.words(here)}. Let every rank make "
                "the same calls in the same order: clip_grad_norm_, reads of gradients, step, and loading of states; "
                + FORWARDS
            )
    return None


def deadlock(states: Mapping[int, State], patience: float) -> tuple[list[str], str] | None:
    """The names of the journals and the text of a verdict, or None.

    A deadlock: every rank stands in an exchange of zc's, or in a collective that its program has called, and no
    exchange has all its ranks. A rank that has left the loop early and stands in a barrier is no reason to wait, nor is
    one that has passed the boundary of an update at which the others have yet to arrive.
    """
    places: dict[int, _Places] = {}
    for rank, state in states.items():
        places[rank] = {(name, words): (seconds, call) for name, words, seconds, call in state.get("waits", [])}
    if not all(at and min(seconds for seconds, _ in at.values()) > patience for at in places.values()):
        return None
    everywhere = {place for at in places.values() for place in at}
    if any(name and all((name, words) in places[r] for r in ranks_in(name)) for name, words in everywhere):
        return None
    models = sorted({name for name, _ in everywhere if name})

    def words_of(rank: int) -> str:
        numbers = {name: f" (of model {name.partition('/')[2]})" for name in models if len(models) > 1}
        return ", ".join(words + numbers.get(name, "") for name, words in places[rank])

    where = "; ".join(f"rank {rank} stands in {words_of(rank)}" for rank in sorted(places))
    raised = [str(rank) for rank in sorted(states) if states[rank].get("has_raised")]
    advice = _advice(places.values())
    if raised:
        advice = (
            f"A backward raised on rank {', '.join(raised)}, and other ranks wait for its reductions: call "
            "optimizer.zero_grad() there before the next collective"
        )
    text = f"ranks are out of step, for {patience:.0f} s now: {where}. {advice}"
    return models, text


def _advice(places: Iterable[_Places]) -> str:
    calls = sorted({(name, words) for at in places for (name, words), (_, is_call) in at.items() if is_call})
    if not calls:
        same = "Let all ranks run the same backwards and updates, in one order"
        return f"{same}; {FORWARDS}. {JOIN}"
    every = f"Every rank must make this call, or none: {', '.join(words for _, words in calls)}"
    return every if all(name for name, _ in calls) else f"{every}. {JOIN}"
