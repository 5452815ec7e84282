"""zc/planning/layout.py: every element of every parameter has one place and one owner, for any shapes and any number of
ranks.

A layout that overlapped, or an element that two ranks own or none, would train wrong numbers without an error, and
only for some shapes and world sizes: so the properties are tested over drawn ones, and two layouts are written out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zc.planning.layout import FlatLayout, Slot, flat_layout
from zc.planning.ownership import assign, elements

pytestmark = pytest.mark.check

Shapes = list[tuple[str, tuple[int, ...]]]


def owners_of(shapes: Shapes, world_size: int) -> dict[str, int]:
    return assign(shapes, elements, world_size, {})


def whole(shapes: Shapes, world_size: int, align: int) -> FlatLayout:
    return flat_layout(shapes, world_size, align, owners=owners_of(shapes, world_size))


LAYOUTS = [flat_layout, whole]

dims = st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 31, 64, 65]), max_size=3).map(tuple)
shapes_of = st.lists(dims, min_size=1, max_size=8).map(lambda shapes: [(f"p{k}", s) for k, s in enumerate(shapes)])
world_sizes = st.one_of(st.sampled_from([1, 2, 3, 4, 7, 8, 4095, 4096]), st.integers(1, 4096))
aligns = st.sampled_from([1, 16, 32, 64, 128])


def check_slots(layout: FlatLayout, shapes: Shapes, align: int) -> None:
    """Each parameter once, in its shape; slots ascending, disjoint, aligned, inside [0, P)."""
    assert sorted((s.name, s.shape) for s in layout.slots) == sorted(shapes)
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end, f"{slot.name} at {slot.offset} overlaps what ends at {end}"
        assert slot.offset % align == 0
        assert slot.numel == math.prod(slot.shape) == slot.stop - slot.offset
        end = slot.stop
    assert end <= layout.numel_padded


def check_ranks(layout: FlatLayout, align: int) -> None:
    """The ranks' ranges tile [0, P) in order, in equal aligned parts, and their parts of a slot tile the slot."""
    assert layout.numel_shard * layout.world_size == layout.numel_padded
    assert layout.numel_shard % align == 0, "a shard that starts unaligned can't be read with wide loads"
    assert layout.numel_shard > 0
    position = 0
    for rank in range(layout.world_size):
        start, stop = layout.shard_range(rank)
        assert (start, stop - start) == (position, layout.numel_shard)
        position = stop
    assert position == layout.numel_padded
    parts = ((layout.owned, layout.owned_range), (layout.in_shard, layout.shard_range))
    for part, range_of in parts:
        for slot in layout.slots:
            position = slot.offset
            for rank in range(layout.world_size):
                first, stop = part(slot, rank)
                low, high = range_of(rank)
                assert low <= first <= stop <= high, "a rank owns nothing outside its range"
                if first < stop:
                    assert first == position, (
                        f"rank {rank} owns {slot.name} from {first}, the ranks before end at {position}"
                    )
                    position = stop
            assert position == slot.stop


def check_runs(layout: FlatLayout) -> None:
    """What leaves a shard for its owners is what owners take from shards; runs tile all slots, each to one owner."""
    position = 0
    for start, stop in layout.runs.values():
        assert start == position < stop
        position = stop
    assert position == max((slot.stop for slot in layout.slots), default=0)
    ranks = range(layout.world_size) if layout.world_size < 10 else sorted({*layout.runs, 0, layout.world_size - 1})
    for rank in ranks:
        pieces = layout.of_shard(rank)
        assert [p[1] for p in pieces[1:]] == [p[2] for p in pieces[:-1]], "pieces of a shard follow each other"
        for owner, start, stop in pieces:
            assert (rank, start, stop) in layout.of_run(owner)
        pieces = layout.of_run(rank)
        assert [p[1] for p in pieces[1:]] == [p[2] for p in pieces[:-1]]
        first, last = layout.owned_range(rank)
        assert sum(stop - start for _, start, stop in pieces) == last - first
        for shard, start, stop in pieces:
            assert (rank, start, stop) in layout.of_shard(shard)


def check_all(layout: FlatLayout, shapes: Shapes, align: int) -> None:
    check_slots(layout, shapes, align)
    check_ranks(layout, align)


