"""Plans of residency against a brute force over all plans of small passes, and what each plan has to keep."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest
from tiers import FULL

from zc.planning.residency import Residency, plan_residency, smallest_cap

pytestmark = pytest.mark.check

Uses = tuple[tuple[int, ...], ...]
UNIT = 128


def passes(num: int, sizes: tuple[int, ...]) -> Iterator[tuple[Uses, list[int], int]]:
    """(uses, nbytes, cap): a forward and its backward, or any order of one or two buckets a use."""
    rng = random.Random(num)
    for _ in range(num):
        count = rng.randint(1, 6)
        nbytes = [UNIT * rng.choice(sizes) for _ in range(count)]
        if rng.random() < 0.4:
            forward = [(b,) for b in range(count)]
            uses: Uses = (*forward, (), *reversed(forward), *rng.choice(((), ((),))))
        else:
            most = rng.choice((1, 2, 3))
            uses = tuple(
                tuple(rng.sample(range(count), rng.randint(0, min(most, count)))) for _ in range(rng.randint(0, 10))
            )
        yield uses, nbytes, smallest_cap(uses, nbytes) + UNIT * rng.randint(0, 12)


def check(uses: Uses, nbytes: list[int], cap: int, plan: Residency) -> None:
    """What every plan keeps, gather by gather."""
    alive: dict[int, tuple[int, int]] = {}
    highest = 0
    for k, piece in enumerate(plan.pieces):
        for bucket, start, stop in piece.frees:
            assert alive.pop(bucket) == (start, stop)
        dead = [b for b in alive if not any(b in use for use in uses[k:])]
        assert not dead, f"{dead} stay after their last use"
        for bucket, start, stop in piece.gathers:
            assert bucket not in alive and start % UNIT == 0 and stop - start == nbytes[bucket]
            assert start >= 0 and stop <= plan.nbytes <= cap
            assert all(stop <= other or end <= start for other, end in alive.values())
            alive[bucket] = (start, stop)
            highest = max(highest, stop)
        assert tuple(b for b, _, _ in piece.reads) == (uses[k] if k < len(uses) else ())
        assert all(alive[b] == (start, stop) for b, start, stop in piece.reads)
    assert not alive and plan.nbytes == highest <= cap


def num_gathers(plan: Residency) -> int:
    return sum(len(piece.gathers) for piece in plan.pieces)


def late(uses: Uses, plan: Residency) -> list[int]:
    """Uses that read what only their own piece gathers, the first one left out."""
    first = next((k for k, use in enumerate(uses) if use), len(uses))
    return [k for k, use in enumerate(uses) if k > first and {g.bucket for g in plan.pieces[k].gathers} & set(use)]


def other_before(uses: Uses, k: int) -> int:
    """The use at which what use ``k`` lacks has to be gathered: the last one before it that reads anything else."""
    return next(j for j in reversed(range(k)) if uses[j] and not set(uses[k]) <= set(uses[j]))


def fewest_gathers(uses: Uses, nbytes: list[int], cap: int) -> int:
    """Of all plans that gather one use ahead where the bytes allow it, wherever they lie: the bytes of what is alive
    count alone. Each state is what is alive when a use reads."""
    every = frozenset(b for use in uses for b in use)
    size = {b: nbytes[b] for b in every}
    aim = []
    for k, use in enumerate(uses):
        other = next((j for j in range(k + 1, len(uses)) if not set(uses[j]) <= set(use)), None)
        both = {*use, *uses[other]} if other is not None else set(use)
        aim.append(frozenset(both if sum(size[b] for b in both) <= cap else use))

    @functools.cache
    def best(k: int, alive: frozenset[int]) -> int:
        if k == len(uses):
            return 0
        missing = aim[k] - alive
        rest = sorted(alive - aim[k])
        options = []
        for bits in range(1 << len(rest)):
            stays = aim[k] | {b for i, b in enumerate(rest) if bits >> i & 1}
            if sum(size[b] for b in stays) <= cap:
                options.append(len(missing) + best(k + 1, stays))
        return min(options)

    return best(0, frozenset())


def test_plans_keep_the_rules() -> None:
    # the second use puts two of its buckets where the third finds no room: all of them move
    moved = ((1, 4), (3, 0, 2)), [2 * UNIT, 4 * UNIT, 3 * UNIT, 2 * UNIT, UNIT], 7 * UNIT
    for uses, nbytes, cap in (moved, *passes(20_000 if FULL else 1500, (1, 2, 3, 5, 8))):
        plan = plan_residency(uses, nbytes, cap)
        check(uses, nbytes, cap, plan)
        assert plan == plan_residency(uses, dict(enumerate(nbytes)), cap)


def test_of_equal_buckets_no_plan_gathers_fewer() -> None:
    """And each is gathered one use ahead wherever the bytes allow it."""
    rng, num_choices = random.Random(3), 0
    for _ in range(1000 if FULL else 40):
        count, num_slots = rng.randint(5, 7), rng.randint(2, 5)
        uses = tuple((rng.randrange(count),) for _ in range(rng.randint(10, 20)))
        nbytes, cap = [2 * UNIT] * count, 2 * UNIT * num_slots
        plan = plan_residency(uses, nbytes, cap)
        check(uses, nbytes, cap, plan)
        assert not late(uses, plan), (uses, nbytes, cap)
        assert num_gathers(plan) == fewest_gathers(uses, nbytes, cap), (uses, nbytes, cap)
        num_choices += num_gathers(plan) > count
    assert num_choices > 10


def test_of_other_buckets_few_gather_more() -> None:
    """Extents don't move, and the choice of what goes is greedy: within 5 % of what the bytes alone allow."""
    total = fewest = 0
    for uses, nbytes, cap in passes(3000 if FULL else 300, (1, 2, 3, 5, 8)):
        plan = plan_residency(uses, nbytes, cap)
        total += num_gathers(plan)
        fewest += fewest_gathers(uses, nbytes, cap)
    assert fewest <= total <= 1.05 * fewest, (total, fewest)


