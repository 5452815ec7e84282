"""The passes that make a schedule of a graph, and prove it. The first one gives every node the stream of its kind
(`zc.schedule.spec`).

Before and after (the stream in front, as `zc.schedule.nodes.text` prints it)::

    segment("segment_0", %x)                                  compute | segment("segment_0", %x)
    flatten_cast(0, "flat_grad[0]", (0,), [%g])        ->     compute | flatten_cast(0, "flat_grad[0]", (0,), [%g])
    reduce(0, "acc[0]", "flat_grad[0]")                          comm | reduce(0, "acc[0]", "flat_grad[0]")

Placeholders, getitems and the output get none. Without ``plan.overlap`` communication runs on compute. Copies and the
processor's work keep their streams, since the processor must be able to wait for a single copy. Where a reduction has
several hops, what the ranks of a host read of each other's memory has a stream of its own beside comm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import fx

from zc.passes import insert_events, verify
from zc.passes.base import Pass, copy_graph
from zc.passes.verify import ProofPart
from zc.planning.plan import Plan
from zc.schedule.buffer import COMM, COMM_HOST, COMPUTE
from zc.schedule.nodes import ops
from zc.schedule.spec import Op, Reduce


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    for node, op in ops(new):
        node.meta["stream"] = _stream(op, plan)
    return new


def _stream(op: Op, plan: Plan) -> str:
    if op.stream != COMM:
        return op.stream
    if not plan.overlap:
        return COMPUTE
    return COMM_HOST if isinstance(op, Reduce) and len(plan.hops) > 1 else COMM


PASS = Pass("place_on_streams", run, provides=frozenset({"streams"}))


def scheduling(*first: Pass, prove: bool, prefix: str = "e", parts: Sequence[ProofPart] = ()) -> tuple[Pass, ...]:
    """The passes ``first``, and those that make a schedule of their result. ``prove``: verify it; ``prefix``: of the
    names of its events, which are others where it runs piece by piece between schedules of its streams; ``parts``: of
    the proof, that features bring."""
    events = insert_events.PASS._replace(run=partial(insert_events.run, prefix=prefix))
    proof = verify.PASS._replace(run=partial(verify.run, parts=parts))
    return (*first, PASS, events, *([proof] if prove else []))