@pytest.mark.parametrize("make", LAYOUTS)
@given(shapes=shapes_of, world_size=world_sizes, align=aligns)
@settings(max_examples=60, deadline=None)
def test_every_element_has_one_place_and_one_owner(
    make: Callable[..., FlatLayout], shapes: Shapes, world_size: int, align: int
) -> None:
    """An element that is owned twice is counted twice in the norm."""
    layout = make(shapes, world_size, align)
    check_all(layout, shapes, align)
    assert layout.numel_padding == layout.numel_padded - sum(math.prod(s) for _, s in shapes) >= 0


@given(shapes=shapes_of, world_size=world_sizes, align=aligns)
@settings(max_examples=60, deadline=None)
def test_padding_of_the_tight_layout_is_bounded(shapes: Shapes, world_size: int, align: int) -> None:
    """Padding is memory on every rank: less than one alignment a slot, and less than W alignments at the end."""
    layout = flat_layout(shapes, world_size, align)
    assert layout.numel_padding < align * (len(shapes) + world_size)
    assert [s.name for s in layout.slots] == [name for name, _ in shapes], "the order given is the order of readiness"


@given(shapes=shapes_of, world_size=world_sizes, align=aligns)
@settings(max_examples=60, deadline=None)
def test_the_whole_layout_never_cuts_a_parameter(shapes: Shapes, world_size: int, align: int) -> None:
    """deepspeed#7807, deepspeed#8090, deepspeed#8141: Muon ran on matrices that a shard's boundary had cut."""
    owners = owners_of(shapes, world_size)
    layout = flat_layout(shapes, world_size, align, owners=owners)
    for slot in layout.slots:
        ranks = [r for r in range(world_size) if layout.owned(slot, r) == (slot.offset, slot.stop)]
        assert ranks == [owners[slot.name]] or slot.numel == 0
    check_runs(layout)


@given(shapes=shapes_of, world_size=world_sizes, align=aligns)
@settings(max_examples=60, deadline=None)
def test_whole_parameters_pad_no_more_than_the_tight_layout(shapes: Shapes, world_size: int, align: int) -> None:
    """65 GB a rank for a model of 2.5 GB, where each rank's run had the length of the longest."""
    assert whole(shapes, world_size, align).numel_padded == flat_layout(shapes, world_size, align).numel_padded


@pytest.mark.parametrize("make", LAYOUTS)
@given(shapes=shapes_of, world_size=st.integers(1, 9), align=aligns)
@settings(max_examples=40, deadline=None)
def test_shards_of_all_ranks_give_the_parameters_back(
    make: Callable[..., FlatLayout], shapes: Shapes, world_size: int, align: int
) -> None:
    """Flatten, cut into what ranks update, take only what `owned` says, unflatten: the same values, and nothing in the
    padding."""
    layout = make(shapes, world_size, align)
    given_values = {slot.name: torch.randn(slot.shape) for slot in layout.slots}
    flat = torch.full((layout.numel_padded,), float("nan"))
    for slot in layout.slots:
        flat[slot.offset : slot.stop] = given_values[slot.name].view(-1)
    assert int(flat.isnan().sum()) == layout.numel_padding
    gathered = torch.full((layout.numel_padded,), float("nan"))
    for rank in range(world_size):
        start, stop = layout.owned_range(rank)
        shard = flat[start:stop].clone()
        for slot in layout.slots:
            first, last = layout.owned(slot, rank)
            gathered[first:last] = shard[first - start : last - start]
    for slot in layout.slots:
        assert torch.equal(gathered[slot.offset : slot.stop].view(slot.shape), given_values[slot.name])