def test_uses_of_one_bucket_are_gathered_ahead() -> None:
    """Whatever the sizes: where two uses in a row fit, the second is gathered before the first one reads."""
    for uses, nbytes, cap in passes(10_000 if FULL else 1000, (1, 2, 3, 5, 8, 13)):
        if all(len(use) <= 1 for use in uses):
            for k in late(uses, plan_residency(uses, nbytes, cap)):
                before = other_before(uses, k)
                assert sum(nbytes[b] for b in {*uses[before], *uses[k]}) > cap, (uses, nbytes, cap)


def test_with_room_for_all_each_bucket_is_gathered_once() -> None:
    forward = tuple((b,) for b in range(6))
    uses = (*forward, (), *reversed(forward), ())
    nbytes = [UNIT * (b + 1) for b in range(6)]
    whole = plan_residency(uses, nbytes, sum(nbytes))
    assert num_gathers(whole) == 6 and whole.nbytes == sum(nbytes)
    assert plan_residency(uses, nbytes, 10 * sum(nbytes)) == whole
    assert [len(piece.gathers) for piece in whole.pieces[:2]] == [6, 0]


def test_the_last_of_the_forward_stay_for_the_backward() -> None:
    forward = tuple((b,) for b in range(6))
    plan = plan_residency((*forward, (), *reversed(forward)), [UNIT] * 6, 3 * UNIT)
    again = [g.bucket for piece in plan.pieces[6:] for g in piece.gathers]
    assert again == [2, 1, 0] and num_gathers(plan) == 9 and plan.pieces[-1].reads == () != plan.pieces[-1].frees


def test_the_smallest_cap_is_enough() -> None:
    uses, nbytes = ((0,), (1, 2), (0,)), [100, 200, 300]
    assert smallest_cap(uses, nbytes) == 256 + 384
    plan_residency(uses, nbytes, 640)
    assert plan_residency((), [], 0) == plan_residency((), {}, 128)
