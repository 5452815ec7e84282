"""What one rank announces, with a stand-in for the other one, which sends what a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zc.config import Config
from zc.engine.announcements import Announcements
from zc.engine.ledger import Ledger
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat

pytestmark = pytest.mark.check


class Ranks:
    """Two ranks, of which the second sends what the first does, but for ``changed``: by byte from the end."""

    world_size, journal = 2, None

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.changed: dict[int, int] = {}

    def gather_on_host(self, rows: bytearray, row: bytes, text: str) -> Any:
        self.texts.append(text)
        rows[:] = row * 2
        for at, value in self.changed.items():
            rows[-at] = value
        return SimpleNamespace(wait=lambda: None)

    def record_call(self, *_: Any, **__: Any) -> None: ...

    def record_agreement(self) -> None: ...


class State:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.touched = plan, [[False] * len(bucket.slots) for bucket in plan.buckets]

    def touched_flags(self) -> bytes:
        return bytes(flag for flags in self.touched for flag in flags)


def announcements() -> tuple[Announcements, State, Ranks]:
    specs = [ParamSpec(name, (64,), torch.float32, torch.device("cpu")) for name in "abcd"]
    state, ranks = State(make_plan(specs, Config(bucket_nbytes=512), flat(2))), Ranks()
    core: Any = SimpleNamespace(accumulators=state, group=ranks, ledger=Ledger())
    return Announcements(core), state, ranks


def backward(made: Announcements, state: State, touched: bool = True) -> None:
    made.begin("hooks", None, frozenset(), is_boundary=True)
    for flags in state.touched:
        flags[:] = [touched] * len(flags)
    made.permission([0, 1])
    made.rest(())
    made.end(())


def test_a_proposal_names_the_parameters_of_todays_plan() -> None:
    """After zc.recompile a bucket may begin with another one's slot, and ranks must say the same, whatever each of them
    proposed last."""
    made, state, ranks = announcements()
    backward(made, state)
    first = state.plan.buckets[0].slots[0].name
    assert ranks.texts[0].startswith(f"reduce buckets 0 ({first}, ...), 1 (")
    state.plan = state.plan.without([first])
    backward(made, state)
    text = next(text for text in reversed(ranks.texts) if text.startswith("reduce"))
    assert f"({first}, " not in text and f"0 ({state.plan.buckets[0].slots[0].name}, " in text


def test_a_flag_of_another_rank_alone_is_seen() -> None:
    made, state, ranks = announcements()
    for flags in state.touched:
        flags[:] = [False] * len(flags)
    # from the end: whether a .grad was read, 2 buckets, 4 parameters
    ranks.changed = {4: 1}
    buckets, _ = made.boundary((), by_grad=False, is_last=True)
    assert not buckets and made.has_grad == [[False, False], [False, True]] == state.touched
    ranks.changed = {3: 1}
    buckets, _ = made.boundary((), by_grad=False, is_last=True)
    assert buckets == [0] and made.has_grad == [[False, False], [False, True]] == state.touched
    made.has_grad[0][0] = True
    assert state.touched[0] == [False, False], "two lists"
