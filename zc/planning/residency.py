"""Where gathered weights lie while they are read (stage 3), planned for a whole pass before it runs. No tensors.

A pass is a sequence of *uses*: use k reads the buckets ``uses[k]``. A piece of the plan comes before each use: buckets
to free, buckets to gather, and the places that the use reads. Buckets 0, 1 and 2 of 128 bytes in 256 bytes, read
forward and back::

    use 0 reads 0    gather 0 [0, 128)     gather 1 [128, 256)
    use 1 reads 1    free 0                gather 2 [0, 128)
    use 2 reads 2
    use 3 reads 1    free 2                gather 0 [0, 128)
    use 4 reads 0    free 1
                     free 0

The rules, the most important first: each use finds what it reads; extents alive at once do not overlap and lie in the
first ``cap`` bytes; the next use's buckets are gathered one use ahead, in place of those that are read latest (Belady,
1966); those of later uses are gathered into free room. Extents do not move, so an arena with enough bytes may lack a
hole: `_place` looks one use further, and if a use still has no room, its buckets are freed and gathered side by side.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zc.planning.layout import ALIGN_NBYTES, align_up

_NEVER = 1 << 60
_BAR = 24  # characters
Uses = tuple[tuple[int, ...], ...]  # the buckets that each use of a pass reads


class Extent(NamedTuple):
    """Bytes [start, stop) of the arena, with the weights of a bucket."""

    bucket: int
    start: int
    stop: int


class Piece(NamedTuple):
    """What one use issues, in this order: frees, gathers, and the read of ``reads``."""

    frees: tuple[Extent, ...]
    gathers: tuple[Extent, ...]
    reads: tuple[Extent, ...]


@dataclass(frozen=True)
class Residency:
    """One piece per use; after a last use that reads something, one more with its frees. ``nbytes``: the size of the
    arena, where the last extent stops."""

    pieces: tuple[Piece, ...]
    uses: Uses
    nbytes: int

    def table(self, cap: int) -> str:
        """A line for each use: what it reads, what is gathered and freed before it, and the bytes that are there then,
        with a bar: `_BAR` characters are ``cap``, the most bytes that weight_nbytes allows."""
        lines = [f"{'use':>5}  {'reads':<14} {'gathered before it':<22} {'freed before it':<18} bytes there"]
        alive = peak = 0
        for number, piece in enumerate(self.pieces):
            alive += sum(e.stop - e.start for e in piece.gathers) - sum(e.stop - e.start for e in piece.frees)
            peak = max(peak, alive)
            reads, gathers, frees = (
                ", ".join(str(extent.bucket) for extent in extents) or "-"
                for extents in (piece.reads, piece.gathers, piece.frees)
            )
            use = str(number) if number < len(self.uses) else "end"
            bar = "#" * -(-alive * _BAR // max(1, cap))
            lines.append(f"{use:>5}  {reads:<14} {gathers:<22} {frees:<18} {alive:>13,} |{bar:<{_BAR}}|")
        most = f"at most {peak:,} bytes of gathered weights at a time; weight_nbytes allows {cap:,}"
        return "\n".join([most, *lines])


def smallest_cap(uses: Sequence[tuple[int, ...]], nbytes: Sequence[int] | Mapping[int, int]) -> int:
    """The fewest bytes in which each use finds what it reads."""
    return max((sum(align_up(nbytes[b], ALIGN_NBYTES) for b in set(use)) for use in uses), default=0)


def plan_residency(uses: Sequence[tuple[int, ...]], nbytes: Sequence[int] | Mapping[int, int], cap: int) -> Residency:
    """The plan of one pass. ``nbytes``: of each bucket; ``cap``: of the arena, with room for each use."""
    assert smallest_cap(uses, nbytes) <= cap, f"weight_nbytes={cap}: `check_plan` and `WeightUses` see to the room"
    return _Planner([tuple(dict.fromkeys(use)) for use in uses], nbytes, cap).run()


_Span = tuple[int, int, int]  # start, stop, bucket: the bytes that it occupies, whole multiples of ALIGN_NBYTES


class _Planner:
    def __init__(self, uses: Sequence[tuple[int, ...]], nbytes: Sequence[int] | Mapping[int, int], cap: int) -> None:
        self.uses, self.nbytes = uses, nbytes
        self.size = {b: align_up(nbytes[b], ALIGN_NBYTES) for use in uses for b in use}
        self.end = min(cap // ALIGN_NBYTES * ALIGN_NBYTES, sum(self.size.values()))
        self.next: dict[int, int] = {}  # bucket -> the next use after the present one that reads it
        self._following: list[dict[int, int]] = []  # of each use: the same for the buckets that it reads
        for use in reversed(uses):
            self._following.append({b: self.next.get(b, _NEVER) for b in use})
            self.next.update(dict.fromkeys(use, len(uses) - len(self._following)))
        self._following.reverse()
        self.other = [self._other_use(k) for k in range(len(uses))]
        self.live, self.order = dict[int, _Span](), list[_Span]()  # what is alive by bucket, and by position
        self.frees, self.gathers = list[Extent](), list[Extent]()
        self.ahead = 0  # all that earlier uses read is there

    def _other_use(self, k: int) -> int:
        """The next use that reads other buckets."""
        mine = set(self.uses[k])
        return next((j for j in range(k + 1, len(self.uses)) if not mine.issuperset(self.uses[j])), _NEVER)

    def _pair(self, k: int) -> tuple[int, ...]:
        """What a use and the next one with other buckets read; empty without such a use, or if both don't fit."""
        if self.other[k] == _NEVER:
            return ()
        both = tuple(dict.fromkeys((*self.uses[k], *self.uses[self.other[k]])))
        return both if sum(self.size[b] for b in both) <= self.end else ()

    def run(self) -> Residency:
        pieces = list[Piece]()
        for k, use in enumerate(self.uses):
            self._free([b for b in (self.uses[k - 1] if k else ()) if self.next[b] == _NEVER])
            self.next.update(self._following[k])
            self._bring_now(k)
            other = self.other[k]
            if other != _NEVER:
                self._bring(other, {*use, *self.uses[other]})
            self._prefetch(k)
            reads = tuple(self._extent(self.live[b]) for b in use)
            pieces.append(Piece(tuple(self.frees), tuple(self.gathers), reads))
            self.frees, self.gathers = [], []
        if self.live:
            pieces.append(Piece(tuple(map(self._extent, self.order)), (), ()))
        end = max((extent.stop for piece in pieces for extent in piece.gathers), default=0)
        return Residency(tuple(pieces), tuple(self.uses), end)

    def _extent(self, span: _Span) -> Extent:
        start, _, bucket = span
        return Extent(bucket, start, start + self.nbytes[bucket])

    # --- what a use reads ---

    def _bring_now(self, k: int) -> None:
        use = self.uses[k]
        if self._bring(k, set(use)):
            return
        self._free([b for b in use if b in self.live])
        for number, bucket in enumerate(use):
            self._gather(bucket, sum(self.size[b] for b in use[:number]))

    def _bring(self, k: int, pinned: set[int]) -> bool:
        """Gathers what use ``k`` reads and the arena lacks, and frees nothing that is ``pinned``. False: not all of it
        has room."""
        missing = sorted((b for b in self.uses[k] if b not in self.live), key=lambda b: -self.size[b])
        return sum(self._place(b, k, pinned) for b in missing) == len(missing)

    def _prefetch(self, k: int) -> None:
        """Gathers what later uses read into holes, in the order of the uses, until one does not fit."""
        self.ahead = max(self.ahead, k + 1)
        while self.ahead < len(self.uses):
            missing = [b for b in self.uses[self.ahead] if b not in self.live]
            if not all(self._place(b, self.ahead, None) for b in missing):
                return
            self.ahead += 1

    # --- where ---

    def _place(self, bucket: int, k: int, pinned: set[int] | None) -> bool:
        """Gathers a bucket for use ``k`` at the first of its `_choices` that leaves room for the use after ``k``.
        False: none does."""
        choices = self._choices(self.size[bucket], pinned)
        start = next((at for at in choices if self._leaves_room(bucket, k, at)), None)
        if start is not None:
            self._gather(bucket, start)
        return start is not None

    def _choices(self, size: int, pinned: set[int] | None) -> Iterator[int]:
        """Where ``size`` bytes could start, the best place first: in the smallest hole, then in place of buckets that
        are not ``pinned``, those that are read latest first. ``pinned`` None: only in holes."""
        holes, stop = [], 0
        for k, (start, next_stop, _) in enumerate((*self.order, (self.end, self.end, -1))):
            if start - stop >= size:
                holes.append((start - stop, k, stop, start))
            stop = next_stop
        for _, k, left, right in sorted(holes):
            yield from self._ends(size, k - 1, k, left, right)
        if pinned is None:
            return
        evictable = [span for span in self.order if span[2] not in pinned]
        evictable.sort(key=lambda span: self.next[span[2]], reverse=True)
        evicted = set[int]()
        for span in evictable:
            evicted.add(span[2])
            first = last = bisect.bisect_left(self.order, span)  # of the run of adjacent spans that are evicted
            while first and self.order[first - 1][2] in evicted:
                first -= 1
            while last + 1 < len(self.order) and self.order[last + 1][2] in evicted:
                last += 1
            left = self.order[first - 1][1] if first else 0
            right = self.order[last + 1][0] if last + 1 < len(self.order) else self.end
            if right - left >= size:
                yield from self._ends(size, first - 1, last + 1, left, right)

    def _ends(self, size: int, before: int, after: int, left: int, right: int) -> list[int]:
        """Both ends of [left, right), as starts: first what evicts fewer bytes, then what lies beside the neighbor that
        stays longer, so that large holes remain. ``before`` and ``after`` number the neighbors in `order`."""
        evicts = [
            sum(stop - start for start, stop, _ in self.order[before + 1 : after] if start < at + size and at < stop)
            for at in (left, right - size)
        ]
        is_left = (evicts[0], -self._stays(before)) <= (evicts[1], -self._stays(after))
        return [left, right - size] if is_left else [right - size, left]

    def _stays(self, number: int) -> int:
        """How long a span of `order` stays, to compare; the ends of the arena stay for ever."""
        is_inside = 0 <= number < len(self.order)
        return -self.next[self.order[number][2]] if is_inside else 1  # what is read late is evicted early

    def _leaves_room(self, bucket: int, k: int, start: int) -> bool:
        """Whether the buckets of use ``k`` and of the one after it fit together if ``bucket`` is gathered at ``start``.
        True if they don't fit in any case."""
        both = self._pair(k)
        if not both:
            return True
        stop = start + self.size[bucket]
        spans = (self.live[b] for b in both if b in self.live)
        alive = [span for span in spans if span[0] >= stop or span[1] <= start]
        missing = {*both} - {b for _, _, b in alive} - {bucket}
        return self._fit(missing, [*alive, (start, stop, bucket)])

    def _fit(self, missing: Iterable[int], alive: Sequence[_Span]) -> bool:
        """Whether ``missing`` fit together, the largest first, each into the smallest gap between the spans ``alive``,
        as if nothing else was alive."""
        gaps, stop = [], 0
        for start, next_stop, _ in (*sorted(alive), (self.end, self.end, -1)):
            gaps.append(start - stop)
            stop = next_stop
        for size in sorted((self.size[b] for b in missing), reverse=True):
            gap = min((gap for gap in gaps if gap >= size), default=None)
            if gap is None:
                return False
            gaps.remove(gap)
            gaps.append(gap - size)
        return True

    def _free(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            span = self.live.pop(bucket)
            self.order.remove(span)
            extent = self._extent(span)
            if extent in self.gathers:  # of this piece, whose frees come first: it is not gathered there
                self.gathers.remove(extent)
            else:
                self.frees.append(extent)
            self.ahead = min(self.ahead, self.next[bucket])

    def _gather(self, bucket: int, start: int) -> None:
        """Gathers it there, and frees what lies there now."""
        span = (start, start + self.size[bucket], bucket)
        self._free([b for at, stop, b in self.order if at < span[1] and start < stop])
        bisect.insort(self.order, span)
        self.live[bucket] = span
        self.gathers.append(self._extent(span))
