"""A range of a row-major tensor as boxes, against torch's own indexing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zc.checkpoint.shards import ShardOf, boxes


def test_the_picture_of_the_docstring() -> None:
    pairs = [(box.offsets, box.sizes) for box in boxes((4, 5), 3, 17)]
    assert pairs == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]


def test_a_tensor_without_dimensions() -> None:
    assert [(box.offsets, box.sizes) for box in boxes((), 0, 1)] == [((), ())]
    assert boxes((), 0, 0) == []


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_cover_the_range_once_and_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    seen: list[int] = []
    cover = boxes(shape, start, stop)
    for box in cover:
        region = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        seen += whole[region].reshape(-1).tolist()
    assert seen == list(range(start, stop))
    assert len(cover) <= max(1, 2 * len(shape) - 1)


@given(ranges(), st.data())
def test_boxes_of_another_memory_order(case: tuple[tuple[int, ...], int, int], data: st.DataObject) -> None:
    """Each box has the elements of the shard that lie in it, and they are written through it."""
    shape, start, stop = case
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    numbers = torch.arange(math.prod(shape)).reshape([shape[d] for d in order])
    whole = numbers.permute([order.index(d) for d in range(len(shape))])
    shard = ShardOf(shape, torch.arange(start, stop), start, order)
    seen: list[int] = []
    for box in shard.boxes:
        view = shard.view_of(box)
        assert torch.equal(view, whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))])
        seen += view.reshape(-1).tolist()
        view.fill_(-1)
    assert sorted(seen) == list(range(start, stop)) and bool((shard.local == -1).all())


def test_a_shard_refuses_arithmetic() -> None:
    shard = ShardOf((4, 5), torch.zeros(7), 3)
    with pytest.raises(TypeError, match=r"shape=\(4, 5\), elements=\[3, 10\)"):
        shard.sum()
