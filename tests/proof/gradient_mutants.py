"""Every way to lose, cut, double or misplace a gradient by one edit of a proved schedule. (``meta["is_none"]``: of a
flush's input for which nothing came in this run, and nothing could be lost.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from mutants import Mutant, edited
from torch import fx

from zc.schedule.nodes import (
    accumulate,
    accumulate_cast,
    copy_to_host,
    deposit,
    flatten_cast,
    launch_reduce,
    stage_shard,
    steps,
    wait_reduce,
    wgrad_into,
)

_CASTS = (flatten_cast, accumulate_cast)
_WRITES = (*_CASTS, wgrad_into, deposit)


def _changed(node: fx.Node, **changes: Any) -> Mutant:
    """``node`` with other arguments, by position (``a3=...``), or other spans."""

    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        new = where[node]
        args = list(new.args)
        for key, value in changes.items():
            if key == "spans":
                new.kwargs = {**new.kwargs, "spans": value}
            else:
                args[int(key[1:])] = fx.map_arg(value, lambda n: where[n])
        new.args = tuple(args)

    return f"{node.name} with {changes}", edit


def _erased(*nodes: fx.Node) -> Mutant:
    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        for node in reversed(nodes):
            g.erase_node(where[node])

    return f"without {', '.join(n.name for n in nodes)}", edit


def _doubled(*nodes: fx.Node) -> Mutant:
    """The nodes once more, behind the last of them."""

    def edit(g: fx.Graph, where: dict[fx.Node, fx.Node]) -> None:
        last = where[nodes[-1]]
        for node in nodes:
            with g.inserting_after(last):
                last = g.call_function(node.target, where[node].args, where[node].kwargs)
            last.meta = dict(node.meta)

    return f"twice {', '.join(n.name for n in nodes)}", edit


def _of(graph: fx.Graph, *kinds: object) -> list[fx.Node]:
    return [n for n in steps(graph) if n.target in kinds]


def _without(items: Any, k: int) -> Any:
    return type(items)(item for j, item in enumerate(items) if j != k)


def slot_dropped(graph: fx.Graph) -> Iterator[Mutant]:
    for node in _of(graph, *_CASTS):
        for k in (k for k, grad in enumerate(node.args[3]) if not grad.meta.get("is_none")):
            yield _changed(node, a2=_without(node.args[2], k), a3=_without(list(node.args[3]), k))


def slots_swapped(graph: fx.Graph) -> Iterator[Mutant]:
    """Two gradients of one bucket take each other's place."""
    for node in _of(graph, *_CASTS):
        for k, (first, second) in enumerate(itertools.pairwise(node.args[3])):
            if first is not second and not (first.meta.get("is_none") and second.meta.get("is_none")):
                grads = list(node.args[3])
                grads[k : k + 2] = second, first
                yield _changed(node, a3=grads)
    for first, second in itertools.pairwise(_of(graph, wgrad_into)):
        if first.args[0] == second.args[0]:

            def edit(g: Any, where: Any, a: fx.Node = first, b: fx.Node = second) -> None:
                where[a].args, where[b].args = (*b.args[:5], *where[a].args[5:]), (*a.args[:5], *where[b].args[5:])

            yield f"{first.name} in the slot of {second.name}", edit
    for first, second in itertools.pairwise(_of(graph, deposit)):
        if first.args[2] is not second.args[2]:

            def swap(g: Any, where: Any, a: fx.Node = first, b: fx.Node = second) -> None:
                where[a].args, where[b].args = (*b.args[:2], where[a].args[2]), (*a.args[:2], where[b].args[2])

            yield f"{first.name} for {second.name}", swap


def write_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    for node in _of(graph, *_CASTS, wgrad_into):
        if node.target is not flatten_cast or node.kwargs.get("spans", True):
            yield _erased(node)


def deposit_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    yield from map(_erased, _of(graph, deposit))


