"""Ranks that read each other's memory: what one of them does, taken from the code, and every order of two or three.

`steps_of` calls the exchanges of `zc.ranks` over links and a reader that only note what they are asked for. The code
has no branch there, so this list is what a rank does whatever the others do. `explore` runs the lists of all ranks in
every order, one step at a time. Between two exchanges a rank writes the buffer that the others read. What can go wrong:

- *late*: a message waits until its receiver takes it, while any other step may come first. As in `zc.ranks.neighbours`,
  messages of one key from one rank stay in order, and those of different keys don't wait for each other.
- *repeated*: it arrives twice, the second time at any time after. *lost*: it never arrives.
- *killed*: a rank ends between any two steps. What it has sent arrives; its memory can't be read any more, and who
  waits for its messages gets an error. A rank with an error stops: it writes and sends nothing more.

The idea of an explicit-state search: SPIN, IEEE TSE 23(5), 1997.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zc.ranks import neighbours
from zc.ranks.group import Group
from zc.ranks.journal import GATHER, REDUCE
from zc.ranks.routes import Memory

NUMEL = 6  # elements of a buffer: a part for each of 2 or 3 ranks
TORN = -1  # what a buffer holds while it is written


class Step(NamedTuple):
    """``kind``: write, send, receive or read, of rank ``peer``. ``number``: of the exchange."""

    kind: str
    peer: int
    key: int
    number: int


class Noting:
    """Links and a reader in one: note what is asked of them, and answer at once."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.peers = rank, tuple(r for r in range(num_ranks) if r != rank)
        self.steps: list[Step] = []
        self.number = 0

    def note(self, kind: str, peer: int, key: int = 0) -> None:
        self.steps.append(Step(kind, peer, key, self.number))

    def send(self, peer: int, key: int, payload: bytes) -> None:
        self.note("send", peer, key)

    def receive(self, peer: int, key: int, nbytes: int, seconds: float | None) -> bytes:
        self.note("receive", peer, key)
        return b"\0" if nbytes == 1 else neighbours._PLACE.pack(0, 4 * NUMEL)

    def read_into(self, out: int, pid: int, address: int, nbytes: int) -> None:
        self.note("read", pid)

    def write(self, buffer: torch.Tensor, number: int) -> None:
        self.note("write", self.rank)


def group_over(links: Any) -> Group:
    """A group of ranks of one host, over these links."""
    group = object.__new__(Group)
    group.rank, group.journal, group._keeps_journal, group._between = links.rank, None, False, ""
    group._nbytes_sent = Counter()
    group._neighbours = neighbours.Neighbours(links.rank, links, {peer: peer for peer in links.peers}, links)
    return group


Exchange = Callable[[Group, torch.Tensor, torch.Tensor], None]


