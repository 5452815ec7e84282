"""The device finds what is taken out of zc (device_mutants.py), each in a process of its own."""

from __future__ import annotations

import contextlib

import pytest
from device_mutants import MUTANTS, SAMPLE, Mutant, train_mutated
from device_ranks import end_ranks, needs_device, run_on_device
from harness import RanksFailed
from tiers import FULL

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore")]


def test_each_mutant_changes_one_place() -> None:
    for mutant in MUTANTS:
        assert mutant.source.count(mutant.old) == 1, f"{mutant.name}: its text is not, or not once, in {mutant.module}"
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if FULL or m.name in SAMPLE], ids=lambda m: m.name)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    end_ranks()
    try:
        with (
            pytest.raises(RanksFailed, match="is recorded on") if mutant.shows == "error" else contextlib.nullcontext()
        ):
            seen = run_on_device(train_mutated, mutant.world_size, mutant)
    finally:
        end_ranks()
    if mutant.shows == "error":
        return
    if mutant.shows == "wait":
        assert all(each.waits for each in seen), seen
    else:
        assert any(each.races or each.is_wrong for each in seen), seen
