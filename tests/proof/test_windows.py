"""Graphs with windows: verify rejects whatever reads a weight outside of its window, and so does running them."""

from __future__ import annotations

import collections
import math
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import test_weights
import torch
import weights_mutants
from test_weights import make
from tiers import FULL
from torch import Tensor, fx

from zc.errors import RaceError
from zc.passes import verify as without_parts
from zc.passes.pipeline import examine, verify
from zc.planning.plan import Plan
from zc.schedule.nodes import ops, put
from zc.schedule.spec import FreeWeights, Gather, ReadWeights, Segment, TakeWeights

pytestmark = pytest.mark.check

Views = Mapping[str, int]  # segment -> the number of its input of which its second result is a view


def case(seed: int) -> tuple[fx.Graph, Plan, Views]:
    """Windows of one or two parameters, each read by a segment or two; some segments hand on a view of a weight."""
    rng, graph, views = random.Random(seed), fx.Graph(), dict[str, int]()
    plan = make([32, 64, 96], world_size=2, reads=False)
    values, params = [graph.placeholder("x")], {}
    for bucket in range(3):
        params[bucket, 0] = graph.placeholder(f"p{bucket}")
        params[bucket, 0].meta.update(weight=(bucket, 0), storage=bucket)

    def segment(inputs: list[fx.Node], view_of: int | None) -> list[fx.Node]:
        key = f"segment_{len(views)}_{rng.randrange(1000)}"
        call = put(graph, Segment(key, tuple(inputs)), name=key, stream="compute")
        outputs = [graph.call_function(operator.getitem, (call, k)) for k in range(1 + (view_of is not None))]
        outputs[0].meta["storage"] = 100 + len(list(graph.nodes))
        if view_of is not None:
            outputs[1].meta["storage"] = inputs[view_of].meta["storage"]
            views[key] = view_of
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
            (value,) = segment([value, *view], None)
        values.append(value)
        if rng.random() < 0.5:  # one that reads no weights
            values += segment([rng.choice(values), values[-1]], None)
    put(graph, TakeWeights(()), stream="compute")
    graph.output((values[-1], params[0, 0]))  # a parameter, saved for the backward: without its bytes
    return graph, plan, views


class Wrong(Exception):
    pass


def run(graph: fx.Graph, views: Views, *, others_first: bool) -> list[float]:
    """Twice, without zc: what the graph returns and keeps. Other streams than the main one are ahead of it, or after
    it."""
    store = {(bucket, 0): torch.full((2,), 1.0 + bucket, dtype=torch.float64) for bucket in range(3)}
    returned: list[float] = []
    for _ in range(2):
        interpreter = _Interpreter(views, store)
        for node in graph.nodes:
            if node.op == "placeholder":
                interpreter.values[node] = torch.ones(1, dtype=torch.float64) if node.name == "x" else nothing()
        calls = [n for n in graph.nodes if n.op == "call_function"]
        aside = [n for n in calls if n.meta.get("stream", "compute") != "compute"]
        main = [n for n in calls if n not in aside]
        for node in (*aside, *main) if others_first else (*main, *aside):
            interpreter.call(node)
        if interpreter.window:
            raise Wrong("a window stays open")
        output: Any = next(n for n in graph.nodes if n.op == "output").args[0]
        returned += [float(interpreter.values[n].sum()) for n in output if n.name != "p0"]
        returned += [float(tensor.sum()) for tensor in interpreter.deposits]
    return returned


class _Interpreter:
    """A window's weights are NaN after it, and so is for later windows what a segment was allowed to overwrite."""

    def __init__(self, views: Views, store: dict[Any, Tensor]) -> None:
        self.views, self.store = views, store
        self.values: dict[fx.Node, Any] = {}
        self.window: list[Tensor] = []
        self.deposits: list[Tensor] = []

    def call(self, node: fx.Node) -> None:
        getattr(self, node.target.__name__)(node, *node.args)  # type: ignore[union-attr]

    def take_weights(self, node: fx.Node, places: Any) -> None:
        for tensor in self.window:
            tensor.fill_(float("nan"))
        if any(place not in self.store for place in places):
            raise Wrong(f"no parameter {places}")
        self.window = [self.store[place].clone() for place in places]
        self.values[node] = list(self.window)

    def getitem(self, node: fx.Node, of: fx.Node, index: int) -> None:
        self.values[node] = self.values[of][index] if of in self.values else nothing()

    def segment(self, node: fx.Node, key: str, *used: fx.Node) -> None:
        inputs = [self.values.get(n, nothing()) for n in used]
        total = torch.stack([tensor.sum() for tensor in inputs]).sum().reshape(1)
        self.values[node] = [torch.sin(total + sum(map(ord, key)) % 17)]
        if key in self.views:
            self.values[node].append(inputs[self.views[key]][1:])
        for number in node.meta["segment"].meta["donated"] if "segment" in node.meta else ():
            take, index = used[number].args
            self.store[take.args[0][index]].fill_(float("nan"))  # type: ignore[union-attr, index]

    def deposit(self, node: fx.Node, bucket: int, slot: int, grad: fx.Node) -> None:
        self.deposits.append(self.values.get(grad, nothing()))


def nothing() -> Tensor:
    return torch.full((2,), float("nan"), dtype=torch.float64)


def is_wrong(graph: fx.Graph, views: Views) -> bool:
    for others_first in (True, False):
        try:
            values = run(graph, views, others_first=others_first)
        except Wrong:
            return True
        if any(math.isnan(value) for value in values):
            return True
    return False


def test_verify_and_a_run_agree_on_every_mutant() -> None:
    rejected: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for seed in range(100 if FULL else 12):
        graph, plan, views = case(seed)
        verify(graph, plan)
        assert not is_wrong(graph, views)
        for kind, name, mutant in weights_mutants.of_windows(graph):
            findings = examine(mutant, plan)
            total[kind] += 1
            rejected[kind] += bool(findings)
            assert bool(findings) == is_wrong(mutant, views), f"{seed} {kind}: {name}: {findings}"
    text = ", ".join(f"{kind} {rejected[kind]}/{total[kind]}" for kind in sorted(total))
    print(f"\nwindows, rejected and wrong: {sum(rejected.values())} of {sum(total.values())}: {text}")
    assert len(+rejected) >= 12


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
    assert "the window of take_weights is never ended" in text_of(lambda g, n: g.erase_node(n[3]))


def test_no_schedule_that_reads_sharded_weights_is_proved_without_the_part_that_looks() -> None:
    """Each node of sharded weights alone, and a graph that reads them outside of windows."""
    windows, plan, _ = case(0)
    assert not examine(windows, plan)
    a_pass, plan_of_pass, _ = test_weights.case(0)
    for graph, its_plan in ((windows, plan), (a_pass, plan_of_pass)):
        faults = without_parts.examine(graph, its_plan).faults
        kinds = TakeWeights | ReadWeights | FreeWeights
        num = sum(isinstance(op, kinds) or (isinstance(op, Gather) and op.dst.kind == "arena") for _, op in ops(graph))
        num += sum("weight" in node.meta for node in graph.find_nodes(op="placeholder"))
        assert num and sum("part (d) of the proof was not handed over" in fault for fault in faults) == num
        with pytest.raises(RaceError, match="was not handed over"):
            without_parts.verify(graph, its_plan)
