"""Every way to break a proved schedule by one edit. Names stay, so that a mutant's values compare with the intact
ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from torch import fx

from zc.passes.base import copy_graph
from zc.schedule.buffer import COMM, Buffer
from zc.schedule.nodes import change, ops, stream_of
from zc.schedule.spec import BucketOp, RecordEvent, Segment, Sync, WaitEvent, renamed

Edit = Callable[[fx.Graph, dict[fx.Node, fx.Node]], None]  # of a copy, given where each node went
Mutant = tuple[str, Edit]


def edited(graph: fx.Graph, edit: Edit) -> fx.Graph:
    new = copy_graph(graph)
    where = dict(zip(graph.nodes, new.nodes, strict=True))
    edit(new, where)
    new.lint()
    return new


def without_a_wait(graph: fx.Graph) -> Iterator[Mutant]:
    for node, op in ops(graph):
        if isinstance(op, WaitEvent):
            yield (
                f"no wait for {op.event} on {stream_of(node)} ({node.name})",
                lambda g, where, n=node: g.erase_node(where[n]),
            )


def record_before_producer(graph: fx.Graph) -> Iterator[Mutant]:
    before: dict[str, fx.Node] = {}
    for node, op in ops(graph):
        stream = stream_of(node)
        if isinstance(op, RecordEvent) and stream in before:
            producer = before[stream]
            yield (
                f"{op.event} recorded before {producer.name}",
                lambda g, where, n=node, p=producer: where[p].prepend(where[n]),
            )
        if not isinstance(op, Sync):
            before[stream] = node


def shorter_ring(graph: fx.Graph, kind: str = "flat_grad") -> Iterator[Mutant]:
    """One buffer less: the last one's users take one before."""
    used = sorted({b for _, op in ops(graph) for b in op.buffers.values() if b.kind == kind})
    for k, gone in enumerate(used):
        for other in used[:k]:

            def edit(g: fx.Graph, where: dict[fx.Node, fx.Node], gone: Buffer = gone, other: Buffer = other) -> None:
                for node, op in list(ops(g)):
                    if isinstance(op, BucketOp):
                        change(node, renamed(op, gone, other))

            yield f"{other} in place of {gone}", edit


def on_another_stream(graph: fx.Graph) -> Iterator[Mutant]:
    """A segment on comm: its inputs and its results are values of compute."""
    for node, op in ops(graph):
        if isinstance(op, Segment):

            def edit(g: fx.Graph, where: dict[fx.Node, fx.Node], n: fx.Node = node) -> None:
                where[n].meta["stream"] = COMM

            yield f"{node.name} on {COMM}", edit


KINDS = {
    "wait deleted": without_a_wait,
    "record before producer": record_before_producer,
    "ring shortened": shorter_ring,
    "segment on another stream": on_another_stream,
}


def of(graph: fx.Graph, every: int = 1) -> Iterator[tuple[str, str, fx.Graph]]:
    """(kind, what was done, the broken schedule); one of ``every`` so many, the others are not even made."""
    edits = ((kind, name, edit) for kind, make in KINDS.items() for name, edit in make(graph))
    for kind, name, edit in itertools.islice(edits, 0, None, every):
        yield kind, name, edited(graph, edit)