def added_twice(graph: fx.Graph) -> Iterator[Mutant]:
    """What adds, once more: the same write of a ring buffer again would change nothing."""
    for node in _of(graph, accumulate_cast, accumulate, deposit, wgrad_into):
        spans_only = node.target is accumulate_cast and not node.args[2]
        in_ring = node.target is wgrad_into and str(node.args[1]).startswith("flat_grad[")
        if not spans_only and not in_ring:
            yield _doubled(node)


def elements_missed(graph: fx.Graph) -> Iterator[Mutant]:
    """wgrad_into one element short, long, or shifted by one."""
    for node in _of(graph, wgrad_into):
        start, stop = int(node.args[3]), int(node.args[4])
        for new in ((start, stop - 1), (start, stop + 1), (start + 1, stop + 1)):
            yield _changed(node, a3=new[0], a4=new[1])


def spans_changed(graph: fx.Graph) -> Iterator[Mutant]:
    """A span left out, or one element shorter at either end. (One that reaches into a slot which wgrad_into fills later
    on the same stream changes nothing.)"""
    for node in _of(graph, *_CASTS):
        spans = node.kwargs.get("spans", ())
        for k, (start, stop) in enumerate(spans):
            for new in ((), ((start + 1, stop),), ((start, stop - 1),)):
                yield _changed(node, spans=(*spans[:k], *new, *spans[k + 1 :]))


def accumulate_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    yield from map(_erased, _of(graph, accumulate))


def _reductions(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    yield from zip(_of(graph, launch_reduce), _of(graph, wait_reduce), _of(graph, accumulate), strict=True)


def reduction_deleted(graph: fx.Graph) -> Iterator[Mutant]:
    if _of(graph, launch_reduce):
        yield from (_erased(*chain) for chain in _reductions(graph))


def reduction_bypassed(graph: fx.Graph) -> Iterator[Mutant]:
    """Accumulated from what was to be sent: this rank's own gradient counts for the mean."""
    for launch, done, total in _reductions(graph) if _of(graph, launch_reduce) else ():

        def edit(g: Any, where: Any, a: fx.Node = launch, b: fx.Node = done, c: fx.Node = total) -> None:
            where[c].args = (*c.args[:2], a.args[2])
            g.erase_node(where[b])
            g.erase_node(where[a])

        yield f"{total.name} without its exchange", edit


def other_bucket(graph: fx.Graph) -> Iterator[Mutant]:
    """A write or a deposit that says the number of a bucket that has such a slot as well."""
    buckets = sorted({int(n.args[0]) for n in _of(graph, *_WRITES)})
    for node in _of(graph, *_CASTS, deposit):
        other = next((b for b in buckets if b != node.args[0]), None)
        if other is not None and (node.target is deposit or node.args[2]):
            yield _changed(node, a0=other)


def landing_changed(graph: fx.Graph) -> Iterator[Mutant]:
    """With offload: what was to land in host memory does not, or twice."""
    shards, copies = _of(graph, stage_shard), _of(graph, copy_to_host)
    for k, copy in enumerate(copies):
        chain = (shards[k], copy) if shards else (copy,)
        yield _erased(*chain)
        yield _doubled(*chain)


KINDS: dict[str, Callable[[fx.Graph], Iterator[Mutant]]] = {
    "slot dropped": slot_dropped, "slots swapped": slots_swapped, "write deleted": write_deleted,
    "deposit deleted": deposit_deleted, "added twice": added_twice, "elements missed": elements_missed,
    "span changed": spans_changed, "accumulate deleted": accumulate_deleted, "reduction deleted": reduction_deleted,
    "reduction bypassed": reduction_bypassed, "other bucket": other_bucket, "landing changed": landing_changed,
}  # fmt: skip


def of(graph: fx.Graph, every: int = 1, first: int = 0) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the broken schedule); of each kind one of ``every`` so many."""
    for kind, make in KINDS.items():
        for name, edit in itertools.islice(make(graph), first % every, None, every):
            yield kind, name, edited(graph, edit)
