"""bench.weight_turns sees the bytes that a plan asks for, and says what two checkouts have not alike."""

from __future__ import annotations

import pytest
from tiers import full_only

from bench.measure import ROOT
from bench.weight_turns import BLOCKS, VOCAB, WIDTH, compared, run

TURN = {"persistent": 1000, "transient": 500, "graphs": 3, "frames": 4, "breaks": 0, "first_ms": 9.0, "step_ms": 1.0}


@pytest.mark.parametrize(
    ("way", "backend", "nbytes"),
    [("stage 3", "eager", 12 / 2), pytest.param("stage 3", "aot_eager", 12 / 2, marks=full_only),
     pytest.param("overlap_gather", "eager", 4 + 8 / 2, marks=full_only)],
)
def test_bytes_between_two_steps(way: str, backend: str, nbytes: float) -> None:
    """Of two ranks, fp32, a parameter: weights and Adam's moments, in shards or the weights whole."""
    block = 2 * WIDTH + (WIDTH + 1) * 4 * WIDTH + (4 * WIDTH + 1) * WIDTH
    num_params = BLOCKS * block + VOCAB * WIDTH + 2 * WIDTH + (WIDTH + 1) * VOCAB
    seen = run(ROOT, way, 2, backend)
    assert seen["persistent"] == pytest.approx(nbytes * num_params, rel=0.02)
    assert seen["transient"] > 4 * num_params / 2, "a rank's gradients, at least"
    assert (seen["graphs"] > 1) == (seen["frames"] > 1) == (backend != "eager") and seen["breaks"] == 0, seen


@pytest.mark.parametrize(
    ("key", "value", "is_alike"),
    [("persistent", 1009, True), ("persistent", 1011, False), ("transient", 511, False), ("graphs", 4, False),
     ("breaks", 1, False), ("first_ms", 90.0, True), ("step_ms", 2.0, True)],
)  # fmt: skip
def test_what_is_alike(key: str, value: float, is_alike: bool) -> None:
    """The largest of a count, and the median of a time."""
    lines, found = compared([TURN, {**TURN, key: value}, TURN], [TURN] * 3)
    assert found == is_alike
    assert [key in line for line in lines if "NOT ALIKE" in line] == [True] * (not is_alike)