def test_the_tight_layout_written_out() -> None:
    """Literal offsets, so that a change of the rule is seen as one: fp32, 128 bytes are 32 elements."""
    shapes: Shapes = [("a", (3, 5)), ("b", (40,)), ("c", ())]
    two = flat_layout(shapes, 2, 32)
    assert two == FlatLayout((Slot("a", (3, 5), 0), Slot("b", (40,), 32), Slot("c", (), 96)), 128, 2)
    assert (two.numel_shard, two.numel_padding) == (64, 128 - 15 - 40 - 1)
    assert [two.shard_range(r) for r in (0, 1)] == [(0, 64), (64, 128)]
    # b is cut by the shard's edge at 64
    assert [two.owned(two.slots[1], r) for r in (0, 1)] == [(32, 64), (64, 72)]
    assert flat_layout(shapes, 1, 32).numel_padded == 128
    three = flat_layout(shapes, 3, 32)
    assert (three.numel_padded, three.numel_shard) == (192, 64)
    assert three.owned(three.slots[0], 2) == (128, 128), "nothing: empty inside the rank's own range"


def test_the_whole_layout_written_out() -> None:
    """Rank 0 owns w, rank 2 the rest, rank 1 nothing: shards of 64 elements, runs of 64 and 74."""
    shapes: Shapes = [("v", (4, 4)), ("w", (8, 8)), ("b", (42,)), ("e", (0, 3))]
    layout = flat_layout(shapes, 3, 32, owners={"v": 2, "w": 0, "b": 2, "e": 1})
    slots = (Slot("w", (8, 8), 0), Slot("e", (0, 3), 64), Slot("v", (4, 4), 64), Slot("b", (42,), 96))
    assert layout == FlatLayout(slots, 192, 3, (0, 1, 2, 2))
    assert layout.runs == {0: (0, 64), 2: (64, 138)}
    assert [layout.owned_range(r) for r in range(3)] == [(0, 64), (0, 0), (64, 138)]
    assert [layout.of_shard(r) for r in range(3)] == [[(0, 0, 64)], [(2, 64, 128)], [(2, 128, 138)]]
    assert [layout.of_run(r) for r in range(3)] == [[(0, 0, 64)], [], [(1, 64, 128), (2, 128, 138)]]
    assert layout.owned(slots[3], 2) == (96, 138) and layout.in_shard(slots[3], 2) == (128, 138)


def test_a_layout_is_frozen_and_hashable() -> None:
    """Plans are keys of caches and are compared between ranks: nobody may change one afterwards."""
    layout = flat_layout([("a", (3,))], 2, 32)
    assert hash(layout) == hash(flat_layout([("a", (3,))], 2, 32)) and len({layout}) == 1
    for record, field in ((layout, "numel_padded"), (layout.slots[0], "offset")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, 1)


@pytest.mark.parametrize("fault", ["overlap", "unaligned", "lost", "owner"])
def test_the_properties_notice_a_broken_layout(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: each way to break a layout fails one of the checks above."""
    shapes: Shapes = [("a", (40,)), ("b", (40,))]
    good = flat_layout(shapes, 2, 32)
    first, second = good.slots
    broken = good
    if fault == "overlap":
        broken = dataclasses.replace(good, slots=(first, dataclasses.replace(second, offset=32)))
    elif fault == "unaligned":
        broken = dataclasses.replace(good, slots=(first, dataclasses.replace(second, offset=65)))
    elif fault == "lost":
        broken = dataclasses.replace(good, slots=(first,))
    else:  # a rank that leaves out its last element: nobody owns it
        owned = FlatLayout.owned

        def short(self: FlatLayout, slot: Slot, rank: int) -> tuple[int, int]:
            start, stop = owned(self, slot, rank)
            return start, max(start, stop - 1)

        monkeypatch.setattr(FlatLayout, "owned", short)
    check_slots(good, shapes, 32)
    with pytest.raises(AssertionError):
        check_all(broken, shapes, 32)


def test_a_shard_has_a_piece_for_each_replica() -> None:
    """By hand: 13 elements in 2 shards of 3 pieces of a multiple of 2; owners are of the ranks of `shard` alone."""
    layout = flat_layout([("w", (13,))], 2, 2, num_replicas=3)
    assert layout.numel_padded == 24 and layout.numel_shard == 12 and layout.world_size == 2
    assert [layout.shard_range(rank) for rank in range(2)] == [(0, 12), (12, 24)]
    whole = flat_layout([("a", (4,)), ("b", (2,))], 2, 1, owners={"a": 1, "b": 0}, num_replicas=4)
    assert whole.numel_padded == 8 and whole.runs == {0: (0, 2), 1: (2, 6)}
