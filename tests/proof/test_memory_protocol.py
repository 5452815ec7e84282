"""Ranks that read each other's memory, in every order: none reads what another one writes, and none waits for ever."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections.abc import Sequence

import pytest
import torch
from memory_protocol import Exchange, Noting, Step, explore, gather, reduce, run_rank, steps_of, whole
from tiers import FULL

from zc.ranks import neighbours

pytestmark = pytest.mark.check
EXCHANGES: list[Exchange] = [reduce, gather, whole]


def lists_of(exchange: Exchange, num_ranks: int, num_exchanges: int = 2) -> list[list[Step]]:
    return [steps_of(rank, num_ranks, exchange, num_exchanges) for rank in range(num_ranks)]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_order_is_right(exchange: Exchange, num_ranks: int) -> None:
    """Two exchanges in a row, of one buffer. Messages are late in all; then one is repeated, or lost, or a rank ends at
    any point, or two of these."""
    lists = lists_of(exchange, num_ranks)
    assert sum(step.kind == "read" for step in lists[0]) == 2 * (num_ranks - 1)
    harms = [{}, {"repeats": 1}, {"losses": 1}, {"kills": 1}, {"kills": 1, "repeats": 1}, {"repeats": 2}]
    for harm in harms if num_ranks == 2 or FULL else harms[:4]:
        found = explore(lists, **harm)
        print(f"{exchange.__name__}, {num_ranks} ranks, {harm}: {found.num_states} states")
        assert found.wrong is None, f"{harm}: {found}"


def without_numbers(step: Step) -> Step:
    return step._replace(key=step.key & ~((1 << 48) - (1 << neighbours._INDEX_BITS)))


def test_signals_are_numbered_because_messages_may_be_repeated() -> None:
    lists = [[without_numbers(step) for step in steps] for steps in lists_of(reduce, 2)]
    assert explore(lists).wrong is None
    assert "reads" in (explore(lists, repeats=1).wrong or "")


def phases(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps in a row that belong together: the sends of one signal, say."""
    return [list(group) for _, group in itertools.groupby(steps, key=lambda s: (s.kind, s.key))]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_signal_and_every_wait_is_needed(exchange: Exchange, num_ranks: int) -> None:
    """One of them left out, or later by one, on all ranks: a wrong read, or ranks that wait for ever."""
    by_rank = [phases(steps) for steps in lists_of(exchange, num_ranks)]
    wrong: dict[str, str] = {}
    for k in range(len(by_rank[0]) - 1):
        dropped = [[*each[:k], *each[k + 1 :]] for each in by_rank]
        later = [[*each[:k], each[k + 1], each[k], *each[k + 2 :]] for each in by_rank]
        for name, edited in (("dropped", dropped), ("later", later)):
            found = explore([list(itertools.chain(*each)) for each in edited])
            what = by_rank[0][k][0]
            if what.kind in ("send", "receive"):
                assert found.wrong is not None, f"{what} {name} is right in every order"
                wrong[f"{k} {what.kind} {name}"] = found.wrong
    assert len(wrong) == 2 * 8 - (by_rank[0][-1][0].kind == "receive")
    assert any("reads" in text for text in wrong.values()) and any("wait for ever" in text for text in wrong.values())


class Scripted(Noting):
    """Links and a reader that do each step when it is this rank's turn."""

    def __init__(self, rank: int, lists: Sequence[Sequence[Step]], script: Script) -> None:
        super().__init__(rank, len(lists))
        self.script = script

    def note(self, kind: str, peer: int, key: int = 0) -> None:
        self.script.wait_for(self.rank, Step(kind, peer, key, self.number))

    def send(self, peer: int, key: int, payload: bytes) -> None:
        super().send(peer, key, payload)
        self.script.messages.setdefault((peer, self.rank, key), []).append(payload)
        self.script.end()

    def receive(self, peer: int, key: int, nbytes: int, seconds: float | None) -> bytes:
        self.note("receive", peer, key)
        payload = self.script.messages[self.rank, peer, key].pop(0)
        self.script.end()
        return payload

    def read_into(self, out: int, pid: int, address: int, nbytes: int) -> None:
        super().read_into(out, pid, address, nbytes)
        theirs = self.script.buffers[pid]
        assert theirs.data_ptr() <= address and address + nbytes <= theirs.data_ptr() + theirs.nbytes
        ctypes.memmove(out, address, nbytes)
        self.script.end()

    def write(self, buffer: torch.Tensor, number: int) -> None:
        super().write(buffer, number)
        self.script.buffers[self.rank] = buffer.fill_(10.0 * number + self.rank)
        self.script.end()


class Script:
    """The steps of all ranks in one order. Each waits until it is its turn, and is compared with the model's."""

    def __init__(self, order: Sequence[tuple[int, Step]]) -> None:
        self.order, self.at = order, 0
        self.changed = threading.Condition()
        self.messages: dict[tuple[int, int, int], list[bytes]] = {}
        self.buffers: dict[int, torch.Tensor] = {}

    def wait_for(self, rank: int, step: Step) -> None:
        with self.changed:
            has_turn = self.changed.wait_for(lambda: self.order[self.at][0] == rank, 60)
        assert has_turn, f"{step} of rank {rank} never has its turn"
        assert self.order[self.at][1] == step, f"the code does {step}, the model {self.order[self.at][1]}"

    def end(self) -> None:
        with self.changed:
            self.at += 1
            self.changed.notify_all()


def any_order(lists: Sequence[Sequence[Step]], rng: random.Random) -> list[tuple[int, Step]]:
    """An order that the model allows."""
    at, sent, order = [0] * len(lists), set[tuple[int, int, int]](), list[tuple[int, Step]]()
    while True:
        ready = []
        for rank, steps in enumerate(lists):
            if at[rank] < len(steps):
                step = steps[at[rank]]
                if step.kind != "receive" or (rank, step.peer, step.key) in sent:
                    ready.append((rank, step))
        if not ready:
            return order
        rank, step = rng.choice(ready)
        if step.kind == "send":
            sent.add((step.peer, rank, step.key))
        at[rank] += 1
        order.append((rank, step))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_code_runs_in_these_orders(exchange: Exchange, num_ranks: int) -> None:
    """The real classes on threads, step by step in orders of the model, with real memory: each reads what it should."""
    lists = lists_of(exchange, num_ranks)
    for seed in range(100 if FULL else 20):
        script = Script(any_order(lists, random.Random(seed)))
        got: dict[int, list[torch.Tensor]] = {}

        def run(rank: int, script: Script = script, got: dict[int, list[torch.Tensor]] = got) -> None:
            got[rank] = list(run_rank(Scripted(rank, lists, script), exchange, 2))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert script.at == len(script.order) and len(got) == num_ranks
        for rank, outs in got.items():
            for number, out in enumerate(outs):
                for peer in (r for r in range(num_ranks) if r != rank or exchange is reduce):
                    assert (out[peer] == 10.0 * number + peer).all(), (seed, rank, number, peer)
