"""Bits of two checkouts: what counts as a difference, which cases words choose, and one real launch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bits

FINE = {"losses": ["a", "b"], "norms": ["c"], "weights": "d"}


def recorded(**cases: dict[str, Any]) -> dict[str, Any]:
    return {"arithmetic": {"sum": "x"}, "cases": {name.replace("_", " "): case for name, case in cases.items()}}


def test_a_digest_sees_each_bit_and_what_it_belongs_to() -> None:
    base = torch.tensor([0.0, 1.0, 2.0, 3.0])
    seen = {
        bits.digest(value)
        for value in (
            base, torch.tensor([-0.0, 1.0, 2.0, 3.0]), base.view(2, 2), base.bfloat16(), base.nextafter(base + 1),
            base.flip(0), base.flip(0)[:3],
        )
    }  # fmt: skip
    assert len(seen) == 7
    assert bits.digest(base.view(2, 2).T) == bits.digest(base.view(2, 2).T.contiguous()), "of values, not of memory"
    assert bits.flattened({"b": [1, {"c": None}], 3: (2,)}) == ["3", 2, "b", 1, "c", None]


def test_what_is_different_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"refused": "PlanError", "why": "of then"}
    first = recorded(a=FINE, b=FINE, c=refused, d=refused, e=FINE)
    other_words = {"refused": "PlanError", "why": "of now"}
    second = recorded(a=FINE, b={**FINE, "losses": ["a", "B"]}, c=FINE, d=other_words, f=FINE)
    for name, content in (("first", first), ("second", second), ("few", recorded(a=FINE))):
        (tmp_path / name).write_text(json.dumps(content))
    assert bits.main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "different: b: losses", "different: c: losses, norms, refused, weights; PlanError (of then)",
        "missing in the second: e", "missing in the first: f", "2 equal, 2 different, 2 missing",
    ]  # fmt: skip
    assert bits.main(["compare", str(tmp_path / "first"), str(tmp_path / "few")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 equal, 0 different, 4 missing"


def test_words_choose_cases() -> None:
    """Words of one kind are alternatives; the matrix has all that issue 45 names."""
    names = {case.name for case in bits.chosen_cases(["eager", "stage2", "stage3", "offload", "int8"])}
    assert names == {f"eager hosts int8 offload mixer stage{stage}" for stage in (2, 3)}
    every = list(bits.every_case())
    assert len({case.name for case in every}) == len(every)
    for backend in bits.BACKENDS:
        for way in bits.EVERYWHERE:
            seen = {(case.stage, case.wire) for case in every if case[:4] == (backend, "hosts", case.wire, way)}
            assert seen >= set(itertools.product(("stage1", "stage2", "stage3"), ("exact", "int8", "int4")))
            places = {case.place for case in every if case.backend == backend and case.way == way}
            assert places >= ({"memory4", "messages4"} if way == "hsdp" else {"memory", "messages"})
    with pytest.raises(ValueError, match="no case has stage4; words are"):
        bits.chosen_cases(["eager", "stage4"])


def test_a_launch_of_two_cases(tmp_path: Path) -> None:
    """Where accumulation ends makes no bit of a difference in stage 2; a seed does."""
    out = tmp_path / "out.json"
    assert bits.main(["record", str(out), "eager", "messages", "exact", "plain", "no_sync", "mixer", "stage2"]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert list(cases) == [f"eager messages exact {way} mixer stage2" for way in ("no_sync", "plain")]
    first, second = cases.values()
    assert first == second
    assert len(set(first["losses"])) == len(set(first["norms"])) == bits.UPDATES
    assert {"losses", "norms", "gradients", "masters", "states", "weights", "buffers"} == first.keys()
