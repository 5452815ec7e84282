"""Parts (c), (d) and (e) of the proof: each gradient arrives once, each launch completes once, nothing is read after
release.

These don't depend on streams: they hold of the program order in which the nodes are issued.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zc.errors import RaceError
from zc.plan import Plan
from zc.schedule import (
    accesses,
    accumulate,
    accumulate_cast,
    deposit,
    flatten_cast,
    launch_reduce,
    overlap,
    release,
    wait_reduce,
)


def check(graph: fx.Graph, nodes: Sequence[fx.Node], plan: Plan | None) -> None:
    """Raises RaceError naming the bucket and the nodes."""
    _gradients(nodes, plan)
    _launches(nodes)
    _releases(graph)


def _int(value: object) -> int:
    return int(str(value))


def _gradients(nodes: Sequence[fx.Node], plan: Plan | None) -> None:
    holds: dict[str, int] = {}  # buffer -> bucket whose gradient it holds
    written: set[tuple[int, int]] = set()
    reduced: set[int] = set()
    for node in nodes:
        if node.target in (flatten_cast, accumulate_cast, deposit):
            bucket = _int(node.args[0])
            given = node.args[1] if node.target is deposit else node.args[2]
            slots = [_int(k) for k in given] if isinstance(given, (list, tuple)) else [_int(given)]
            for slot in slots:
                if (bucket, slot) in written:
                    raise RaceError(f"the gradient of bucket {bucket}, slot {slot} is written twice ({node.name})")
                written.add((bucket, slot))
            if plan is not None and any(slot >= len(plan.buckets[bucket].slots) for slot in slots):
                raise RaceError(f"{node.name} writes slots {slots} of bucket {bucket}, which has fewer")
            if node.target is deposit:
                continue
            if bucket in reduced:
                raise RaceError(f"{node.name} writes a gradient of bucket {bucket} after its reduction")
            holds[str(node.args[1])] = bucket
        elif node.target is launch_reduce:
            bucket, src = _int(node.args[0]), str(node.args[2])
            _reads(node, bucket, src, holds)
            reduced.add(bucket)
            holds[str(node.args[1])] = bucket
        elif node.target is accumulate:
            bucket, src = _int(node.args[0]), str(node.args[2])
            _reads(node, bucket, src, holds)
            reduced.add(bucket)


def _reads(node: fx.Node, bucket: int, src: str, holds: dict[str, int]) -> None:
    if src.startswith("acc["):  # an accumulator holds its own bucket, perhaps from earlier microbatches
        if src != f"acc[{bucket}]":
            raise RaceError(f"{node.name} reduces bucket {bucket} out of {src}")
        return
    if holds.get(src) != bucket:
        raise RaceError(f"{node.name} reads bucket {bucket} from {src}, which holds bucket {holds.get(src)}")


def _launches(nodes: Sequence[fx.Node]) -> None:
    in_flight: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.target is wait_reduce:
            work = node.args[1]
            if not isinstance(work, fx.Node) or in_flight.pop(work, None) is None:
                raise RaceError(f"{node.name} completes {work}, which is not in flight")
            if (node.args[2], node.args[3]) != (work.args[1], work.args[2]):
                raise RaceError(f"{node.name} names other buffers than the launch {work.name} that it completes")
            continue
        reads, writes = accesses(node)
        for launch in in_flight:
            flying_reads, flying_writes = accesses(launch)
            for mine, theirs in ((writes, (*flying_reads, *flying_writes)), (reads, flying_writes)):
                for a in mine:
                    for b in theirs:
                        if overlap(a, b):
                            raise RaceError(f"{node.name} touches {a.buffer} while {launch.name} is in flight")
        if node.target is launch_reduce:
            in_flight[node] = node
    for launch in in_flight:
        raise RaceError(f"{launch.name} of bucket {launch.args[0]} is never completed")


def _releases(graph: fx.Graph) -> None:
    released: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used in released:
                raise RaceError(f"{node.name} uses %{used.name} after {released[used].name} gave it back")
        if node.op == "call_function" and node.target is release:
            released.update(dict.fromkeys(node.all_input_nodes, node))
