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

    world_size = 2
    journal: Any = None

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.changed: dict[int, int] = {}
        self.compared: list[str] = []
        self.size = 0  # of a row

    def gather_on_host(self, rows: bytearray, row: bytes, text: str) -> Any:
        self.texts.append(text)
        self.size = len(row)
        rows[:] = row * 2
        for at, value in self.changed.items():
            rows[-at] = value
        return SimpleNamespace(wait=lambda: None)

    def record_call(self, *_: Any, **__: Any) -> None: ...

    def record_agreement(self) -> None: ...

    def same_everywhere(self, what: str, *_: Any) -> None:
        self.compared.append(what)


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


def test_gradients_that_are_dropped_one_by_one_are_all_gone_with_the_last_one() -> None:
    """Made zeros in a loop, twice: what other ranks have of this optimizer goes with the last one, and no earlier."""
    made, state, _ = announcements()
    backward(made, state)
    where = [(bucket, slot) for bucket in range(2) for slot in range(2)]
    assert [made.drop([each], set_to_none=False) for each in where * 2] == [[], [], [], [0]] * 2


def test_ranks_with_one_past_compare_no_texts_at_a_boundary() -> None:
    """Texts take another exchange; with different pasts it comes, and names them."""
    made, _, ranks = announcements()
    ranks.journal = SimpleNamespace(checksum=lambda: 7, lines=lambda: ["norm"], begin_update=lambda: None)
    made.boundary((), by_grad=False, is_last=True)
    assert not ranks.compared
    ranks.changed = {ranks.size - 4: 8}  # after 4 bytes of what is announced
    made.boundary((), by_grad=False, is_last=True)
    assert ranks.compared == ["what was exchanged since the last update"]
