"""Ranks that run the gathers of a pass of stage 3: streams, events, messages and bytes, in any order that they allow.

It shares no code with zc: it reads the names and arguments of a graph's nodes, and knows from the test which buckets
each use reads. The arena is a list of cells. A gather first makes its cells poison, and fills them later; a use looks
at its cells when it starts and when it ends; a free makes them poison. Between two passes each rank writes its shards,
as soon as its own main stream has ended, the shard's carried event is there, and the others have said that their reads
are done. A gather of the next pass waits until the others have said that theirs are written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

UNIT = 64  # bytes of a cell
POISON = "poison"
Lane = tuple[int, str]  # rank, stream
Chooser = Callable[[Sequence[Lane]], Lane]


class Wrong(Exception):
    """What went wrong, in words."""


@dataclass(frozen=True)
class Setting:
    """``uses``: the buckets that each use of a pass reads. ``reads``: ranks read each other's shards where they lie."""

    uses: tuple[tuple[int, ...], ...]
    nbytes: Mapping[int, int]
    cap: int
    world_size: int
    reads: bool


def play(graph: fx.Graph, setting: Setting, choose: Chooser, *, cut: int | None = None, ledger: bool = True) -> None:
    """Two passes and two updates. ``cut``: the first pass ends after so many uses. Raises `Wrong`. ``ledger``: extents
    are also counted as they are issued, as an allocator would; otherwise only what is read counts."""
    machine = _Machine(setting, ledger)
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for number, last in enumerate((cut, None)):
        for rank in range(setting.world_size):
            machine.issue(rank, nodes, number, last)
    machine.run(choose)


