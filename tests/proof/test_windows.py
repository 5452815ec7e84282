"""Graphs with windows: what reads a weight outside of its window is rejected, and named. test_certificate.py compares
what `verify` says of mutants with a checker that knows nothing of it."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

import pytest
import test_weights
from test_weights import make
from torch import fx

from zc.errors import RaceError
from zc.passes import verify as without_parts
from zc.passes.pipeline import examine
from zc.planning.plan import Plan
from zc.schedule.nodes import ops, put
from zc.schedule.spec import Deposit, FreeWeights, Gather, ReadWeights, Segment, TakeWeights

pytestmark = pytest.mark.check


def case(seed: int) -> tuple[fx.Graph, Plan]:
    """Windows of one or two parameters, each read by a segment or two; some segments hand on a view of a weight."""
    rng, graph = random.Random(seed), fx.Graph()
    plan = make([32, 64, 96], world_size=2, reads=False)
    values, params = [graph.placeholder("x")], {}
    for bucket in range(3):
        params[bucket, 0] = graph.placeholder(f"p{bucket}")
        params[bucket, 0].meta.update(weight=(bucket, 0), storage=bucket)

    def segment(inputs: list[fx.Node], view_of: int | None, *donated: int) -> list[fx.Node]:
        key = f"segment_{len(graph.nodes)}"
        call = put(graph, Segment(key, tuple(inputs)), name=key, stream="compute")
        call.meta["segment"] = fx.GraphModule({}, fx.Graph())
        call.meta["segment"].meta["donated"] = donated
        outputs = [graph.call_function(operator.getitem, (call, k)) for k in range(1 + (view_of is not None))]
        outputs[0].meta["storage"] = 100 + len(list(graph.nodes))
        if view_of is not None:
            outputs[1].meta["storage"] = inputs[view_of].meta["storage"]
        return outputs

    for _ in range(rng.randint(1, 4)):
        places = tuple(rng.sample(sorted(params), rng.randint(1, 2)))
        take = put(graph, TakeWeights(places), stream="compute")
        items = [graph.call_function(operator.getitem, (take, k)) for k in range(len(places))]
        for item, place in zip(items, places, strict=True):
            item.meta["storage"] = params[place].meta["storage"]
        has_view = rng.random() < 0.5
        value, *view = segment([values[-1], *items], 1 if has_view else None)
        if view:
            (value,) = segment([value, *view], None, 0)  # which nobody else reads
        values.append(value)
        if rng.random() < 0.5:  # one that reads no weights
            values += segment([rng.choice(values), values[-1]], None)
    put(graph, TakeWeights(()), stream="compute")
    graph.output((values[-1], params[0, 0]))  # a parameter, saved for the backward: without its bytes
    return graph, plan


def test_what_is_wrong_is_named() -> None:
    def text_of(change: Callable[[fx.Graph, list[fx.Node]], object]) -> str:
        graph = fx.Graph()
        x, p = graph.placeholder("x"), graph.placeholder("p")
        p.meta.update(weight=(1, 0), storage=7)
        take = put(graph, TakeWeights(((1, 0),)), stream="compute")
        item = graph.call_function(operator.getitem, (take, 0))
        call = put(graph, Segment("s", (x, item)), stream="compute")
        end = put(graph, TakeWeights(()), stream="compute")
        graph.output((graph.call_function(operator.getitem, (call, 0)), p))
        change(graph, [take, item, call, end, p])
        return "\n".join(examine(graph, make([32, 64], world_size=2, reads=False)).faults)

    assert text_of(lambda g, n: None) == ""
    assert "segment reads the weights %getitem (bucket 1, slot 0) of the window of take_weights" in text_of(
        lambda g, n: n[2].prepend(n[3])
    )
    assert "segment reads %p (bucket 1, slot 0), which has no bytes outside of windows" in text_of(
        lambda g, n: n[2].replace_input_with(n[1], n[4])
    )
    assert "deposit keeps the weights %getitem" in text_of(lambda g, n: _keep(g, n[2], n[1]))
    assert "the window of take_weights is never ended" in text_of(lambda g, n: g.erase_node(n[3]))


def _keep(graph: fx.Graph, after: fx.Node, value: fx.Node) -> None:
    with graph.inserting_after(after):
        put(graph, Deposit(0, 0, value), stream="compute")


def test_no_schedule_that_reads_sharded_weights_is_proved_without_the_part_that_looks() -> None:
    """Each node of sharded weights alone, and a graph that reads them outside of windows."""
    windows, plan = case(0)
    assert not examine(windows, plan)
    a_pass, plan_of_pass = test_weights.case(0)
    for graph, its_plan in ((windows, plan), (a_pass, plan_of_pass)):
        faults = without_parts.examine(graph, its_plan).faults
        kinds = TakeWeights | ReadWeights | FreeWeights
        num = sum(isinstance(op, kinds) or (isinstance(op, Gather) and op.dst.kind == "arena") for _, op in ops(graph))
        num += sum("weight" in node.meta for node in graph.find_nodes(op="placeholder"))
        assert num and sum("part (d) of the proof was not handed over" in fault for fault in faults) == num
        with pytest.raises(RaceError, match="was not handed over"):
            without_parts.verify(graph, its_plan)
