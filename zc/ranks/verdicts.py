"""What ranks publish in the store, and the verdicts on it: two journals differ, or all ranks wait for each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zc.ranks.journal import Journal, Record, Wait

FORWARDS = "with stage=3 or shard_frozen=True also the same forwards, those of an evaluation included"
JOIN = "Where ranks have different numbers of batches, use zc.join"


class Place(NamedTuple):
    """Where a rank waits: in an exchange of a model, by the name of its journal, or in a collective that the program
    has called, without a name. ``is_call``: see `zc.ranks.journal.Wait`."""

    journal: str
    words: str
    seconds: float
    is_call: bool


@dataclass(frozen=True)
class RankState:
    """What one rank publishes: of all its models, by the names of their journals."""

    beat: int = 0  # how often it has published
    records: Mapping[str, Record] = field(default_factory=dict)
    newest: Mapping[str, int] = field(default_factory=dict)  # by ranks: the number of their newest model
    waits: Sequence[Place] = ()
    has_raised: bool = False  # a backward has, and nothing of zc was called since

    @property
    def has_stopped(self) -> bool:
        """Whether the program has left a backward by an error, and is neither in zc nor in a collective since."""
        return self.has_raised and not self.waits

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> RankState:
        fields = json.loads(text)
        for name, (epoch, entries, *more) in fields["records"].items():
            fields["records"][name] = Record(epoch, [(kind, index) for kind, index in entries], *more)
        return RankState(**{**fields, "waits": [Place(*wait) for wait in fields["waits"]]})


def ranks_in(journal: str) -> list[int]:
    """The ranks that a journal's name consists of; none for a collective of the program's."""
    return [int(rank) for rank in journal.partition("/")[0].split("_")] if journal else []


def has_closed(journal: Journal, state: RankState) -> bool:
    """Whether a rank has closed or dropped this model. It may be late for zc.compile instead."""
    ranks, _, _ = journal.name.partition("/")
    return journal.name not in state.records and state.newest.get(ranks, 0) >= journal.number


def difference(journal: Journal, own_rank: int, rank: int, state: RankState) -> str | None:
    """The first exchange in which the journals of this rank and of ``rank`` differ."""
    mine, theirs = journal.record, state.records.get(journal.name)
    if theirs is None or theirs.epoch != mine.epoch:
        return None
    start = max(mine.folded, theirs.folded)  # entries that both can name
    pairs = zip(mine.entries[start - mine.folded :], theirs.entries[start - theirs.folded :], strict=False)
    for k, (here, there) in enumerate(pairs):
        if here != there:
            return (
                f"ranks are out of step: exchange {start + k + 1} since the last update is, on rank {rank}: "
                f"{journal.words(there)}; on rank {own_rank}: {journal.words(here)}. Let every rank make "
                "the same calls in the same order: clip_grad_norm_, reads of gradients, step, and loading of states; "
                + FORWARDS
            )
    return None


def late(journal: Journal, own_rank: int, states: Mapping[int, RankState], wait: Wait, seconds: float) -> str:
    """For the log of a rank that has waited for so long, and has no verdict."""
    ranks = ", ".join(str(rank) for rank in journal.ranks if not states[rank].waits)
    return (
        f"rank {own_rank} has waited for {seconds:.0f} s in {journal.words(wait.entry)}. Not in zc, but answering, "
        f"are ranks {ranks or '(none)'}: a rank computes, compiles or reads data, or its program has left the loop"
    )


def deadlock(states: Mapping[int, RankState], patience: float) -> tuple[list[str], str] | None:
    """The names of the journals and the text of a verdict; None without a deadlock.

    In a deadlock every rank waits in an exchange of zc's or in a collective that its program has called, and no
    exchange has all its ranks. It is one even if a rank has left the loop early and waits in a barrier. Ranks are late,
    not in a deadlock, while one of them computes, or has passed the boundary of an update before the others.
    """
    if not all(state.waits and min(place.seconds for place in state.waits) > patience for state in states.values()):
        return None
    exchanges = {rank: {(place.journal, place.words) for place in state.waits} for rank, state in states.items()}
    for name, words in {exchange for waits in exchanges.values() for exchange in waits}:
        if name and all((name, words) in exchanges[rank] for rank in ranks_in(name)):
            return None
    models = sorted({place.journal for state in states.values() for place in state.waits if place.journal})
    numbers = {name: f" (of model {name.partition('/')[2]})" for name in models if len(models) > 1}

    def words_of(rank: int) -> str:
        words = (place.words + numbers.get(place.journal, "") for place in states[rank].waits)
        return ", ".join(dict.fromkeys(words))

    where = "; ".join(f"rank {rank} stands in {words_of(rank)}" for rank in sorted(states))
    raised = [str(rank) for rank in sorted(states) if states[rank].has_raised]
    if raised:
        advice = (
            f"A backward raised on rank {', '.join(raised)}, and other ranks wait for its reductions: call "
            "optimizer.zero_grad() there before the next collective"
        )
    else:
        advice = _advice(place for state in states.values() for place in state.waits)
    return models, f"ranks are out of step, for {patience:.0f} s now: {where}. {advice}"


def _advice(places: Iterable[Place]) -> str:
    calls = sorted({(place.journal, place.words) for place in places if place.is_call})
    if not calls:
        return f"Let all ranks run the same backwards and updates, in one order; {FORWARDS}. {JOIN}"
    advice = f"Every rank must make this call, or none: {', '.join(words for _, words in calls)}"
    return advice if all(name for name, _ in calls) else f"{advice}. {JOIN}"
