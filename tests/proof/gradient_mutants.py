"""Every way to lose, cut, double or misplace a gradient by one edit of a proved schedule. (``meta["is_none"]``: of a
flush's input for which nothing came in this run, and nothing could be lost.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mutants import Mutant, edited
from torch import fx

from zc.schedule.nodes import change, op_of, ops, put
from zc.schedule.spec import (
    AccumulateCast,
    Cast,
    CopyToHost,
    Deposit,
    Finish,
    FlattenCast,
    Gather,
    Reduce,
    Reduction,
    StageShard,
    Take,
    WgradInto,
    Write,
)


def _changed(node: fx.Node, **changes: Any) -> Mutant:
    """``node`` with other fields; values are those of the intact graph."""

    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        changed = {key: fx.map_arg(item, lambda n: where[n]) for key, item in changes.items()}
        change(where[node], replace(op_of(where[node]), **changed))

    return f"{node.name} with {changes}", edit


def _erased(*nodes: fx.Node) -> Mutant:
    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        for node in reversed(nodes):
            g.erase_node(where[node])

    return f"without {', '.join(n.name for n in nodes)}", edit


def _doubled(*nodes: fx.Node) -> Mutant:
    """The nodes once more, after the last of them."""

    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        last = where[nodes[-1]]
        for node in nodes:
            with g.inserting_after(last):
                last = put(g, op_of(where[node]))
            last.meta = dict(node.meta)

    return f"twice {', '.join(n.name for n in nodes)}", edit


def _of(graph: fx.Graph, kind: Any) -> list[tuple[fx.Node, Any]]:
    return [(node, op) for node, op in ops(graph) if isinstance(op, kind)]


def _nodes(graph: fx.Graph, kind: Any) -> list[fx.Node]:
    return [node for node, _ in _of(graph, kind)]


def _without(items: tuple[Any, ...], k: int) -> tuple[Any, ...]:
    return (*items[:k], *items[k + 1 :])


def slot_dropped(graph: fx.Graph) -> Iterator[Mutant]:
    for node, op in _of(graph, Cast):
        for k in (k for k, grad in enumerate(op.grads) if not grad.meta.get("is_none")):
            yield _changed(node, slots=_without(op.slots, k), grads=_without(op.grads, k))


def slots_swapped(graph: fx.Graph) -> Iterator[Mutant]:
    """Two gradients of one bucket take each other's place."""
    for node, op in _of(graph, Cast):
        for k, (first, second) in enumerate(itertools.pairwise(op.grads)):
            if first is not second and not (first.meta.get("is_none") and second.meta.get("is_none")):
                yield _changed(node, grads=(*op.grads[:k], second, first, *op.grads[k + 2 :]))
    for first, second in itertools.pairwise(_of(graph, WgradInto)):
        if first[1].bucket == second[1].bucket:
            yield _swapped(first, second, ("inputs", "how"), f"{first[0].name} in the slot of {second[0].name}")
    for first, second in itertools.pairwise(_of(graph, Deposit)):
        if first[1].grad is not second[1].grad:
            yield _swapped(first, second, ("grad",), f"{first[0].name} for {second[0].name}")


def _swapped(first: tuple[fx.Node, Any], second: tuple[fx.Node, Any], names: tuple[str, ...], name: str) -> Mutant:
    """Each of two becomes the other in all but the fields ``kept``."""

    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        a, b = where[first[0]], where[second[0]]
        own, other = op_of(a), op_of(b)
        change(a, replace(other, **{name: getattr(own, name) for name in names}))
        change(b, replace(own, **{name: getattr(other, name) for name in names}))

    return name, edit


def write_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    for node, op in _of(graph, Write):
        if not (isinstance(op, FlattenCast) and op.spans == ()):
            yield _erased(node)


def deposit_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    yield from map(_erased, _nodes(graph, Deposit))


def added_twice(graph: fx.Graph) -> Iterator[Mutant]:
    """What adds, once more: the same write of a ring buffer again would change nothing."""
    for node, op in _of(graph, AccumulateCast | Finish | Reduce | Deposit | WgradInto):
        spans_only = isinstance(op, AccumulateCast) and not op.slots
        in_ring = isinstance(op, WgradInto) and op.buffer.kind == "flat_grad"
        if not spans_only and not in_ring:
            yield _doubled(node)


def elements_missed(graph: fx.Graph) -> Iterator[Mutant]:
    """wgrad_into one element short, long, or shifted by one."""
    for node, op in _of(graph, WgradInto):
        for first, last in ((0, -1), (0, 1), (1, 1)):
            yield _changed(node, start=op.start + first, stop=op.stop + last)


def spans_changed(graph: fx.Graph) -> Iterator[Mutant]:
    """A span left out, or one element shorter at either end. (One that reaches into a slot which wgrad_into fills later
    on the same stream changes nothing.)"""
    for node, op in _of(graph, Cast):
        spans = op.spans or ()
        for k, (start, stop) in enumerate(spans):
            for new in ((), ((start + 1, stop),), ((start, stop - 1),)):
                yield _changed(node, spans=(*spans[:k], *new, *spans[k + 1 :]))