@dataclass
class _Machine:
    setting: Setting
    ledger: bool
    lanes: dict[Lane, list[tuple[str, Any]]] = field(default_factory=dict)
    reached: set[object] = field(default_factory=set)
    count: int = 0

    def __post_init__(self) -> None:
        ranks = range(self.setting.world_size)
        self.arena: list[list[object]] = [[POISON] * (-(-self.setting.cap // UNIT)) for _ in ranks]
        self.shards: list[dict[int, int | None]] = [dict.fromkeys(self.setting.nbytes, 0) for _ in ranks]
        self.latest: dict[tuple[int, str], object] = {}  # rank, event -> its latest record

    # --- issue ---

    def put(self, lane: Lane, kind: str, what: object) -> None:
        self.lanes.setdefault(lane, []).append((kind, what))

    def record(self, lane: Lane, event: str) -> None:
        self.count += 1
        self.latest[lane[0], event] = self.count
        self.put(lane, "reach", self.count)

    def wait(self, lane: Lane, event: str) -> None:
        if (lane[0], event) in self.latest:
            self.put(lane, "wait", self.latest[lane[0], event])

    def issue(self, rank: int, nodes: Sequence[fx.Node], epoch: int, last: int | None) -> None:
        main, num_uses, alive = (rank, "compute"), 0, dict[int, tuple[int, int]]()
        for node in nodes:
            if num_uses == last:
                break
            name, args, lane = node.target.__name__, node.args, (rank, node.meta["stream"])  # type: ignore[union-attr]
            if name == "record_event":
                self.record(lane, args[0])
            elif name == "wait_event":
                self.wait(lane, args[0])
            elif name == "gather":  # what is encoded is decoded before the node ends
                bucket, src = args[0], node.kwargs["src"]
                start, stop = node.kwargs.get("extent", (0, 1 << 40))
                self.alloc(alive, bucket, start, stop)
                self.gather(lane, bucket, int(src[len("weight[") : -1]), start, stop, epoch)
            elif name == "free_weights":
                bucket, _, start, stop = args
                if self.ledger and alive.pop(bucket, None) != (start, stop):
                    raise Wrong(f"bucket {bucket} is freed at [{start}, {stop}), and is not there")
                self.put(lane, "run", lambda s=start, e=stop: self.fill(rank, s, e, [POISON] * len(cells(s, e))))
            elif name == "read_weights":
                _, use, buckets = args
                if use != num_uses or num_uses >= len(self.setting.uses):
                    raise Wrong(f"use {num_uses} of the pass is called {use}")
                where = dict(zip(buckets, node.kwargs["spans"], strict=False))
                if sorted(where) != sorted(set(self.setting.uses[use])) or len(where) != len(node.kwargs["spans"]):
                    raise Wrong(f"use {use} reads {self.setting.uses[use]}, and gets {buckets}")
                if any(stop - start != self.setting.nbytes[b] for b, (start, stop) in where.items()):
                    raise Wrong(f"use {use} gets {where}, which is too short or too long")
                if lane != main:
                    raise Wrong(f"use {use} is ordered on {lane}, and graphs read on {main}")
                look = lambda w=where: self.look(rank, w, epoch)  # noqa: E731
                self.put(main, "run", look)
                self.put(main, "run", look)
                num_uses += 1
            else:
                raise AssertionError(name)
        if last is None and num_uses != len(self.setting.uses):
            raise Wrong(f"{num_uses} uses of {len(self.setting.uses)}")
        if last is None and self.ledger and alive:
            raise Wrong(f"{alive} stays")
        self.update(rank, epoch, joined=last is not None)

    def alloc(self, alive: dict[int, tuple[int, int]], bucket: int, start: int, stop: int) -> None:
        if not (0 <= start <= stop <= self.setting.cap):
            raise Wrong(f"[{start}, {stop}) is outside of the arena")
        if self.ledger and (bucket in alive or any(s < stop and start < e for s, e in alive.values())):
            raise Wrong(f"bucket {bucket} is gathered into [{start}, {stop}), where {alive} lie")
        if self.ledger and (start % 128 or stop - start != self.setting.nbytes[bucket]):
            raise Wrong(f"[{start}, {stop}) is no extent of bucket {bucket}")
        alive[bucket] = (start, stop)

    def gather(self, lane: Lane, bucket: int, src: int, start: int, stop: int, epoch: int) -> None:
        rank, ranks = lane[0], range(self.setting.world_size) if self.setting.reads else (lane[0],)
        seen: list[int | None] = []

        def begin() -> None:
            seen[:] = [self.shards[r].get(src) for r in ranks]
            self.fill(rank, start, stop, [POISON] * len(cells(start, stop)))

        def end() -> None:
            is_torn = seen != [self.shards[r].get(src) for r in ranks] or None in seen
            values = POISON if is_torn else tuple(seen)
            self.fill(rank, start, stop, [(src, k, values) for k in range(len(cells(start, stop)))])

        for other in (r for r in ranks if epoch and r != rank):
            self.put(lane, "wait", ("opened", other, epoch))
        self.put(lane, "run", begin)
        self.put(lane, "run", end)

    def fill(self, rank: int, start: int, stop: int, contents: Sequence[object]) -> None:
        for cell, content in zip(cells(start, stop), contents, strict=True):
            if 0 <= cell < len(self.arena[rank]):
                self.arena[rank][cell] = content

    def look(self, rank: int, where: Mapping[int, tuple[int, int]], epoch: int) -> None:
        versions = (epoch,) * (self.setting.world_size if self.setting.reads else 1)
        for bucket, (start, _) in where.items():
            for k, cell in enumerate(cells(start, start + self.setting.nbytes[bucket])):
                there = self.arena[rank][cell] if 0 <= cell < len(self.arena[rank]) else POISON
                if there != (bucket, k, versions):
                    raise Wrong(f"rank {rank} reads {there}, not bucket {bucket}, cell {k}, of update {epoch}")

    def update(self, rank: int, epoch: int, *, joined: bool) -> None:
        """What may come after a pass: its shards are written, its arena is used for something else."""
        main = (rank, "compute")
        if joined:
            self.record((rank, "comm"), "join")
            self.wait(main, "join")
        self.record(main, "the end")
        self.record((rank, "comm"), "gathered")
        closing = (rank, "later close")
        self.wait(closing, "the end")
        self.wait(closing, "gathered")
        self.put(closing, "reach", ("closed", rank, epoch))
        others = [r for r in range(self.setting.world_size) if r != rank]
        for b in self.setting.nbytes:
            later = (rank, f"later {b}")
            self.wait(later, "the end")
            for other in others:
                self.put(later, "wait", ("closed", other, epoch))
            self.wait(later, f"done/weight[{b}]")
            self.put(later, "run", lambda b=b: self.shards[rank].update({b: None}))
            self.put(later, "run", lambda b=b: self.shards[rank].update({b: epoch + 1}))
            self.record(later, f"written {b}")
        later = (rank, "later arena")
        self.wait(later, "the end")
        self.wait(later, "done/arena[0]")
        self.put(later, "run", lambda: self.fill(rank, 0, self.setting.cap, [POISON] * len(cells(0, self.setting.cap))))
        self.record(later, "written arena")
        for b in (*self.setting.nbytes, "arena"):
            self.wait(main, f"written {b}")
        self.put(main, "reach", ("opened", rank, epoch + 1))

    # --- run ---

    def run(self, choose: Chooser) -> None:
        at = dict.fromkeys(self.lanes, 0)
        while True:
            moved = True
            while moved:
                moved = False
                for lane, items in self.lanes.items():
                    while at[lane] < len(items):
                        kind, what = items[at[lane]]
                        if kind == "run" or (kind == "wait" and what not in self.reached):
                            break
                        if kind == "reach":
                            self.reached.add(what)
                        at[lane] += 1
                        moved = True
            going = [lane for lane, items in self.lanes.items() if at[lane] < len(items)]
            ready = [lane for lane in going if self.lanes[lane][at[lane]][0] == "run"]
            if not ready:
                break
            lane = choose(ready)
            at[lane] += 1
            self.lanes[lane][at[lane] - 1][1]()
        stuck = [lane for lane, items in self.lanes.items() if at[lane] < len(items)]
        if stuck:
            raise Wrong(f"{stuck} wait for ever")


def cells(start: int, stop: int) -> range:
    return range(start // UNIT, -(-stop // UNIT))


def choosers(world_size: int, num_seeds: int) -> Iterator[Chooser]:
    """Each stream of each rank first and last, and orders by chance."""
    names = [(rank, name) for rank in range(world_size) for name in ("compute", "comm", "later")]
    for name in names:
        yield lambda ready, n=name: min(ready, key=lambda lane: (not _is(lane, n), lane))
        yield lambda ready, n=name: min(ready, key=lambda lane: (_is(lane, n), lane))
    for one in names:
        for other in names:
            if one != other:
                yield lambda ready, a=one, b=other: min(ready, key=lambda lane: (_is(lane, b), not _is(lane, a), lane))
    for seed in range(num_seeds):
        yield random.Random(seed).choice


def _is(lane: Lane, name: Lane) -> bool:
    return lane[0] == name[0] and lane[1].startswith(name[1])


def fault_of(
    graph: fx.Graph, setting: Setting, num_seeds: int = 8, *, ledger: bool = True, every_cut: bool = False
) -> str | None:
    """What is wrong under some order; None: nothing in those tried. The first pass ends after another use in each
    order, or after each use in every order."""
    cuts = (None, *range(1, len(setting.uses)))
    for k, choose in enumerate(choosers(setting.world_size, num_seeds)):
        for cut in cuts if every_cut else (cuts[k % len(cuts)],):
            try:
                play(graph, setting, choose, cut=cut, ledger=ledger)
            except Wrong as wrong:
                return str(wrong)
    return None
