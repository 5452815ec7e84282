"""The certificate of a proved schedule: a JSON file that `passes/check_certificate.py` proves again without zc.

It states each node's record (stream, events, extents, what its buffers hold before and after it), and for each two
nodes of two streams that conflict the chain of order that covers them. What comes before and after the schedule
(docs/proof.md, "At entry") is nodes, too, marked ``outside``: so the checker has no rule of it. An extent is
[start, stop); a stop of null is the end of the buffer. (The idea: proof-carrying code, Necula, POPL 1997.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from zc.passes.exactly_once import spans_of, values_of
from zc.planning.layout import ALIGN_NBYTES
from zc.schedule.buffer import (
    AT_EXIT,
    HOST,
    MAIN,
    NOTHING,
    Access,
    Buffer,
    at_entry,
    carried_event,
    facts_of,
    overlap,
    rows_for,
)
from zc.schedule.nodes import accesses, op_of, results, shared_buffers, steps, stream_of
from zc.schedule.spec import (
    BucketOp,
    Cast,
    CopyToHost,
    Deposit,
    FreeWeights,
    Gather,
    ReadWeights,
    RecordEvent,
    Reduction,
    Segment,
    Sync,
    TakeWeights,
    WaitEvent,
    Write,
)

if TYPE_CHECKING:
    from zc.passes.base import Debt
    from zc.planning.plan import Plan

Json = dict[str, Any]
_END, _PROCESSOR_END = "the end", "the processor's end"  # events; no node of a graph has a space in its name


def certificate(graph: fx.Graph, plan: Plan) -> Json:
    """The certificate of a schedule. One that has a race gets a conflict whose chain is null, which no checker
    accepts."""
    inside = list(steps(graph))
    touched = sorted({a.buffer for n in inside for group in accesses(n) for a in group if isinstance(a.buffer, Buffer)})
    shared = sorted(shared_buffers(graph, plan))
    streams = {stream_of(n) for n in inside}
    lasting = {buffer.carrier for buffer in touched}
    placeholders = [f"%{n.name}" for n in graph.nodes if n.op == "placeholder"]
    nodes = list(_before(touched, shared, placeholders))
    for node in inside:
        nodes.append(_inside(node, plan))
        if nodes[-1]["stream"] not in lasting | {MAIN} and not isinstance(op_of(node), Sync):
            nodes[-1]["writes"].append([f"all of {stream_of(node)}", 0, None])
    values = _weights_among(graph)
    returned: list[list[Any]] = [[f"%{n.name}", 0, None] for n in graph.output_node().all_input_nodes]
    # the caller may write or free what is returned
    nodes.append(_node("output", MAIN, writes=returned, records=[_END]))
    nodes[-1]["reads"] = [each for each in returned if values.get(each[0])]
    nodes[-1]["reads"] += [[f"all of {stream}", 0, None] for stream in sorted(streams - lasting - {MAIN})]
    # shared ones; and others where a stream that outlives the schedule is not their carrier: the end must cover it
    elsewhere = {a.buffer for n in inside if stream_of(n) in lasting - {MAIN} for group in accesses(n) for a in group
                 if isinstance(a.buffer, Buffer) and a.buffer.carrier != stream_of(n)}  # fmt: skip
    nodes += _after(sorted({*shared, *elsewhere}), shared)
    debt: Debt | None = graph.output_node().meta.get("debt")
    buckets = sorted({op.bucket for n in inside if isinstance(op := op_of(n), Write | Deposit | Reduction)})
    return {
        "format": 1,
        "nodes": nodes,
        "conflicts": _conflicts(nodes),
        # what the buffers hold at entry, of which bucket; all others hold nothing
        "entry": {str(b): at_entry(b) for b in touched},
        "exit": {str(b): AT_EXIT.get(b.kind, (NOTHING,)) for b in touched},
        "buckets": {
            b: {"numel": plan.bucket(b).numel, "slots": [[s.offset, s.offset + s.numel] for s in plan.bucket(b).slots]}
            for b in buckets
        },
        "caller": MAIN,
        "uses": (uses := graph.output_node().meta.get("uses")) and [[k, list(use)] for k, use in enumerate(uses)],
        "weights": {
            "values": sorted(values), "cap": plan.weight_cap, "align": ALIGN_NBYTES,
            "nbytes": {bucket.index: bucket.nbytes for bucket in plan.with_weights},
            "slots": {b.index: [k for k, s in enumerate(b.slots) if not s.is_left] for b in plan.with_weights},
        },
        "owes": debt and {  # null: nobody has said what is owed
            "gradients": sorted(debt.gradients), "whole": sorted(debt.whole(plan)),
            "reduced": sorted(debt.reductions(plan)), "landed": sorted(debt.landings(plan)),
        },
    }  # fmt: skip


def _node(name: str, stream: str, *, writes: Iterable[Any] = (), waits: Iterable[str] = (),
          records: Iterable[str] = (), outside: bool = True) -> Json:  # fmt: skip
    """A node waits, then reads and writes, then records."""
    return {"name": name, "stream": stream, "waits": list(waits), "reads": [], "writes": list(writes),
            "records": list(records), "outside": outside}  # fmt: skip


def _before(touched: list[Buffer], shared: list[Buffer], placeholders: list[str]) -> Iterator[Json]:
    """What comes before the schedule. What the issuing thread did with host memory is done, for the processor, too;
    what it has issued on main is not."""
    past = {b: [str(b), 0, None] for b in touched}
    on_host = [past[b] for b in touched if b.on_host]
    yield _node("the caller in host memory", MAIN, writes=on_host, records=["the entry"])
    yield _node("entry of the processor", HOST, waits=["the entry"])
    values = [[name, 0, None] for name in placeholders]
    yield _node("the caller", MAIN, writes=[*(past[b] for b in touched if not b.on_host), *values])
    for b in shared:
        yield _node(f"earlier use of {b}", f"past {b}", writes=[[str(b), 0, None]], records=[carried_event(b)])
    for carrier in sorted({b.carrier for b in shared}):  # it comes after its own earlier uses
        yield _node(f"entry of {carrier}", carrier, waits=[carried_event(b) for b in shared if b.carrier == carrier])


def _after(buffers: list[Buffer], shared: list[Buffer]) -> Iterator[Json]:
    """Later schedules: they start when main is done, in host memory when the processor is."""
    yield _node("end of the processor", HOST, records=[_PROCESSOR_END])
    for b in buffers:
        carried = [carried_event(b)] if b in shared else []
        end = _PROCESSOR_END if b.on_host and b in shared else _END
        yield _node(f"later use of {b}", f"future {b}", writes=[[str(b), 0, None]], waits=[end, *carried])


def _inside(node: fx.Node, plan: Plan) -> Json:
    op = op_of(node)
    stated = _node(node.name, stream_of(node), outside=False)
    stated["reads"], stated["writes"] = ([_extent(a) for a in group] for group in accesses(node))
    if isinstance(op, WaitEvent | RecordEvent):
        stated["waits" if isinstance(op, WaitEvent) else "records"] = [op.event]
    if isinstance(op, BucketOp):
        stated |= {"bucket": op.bucket, "contents": _contents(op, plan)}
    if isinstance(op, Write | Deposit):
        stated["gradient"] = _gradient(node, op, plan)
    if isinstance(op, CopyToHost):
        stated["done"] = "landed"
    elif isinstance(op, Reduction) and op.brings_mean(plan):
        stated["done"] = "reduced"
    return stated | _of_weights(node)


def _of_weights(node: fx.Node) -> Json:
    """What it does with sharded weights, and with values of them."""
    op = op_of(node)
    if isinstance(op, Gather) and op.dst.kind == "arena":
        return {"gathers": [str(op.dst), op.bucket, *(op.extent or (0, 0))]}
    if isinstance(op, ReadWeights):
        uses = [[str(op.buffer), bucket, *span] for bucket, span in zip(op.buckets, op.spans, strict=True)]
        return {"use": [op.use, list(op.buckets)], "uses": uses}
    if isinstance(op, FreeWeights):
        return {"frees": [[str(op.buffer), op.bucket, op.start, op.stop]]}
    if isinstance(op, TakeWeights):
        return {"window": op.places}
    kept: Iterable[fx.Node | None] = ()
    if isinstance(op, Deposit | Cast):
        kept = values_of(node, op)
    elif isinstance(op, Segment) and (body := node.meta.get("segment")) is not None:
        kept = [op.inputs[k] for k in body.meta.get("donated", ())]  # it may overwrite them
    return {"keeps": names} if (names := [f"%{value.name}" for value in kept if value is not None]) else {}


def _weights_among(graph: fx.Graph) -> dict[str, bool]:
    """The values that are sharded weights, or share storage with one; and whether the graph may not return them, as it
    may its own arguments."""
    arguments = [n for n in graph.find_nodes(op="placeholder") if "weight" in n.meta]
    inside = [value for n in steps(graph) for value in results(n)]
    taken = [value for n in steps(graph) if isinstance(op_of(n), TakeWeights) for value in results(n)]
    storages = {value.meta.get("storage") for value in (*arguments, *taken)} - {None}
    others = [value for value in inside if taken and value.meta.get("storage") in storages]
    named = {f"%{value.name}": True for value in (*taken, *others)}
    return {f"%{value.name}": False for value in arguments} | named


def _contents(op: BucketOp, plan: Plan) -> list[tuple[str, list[list[str]]]]:
    """For each of its buffers, one after the other, what it may hold before, each with what it holds after."""
    stated = []
    for name in dict.fromkeys((*(row.field for row in op.contents), *op.writes)):
        if (buffer := op.buffers.get(name)) is not None:
            rows = rows_for(op, name, buffer, facts_of(plan), len(plan.hops))
            stated.append((str(buffer), [[need, row.leaves] for row in rows for need in row.needs]))
    return stated


def _gradient(node: fx.Node, op: Write | Deposit, plan: Plan) -> Json:
    """The slots that it brings, each with the slots of which its value is the gradient; and the elements."""
    return {
        "buffer": None if isinstance(op, Deposit) else str(op.buffer),
        "extents": [list(span) for span in spans_of(op, plan)],
        "slots": op.slots,
        "gradient_of": [sorted(value.meta.get("gradient_of", ())) for value in values_of(node, op)],
    }


def _extent(access: Access) -> list[Any]:
    return [str(access.buffer), access.start, None if access.stop == Access("").stop else access.stop]


# --- conflicts and their chains ---


def _conflicts(nodes: list[Json]) -> list[Json]:
    """Each two nodes of two streams that conflict, with the chain that orders them: a node, a later one of its stream
    that records an event, one that waits for it, and so on; null where nothing does."""
    touches: dict[str, list[tuple[int, Access, bool]]] = {}
    for k, node in enumerate(nodes):
        for key in ("reads", "writes"):
            for buffer, start, stop in node[key]:
                access = Access(buffer, start, Access("").stop if stop is None else stop)
                touches.setdefault(buffer, []).append((k, access, key == "writes"))
    found: dict[int, dict[int, str]] = {}  # the first node -> the second, and a buffer
    for buffer, mine in touches.items():
        for (i, a, writes), (j, b, also) in itertools.combinations(mine, 2):
            if not (writes or also) or nodes[i]["stream"] == nodes[j]["stream"] or not overlap(a, b):
                continue
            if not (nodes[i]["outside"] and nodes[j]["outside"]):
                found.setdefault(i, {})[j] = buffer
    sources, conflicts = _sources(nodes), []
    for i, others in sorted(found.items()):
        ways = _ways(nodes, sources, i, max(others))
        for j, buffer in sorted(others.items()):
            way = ways.get(nodes[j]["stream"])
            chain = [nodes[k]["name"] for k in dict.fromkeys((*way, j))] if way and way[-1] <= j else None
            conflicts.append({"buffer": buffer, "nodes": [nodes[i]["name"], nodes[j]["name"]], "chain": chain})
    return conflicts


def _sources(nodes: list[Json]) -> list[tuple[int, int]]:
    """(record, wait), by wait."""
    latest: dict[str, int] = {}
    sources = []
    for k, node in enumerate(nodes):
        sources += [(latest[event], k) for event in node["waits"] if event in latest]
        latest |= dict.fromkeys(node["records"], k)
    return sources


def _ways(nodes: list[Json], sources: list[tuple[int, int]], first: int, last: int) -> dict[str, list[int]]:
    """For each stream the way from ``first`` to the first node there that comes after it; up to node ``last``."""
    ways = {nodes[first]["stream"]: [first]}
    for record, wait in sources:
        if wait > last:
            break
        way = ways.get(nodes[record]["stream"])
        if way is not None and way[-1] <= record and nodes[wait]["stream"] not in ways:
            ways[nodes[wait]["stream"]] = [*way, record, wait]
    return ways