def accumulate_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    yield from map(_erased, _nodes(graph, Finish | Reduce))


def _reductions(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The first and the last node of each hop: one node, or two."""
    takes = iter(_nodes(graph, Take))
    for node, op in _of(graph, Finish | Reduce):
        yield (node, node) if isinstance(op, Reduce) else (next(takes), node)


def taken_wrongly(graph: fx.Graph) -> Iterator[Mutant]:
    """What is taken twice, or never."""
    for take, total in _reductions(graph):
        if take is not total:
            yield _doubled(take)
            yield _erased(take)


def difference_lost(graph: fx.Graph) -> Iterator[Mutant]:
    """Weights that are gathered as they are, where each rank has only its own new; not at all, or twice."""
    for node, op in _of(graph, Gather):
        if op.dst.kind == "flat_param":  # with overlap_gather a bucket may stay as it is
            yield _erased(node)
        yield _doubled(node)
        if op.scratch is not None:
            yield _changed(node, scratch=None)


def reduction_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    for chain in _reductions(graph):
        yield _erased(*dict.fromkeys(chain))


def reduction_bypassed(graph: fx.Graph) -> Iterator[Mutant]:
    """Summed from what was to be sent: this rank's own gradient counts for the mean."""
    for take, total in _reductions(graph):
        if take is total:
            continue

        def edit(g: Any, where: Any, a: fx.Node = take, b: fx.Node = total) -> None:
            change(where[b], replace(op_of(b), src=op_of(a).src))
            g.erase_node(where[a])

        yield f"{total.name} without its take", edit


def hop_lost(graph: fx.Graph) -> Iterator[Mutant]:
    """Of two hops: only the first, whose sum counts for the mean; or only the second, of what one rank has."""
    for first, second in itertools.pairwise(_reductions(graph)):
        if op_of(first[0]).bucket != op_of(second[0]).bucket:
            continue

        def alone(g: Any, where: Any, first: Any = first, second: Any = second) -> None:
            change(where[first[1]], replace(op_of(first[1]), dst=op_of(second[1]).dst, hop=op_of(second[1]).hop))
            for node in reversed(list(dict.fromkeys(second))):
                g.erase_node(where[node])

        yield f"{first[1].name} without the next hop", alone

        def unsummed(g: Any, where: Any, first: Any = first, second: Any = second) -> None:
            change(where[second[0]], replace(op_of(second[0]), src=op_of(first[0]).src))
            for node in reversed(list(dict.fromkeys(first))):
                g.erase_node(where[node])

        yield f"{second[0].name} without the hop before", unsummed


def hop_changed(graph: fx.Graph) -> Iterator[Mutant]:
    """A hop among other ranks than its own: the one before it or after it."""
    for node, op in _of(graph, Reduction):
        for hop in (op.hop - 1, op.hop + 1):
            if hop >= 0:
                yield _changed(node, hop=hop)


def other_bucket(graph: fx.Graph) -> Iterator[Mutant]:
    """A write or a deposit that says the number of a bucket that has such a slot as well."""
    buckets = sorted({op.bucket for _, op in _of(graph, Write | Deposit)})
    for node, op in _of(graph, Cast | Deposit):
        other = next((b for b in buckets if b != op.bucket), None)
        if other is not None and op.slots:
            yield _changed(node, bucket=other)


def landing_changed(graph: fx.Graph) -> Iterator[Mutant]:
    """With offload: what was to land in host memory does not, or twice."""
    shards, copies = _nodes(graph, StageShard), _nodes(graph, CopyToHost)
    for k, copy in enumerate(copies):
        chain = (shards[k], copy) if shards else (copy,)
        yield _erased(*chain)
        yield _doubled(*chain)


KINDS: dict[str, Callable[[fx.Graph], Iterator[Mutant]]] = {
    "slot dropped": slot_dropped, "slots swapped": slots_swapped, "write deleted": write_deleted,
    "deposit deleted": deposit_deleted, "added twice": added_twice, "elements missed": elements_missed,
    "span changed": spans_changed, "accumulate deleted": accumulate_deleted, "reduction deleted": reduction_deleted,
    "reduction bypassed": reduction_bypassed, "hop lost": hop_lost, "hop changed": hop_changed,
    "taken wrongly": taken_wrongly, "difference lost": difference_lost,
    "other bucket": other_bucket, "landing changed": landing_changed,
}  # fmt: skip


def of(graph: fx.Graph, every: int = 1, first: int = 0) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the broken schedule); of each kind one of ``every`` so many."""
    for kind, make in KINDS.items():
        for name, edit in itertools.islice(make(graph), first % every, None, every):
            yield kind, name, edited(graph, edit)
