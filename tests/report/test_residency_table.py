"""`zc.plan` of stage 3 says what a forward and backward gather and free, within weight_nbytes."""

from __future__ import annotations

import pytest
from torch import nn

import zc

pytestmark = pytest.mark.check


def test_what_a_pass_gathers_and_frees_is_a_table() -> None:
    """Three buckets of 16 KiB in 32 KiB: one is read and the next one is on its way."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    estimate = zc.plan(model, world_size=2, stage=3, bucket_nbytes=2**14, weight_nbytes=2**15)
    full, half = "|########################|", "|############            |"
    assert estimate.residency.splitlines() == [
        "at most 32,768 bytes of gathered weights at a time; weight_nbytes allows 32,768",
        "  use  reads          gathered before it     freed before it    bytes there",
        f"    0  2              2, 1                   -                         32,768 {full}",
        f"    1  1              0                      2                         32,768 {full}",
        f"    2  0              -                      -                         32,768 {full}",
        f"    3  0              -                      -                         32,768 {full}",
        f"    4  1              2                      0                         32,768 {full}",
        f"    5  2              -                      1                         16,384 {half}",
        "  end  -              -                      2                              0 |                        |",
    ]
    assert estimate.residency in str(estimate)


def test_other_stages_have_none_and_a_small_cap_names_the_smallest_one() -> None:
    model = nn.Linear(64, 64, bias=False)
    assert zc.plan(model, world_size=2, stage=2).residency == ""
    with pytest.raises(zc.PlanError, match=r"weight_nbytes=8192 is too small.* at least weight_nbytes=16384"):
        zc.plan(model, world_size=2, stage=3, weight_nbytes=2**13, bucket_nbytes=2**14)
