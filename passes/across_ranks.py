"""Part (f) of the proof: no rank reads what another one is writing, and each signal between ranks is needed.

All ranks run the same schedule, so a node here stands for that of every rank. Let node ``a`` read a buffer of the
other ranks, and node ``w`` write that buffer. Only a signal and the wait that it ends order ``w`` of one rank and ``a``
of another. The k-th signal of one kind on a buffer ends the k-th wait::

    rank 0:  w -> signal_full(k)                       a -> signal_free(k)
                       |                                         |
    rank 1:       await_full(k) -> a        rank 0:        await_free(k) -> w

A read also needs the wait on its own buffer because it learns from it where the others' is. That signals of other
buffers may happen to order the same is not counted. ``->`` is the happens-before of one rank (`zc.passes._order`).

Every buffer may have been written before the schedule, and may be written after it: each of the two counts as a
``w``. No other rank reads this rank's shard of a sum, or the weights of others that it has gathered, so a write by
``a`` itself is no conflict.

No rank waits for ever, because each signal is issued before the wait of its number: then all edges, those between ranks
too, point forward in the order of issue. The model of one-sided reads: MPI's post, start, complete, wait (MPI-2, 11.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer, Place
from zc.schedule.nodes import kind_of, read_of_peers
from zc.schedule.spec import AwaitFree, AwaitFull, Op, Signal, SignalFree, SignalFull

if TYPE_CHECKING:
    from zc.passes._order import Order

_PAST, _FUTURE = -1, 1 << 60  # positions of a write before the schedule, and of one after it
_PAIRS = ((SignalFull, AwaitFull), (SignalFree, AwaitFree))


class Pair(NamedTuple):
    """A signal, and the wait of the other ranks that it ends, as positions in the order of issue."""

    signal: int
    wait: int


def check(order: Order, plan: Plan | None) -> tuple[list[str], list[str]]:
    """(faults and races, signals that nothing needs), as texts that name the nodes."""
    reads = [(k, b) for k, op in enumerate(order.ops) if (b := read_of_peers(op, plan)) is not None]
    pairs, faults = _pairs(order)
    if faults:
        return faults, []
    races, needed = [], set[Pair]()
    writes = _writes(order)
    for a, buffer in reads:
        full, free = pairs.get((SignalFull, buffer), []), pairs.get((SignalFree, buffer), [])
        for w in (_PAST, *(w for w in writes.get(buffer, ()) if w != a), _FUTURE):
            ways = [p for p in full if _before(order, w, p.signal) and _before(order, p.wait, a)]
            ways += [p for p in free if _before(order, a, p.signal) and _before(order, p.wait, w)]
            if not ways:
                races.append(_race(order, buffer, w, a))
            elif len(ways) == 1:
                needed.add(ways[0])
    redundant = [
        f"redundant signal: {kind_of(order.nodes[p.signal])} ({order.nodes[p.signal].name}), and every conflict "
        "between ranks is ordered without it"
        for of_buffer in pairs.values()
        for p in of_buffer
        if p not in needed
    ]
    return races, redundant


def _pairs(order: Order) -> tuple[dict[tuple[type[Op], Buffer], list[Pair]], list[str]]:
    """By kind of signal and buffer, the k-th signal with the k-th wait; and the faults of their numbers."""
    positions: dict[tuple[type[Op], Buffer], list[int]] = {}
    for k, op in enumerate(order.ops):
        if isinstance(op, Signal):
            positions.setdefault((type(op), op.buffer), []).append(k)
    pairs: dict[tuple[type[Op], Buffer], list[Pair]] = {}
    faults: list[str] = []
    for signal, wait in _PAIRS:
        for buffer in sorted({buffer for kind, buffer in positions if kind in (signal, wait)}):
            signals, waits = positions.get((signal, buffer), []), positions.get((wait, buffer), [])
            names = ", ".join(order.nodes[k].name for k in (*signals, *waits))
            if len(signals) != len(waits):
                faults.append(f"{buffer} is signalled {len(signals)} times and waited for {len(waits)} times: {names}")
            elif len({order.stream[k] for k in (*signals, *waits)}) > 1:
                faults.append(f"{buffer} is signalled and waited for on several streams: {names}")
            elif any(w < s for s, w in zip(signals, waits, strict=True)):
                faults.append(f"every rank waits for the others' {buffer} before it signals its own: {names}")
            elif _buckets(order, signals) != _buckets(order, waits):
                faults.append(f"{buffer} is signalled for other buckets than it is waited for: {names}")
            else:
                pairs[signal, buffer] = [Pair(s, w) for s, w in zip(signals, waits, strict=True)]
    return pairs, faults


def _buckets(order: Order, nodes: list[int]) -> list[int]:
    ops = (order.ops[k] for k in nodes)
    return [op.bucket for op in ops if isinstance(op, Signal)]


def _writes(order: Order) -> dict[Place, list[int]]:
    """The nodes that write each buffer, as positions in the order of issue."""
    writes: dict[Place, list[int]] = {}
    for k, (_, written) in enumerate(order.accesses):
        for place in {access.buffer for access in written}:
            writes.setdefault(place, []).append(k)
    return writes


def _before(order: Order, one: int, other: int) -> bool:
    """Whether node ``one`` happens before node ``other`` on one rank. Part (a) has shown that writes before and after
    the schedule are ordered with each node that accesses the buffer: of the signals, these two kinds do."""
    if one == _PAST or other == _FUTURE:
        op = order.ops[other if one == _PAST else one]
        return isinstance(op, SignalFull | AwaitFree)
    if one == _FUTURE or other == _PAST:
        return False
    positions, _ = order.clocks[other]
    return one != other and positions[order.stream[one]] >= order.position[one]


def _race(order: Order, buffer: Buffer, w: int, a: int) -> str:
    reader = f"read by {kind_of(order.nodes[a])} ({order.nodes[a].name}) of other ranks"
    if w in (_PAST, _FUTURE):
        when = "before" if w == _PAST else "after"
        return f"race: {buffer} is written {when} this schedule and {reader}, and no signal orders them"
    node: fx.Node = order.nodes[w]
    return f"race: {buffer} is written by {kind_of(node)} ({node.name}) and {reader}, and no signal orders them"