def reduce(group: Group, buffer: torch.Tensor, out: torch.Tensor) -> None:
    """As `zc.ranks.routes.Memory.reduce`. ``out`` [ranks, n] <- this rank's part of all buffers."""
    route, num_ranks = Memory(group), len(group.neighbours.ranks)
    start = group.rank * NUMEL // num_ranks

    def take(places: Mapping[int, bytes]) -> None:
        for rows, first, stop in route.neighbours.rows(buffer, start, start + NUMEL // num_ranks, places):
            out[:, first:stop] = rows

    route.read_each_other(REDUCE, 0, buffer, take)


def gather(group: Group, buffer: torch.Tensor, out: torch.Tensor) -> None:
    """As `zc.ranks.routes.Memory.gather`."""
    route = Memory(group)

    def take(places: Mapping[int, bytes]) -> None:
        for peer, place in places.items():
            route.neighbours.read(out[peer], peer, place)

    route.read_each_other(GATHER, 0, buffer, take)


def whole(group: Group, buffer: torch.Tensor, out: torch.Tensor) -> None:
    """What is exchanged outside of schedules."""
    for step in group.neighbours.read_tensors(0, 0, {peer: out[peer] for peer in group.neighbours.peers}, buffer):
        assert step(None)


def run_rank(links: Any, exchange: Exchange, num_exchanges: int) -> Iterator[torch.Tensor]:
    """A rank's program: it writes its buffer and exchanges it, and so on, and writes it once more. Yields what it
    got."""
    group, num_ranks = group_over(links), len(links.peers) + 1
    buffer = torch.zeros(NUMEL)
    for number in range(num_exchanges):
        links.number = number
        links.write(buffer, number)
        out = torch.full((num_ranks, NUMEL // num_ranks if exchange is reduce else NUMEL), float(number))
        exchange(group, buffer, out)
        yield out
    links.number = num_exchanges
    links.write(buffer, num_exchanges)


def steps_of(rank: int, num_ranks: int, exchange: Exchange, num_exchanges: int = 2) -> list[Step]:
    links = Noting(rank, num_ranks)
    for _ in run_rank(links, exchange, num_exchanges):
        pass
    return links.steps


GOES, KILLED, STOPPED = range(3)
Message = tuple[int, int, int]  # to, from, key


class State(NamedTuple):
    at: tuple[int, ...]  # of each rank: its next step, and half a one while it writes
    memory: tuple[int, ...]  # the number of the exchange that its buffer has been written for; TORN
    fate: tuple[int, ...]
    messages: tuple[Message, ...]  # sorted
    repeats: int  # how many may still be repeated; lost; how many ranks may still be killed
    losses: int
    kills: int


class Found(NamedTuple):
    num_states: int
    wrong: str | None  # the first thing that is
    order: tuple[int, ...]  # the ranks in whose order


def explore(lists: Sequence[Sequence[Step]], *, repeats: int = 0, losses: int = 0, kills: int = 0) -> Found:
    """Runs all orders until one reads what it should not, or can't end. Where messages are lost, ranks may wait: the
    watch ends that."""
    num = len(lists)
    first = State((0,) * num, (TORN,) * num, (GOES,) * num, (), repeats, losses, kills)
    came: dict[State, tuple[State | None, int]] = {first: (None, -1)}
    todo = [first]

    def order(state: State | None) -> tuple[int, ...]:
        ranks: list[int] = []
        while state is not None:
            before, rank = came[state]
            ranks.append(rank)
            state = before
        return tuple(reversed(ranks[:-1]))

    while todo:
        state = todo.pop()
        ends = True
        for rank in range(num):
            for after in _after(state, rank, lists[rank]):
                if isinstance(after, str):
                    return Found(len(came), after, (*order(state), rank))
                ends = False
                if after not in came:
                    came[after] = (state, rank)
                    todo.append(after)
        waiting = [r for r in range(num) if state.fate[r] == GOES and state.at[r] < 2 * len(lists[r])]
        if ends and waiting and state.losses == losses:
            return Found(len(came), f"ranks {waiting} wait for ever", order(state))
        if KILLED not in state.fate and STOPPED in state.fate:
            return Found(len(came), "a rank has an error, and none was killed", order(state))
    return Found(len(came), None, ())


def _after(state: State, rank: int, steps: Sequence[Step]) -> Iterator[State | str]:
    """Every state that a step of ``rank`` leads to; a text where it reads what it should not."""
    at = state.at[rank]
    if state.fate[rank] != GOES or at >= 2 * len(steps):
        return
    step = steps[at // 2]
    next_ = state._replace(at=_with(state.at, rank, at + 2))
    if state.kills:
        yield state._replace(fate=_with(state.fate, rank, KILLED), kills=state.kills - 1)
    if step.kind == "write":
        done = at % 2
        yield state._replace(
            at=_with(state.at, rank, at + 1), memory=_with(state.memory, rank, step.number if done else TORN)
        )
    elif step.kind == "send":
        message = (step.peer, rank, step.key)
        yield next_._replace(messages=tuple(sorted((*state.messages, message))))
        if state.repeats:
            yield next_._replace(messages=tuple(sorted((*state.messages, message, message))), repeats=state.repeats - 1)
        if state.losses:
            yield next_._replace(losses=state.losses - 1)
    elif step.kind == "receive":
        message = (rank, step.peer, step.key)
        if message in state.messages:
            k = state.messages.index(message)
            yield next_._replace(messages=state.messages[:k] + state.messages[k + 1 :])
        elif state.fate[step.peer] != GOES:
            yield state._replace(fate=_with(state.fate, rank, STOPPED))
    elif state.fate[step.peer] == KILLED:
        yield state._replace(fate=_with(state.fate, rank, STOPPED))
    elif state.memory[step.peer] != step.number:
        yield f"rank {rank} reads buffer {state.memory[step.peer]} of rank {step.peer} in exchange {step.number}"
    else:
        yield next_


def _with(items: tuple[int, ...], k: int, item: int) -> tuple[int, ...]:
    return (*items[:k], item, *items[k + 1 :])
