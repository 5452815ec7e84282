"""Streams and events of the program's own in a compiled graph: no segment holds them, and each is refused by name.

A GPU's program is not needed to have such a graph: torch's operators for streams and the metadata that Dynamo gives to
what stands under ``torch.cuda.stream`` are put in by hand, in the forms of torch 2.11 (bare) and of 2.13 and later
(inside ``control_deps``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from graphs import chain, plan_for
from torch import fx, nn

import zc
from zc.errors import PassError
from zc.passes.base import copy_graph, run_passes
from zc.passes.pipeline import pipeline

pytestmark = pytest.mark.check

streams = pytest.importorskip("torch._dynamo.variables.streams", reason="this torch has no operators for streams")
OPERATORS = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("streams::")]


def some_layers() -> tuple[fx.Graph, list[str], fx.Node]:
    """A backward of 4 layers, and a node in its middle."""
    graph, names = chain(4)
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    return graph, names, nodes[len(nodes) // 2]


def number_or_value(kind: str, node: fx.Node) -> object:
    return {"Tensor": node, "str": "cuda"}.get(kind, 1)


def refused(graph: fx.Graph, names: list[str], says: str) -> None:
    for in_place in (False, True):
        with pytest.raises(PassError, match=says):
            run_passes(graph, plan_for(names), pipeline(in_place=in_place))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_bare_operator_is_refused(name: str) -> None:
    graph, names, middle = some_layers()
    target = getattr(torch.ops.streams, name).default
    args = tuple(number_or_value(str(a.type), middle) for a in target._schema.arguments)
    with graph.inserting_after(middle):
        graph.call_function(target, args)
    refused(graph, names, rf"{name}.* uses streams\.{name}.*torch\.compiler\.disable")


def test_one_inside_control_deps_is_refused() -> None:
    """As AOTAutograd has it: what goes on after the wait goes through it."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    graph, names, middle = some_layers()
    body = fx.Graph()
    passed = body.placeholder("dep_0")
    body.output((body.call_function(torch.ops.streams.wait_event.default, (1, 0)), passed))
    graph.owning_module.subgraph_wait_event = fx.GraphModule(nn.Module(), body)
    users = list(middle.users)
    with graph.inserting_after(middle):
        wait = graph.get_attr("subgraph_wait_event")
    with graph.inserting_after(wait):
        call = graph.call_function(control_deps, ((middle,), wait, middle))
    with graph.inserting_after(call):
        behind = graph.call_function(operator.getitem, (call, 1))
    behind.meta = dict(middle.meta)
    for user in users:
        user.replace_input_with(middle, behind)
    refused(graph, names, r"subgraph_wait_event.* uses streams\.wait_event\.default")


def test_a_node_on_a_stream_of_the_program_is_refused() -> None:
    graph, names, middle = some_layers()
    middle.meta["custom"] = {"stream": 3}
    refused(graph, names, f"{middle.name} .* uses stream 3")


def test_other_graphs_and_annotations_are_left_alone() -> None:
    """An activation that the forward made on a stream of its own is read as any other: the caller has joined it."""
    graph, names, middle = some_layers()
    plain = str(run_passes(graph, plan_for(names), pipeline(in_place=True))[0])
    marked = copy_graph(graph)
    where = dict(zip(graph.nodes, marked.nodes, strict=True))
    where[middle].meta["custom"] = {"name": "block"}
    next(iter(marked.nodes)).meta["custom"] = {"stream": 1}
    assert str(run_passes(marked, plan_for(names), pipeline(in_place=True))[0]) == plain


class Branch(nn.Module):
    """``first`` under the metadata of a stream of the program's. Not more on a CPU: where a value goes from one stream
    to another, torch asks a GPU how long things take."""

    def __init__(self, disabled: bool, detached: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.detached = detached
        self.branch = torch.compiler.disable(self._branch) if disabled else self._branch

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.annotate({"stream": 1}):
            return self.first(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.detached:
            with torch.no_grad():
                x = x + self.branch(x)
            return self.second(x).cos() + self.first(x)
        return self.second(x).cos() + self.branch(x)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()  # type: ignore[no-untyped-call]
    yield
    torch.compiler.reset()  # type: ignore[no-untyped-call]


def trained(model: nn.Module, **options: bool) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zc.compile(model, optimizer, backend="aot_eager", **options)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.usefixtures("fresh")
def test_a_backward_with_a_stream_says_so() -> None:
    with pytest.raises(PassError, match=r"uses stream 1.*torch\.compiler\.disable"):
        trained(Branch(disabled=False, detached=False))


@pytest.mark.usefixtures("fresh")
def test_under_compiler_disable_it_trains() -> None:
    torch.manual_seed(0)
    model = Branch(disabled=True, detached=False)
    plain = Branch(disabled=True, detached=False)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, wanted in zip(trained(model).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.usefixtures("fresh")
def test_a_forward_with_a_stream_stays_whole() -> None:
    """Without gradients there: no cut, since it waits for all weights before it starts."""
    model = trained(Branch(disabled=False, detached=True), overlap_gather=True)
    assert "waits for all gathers before it starts: it uses stream 1" in str(zc.explain(model))
