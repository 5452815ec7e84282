"""The pass protocol (docs/design.md): a named pure function from graph and plan to a new graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

if TYPE_CHECKING:
    from zc.passes.verify import Part
    from zc.planning.plan import Plan


class Pass(NamedTuple):
    """One pass. ``run`` returns a new graph and does not change its input. It must not use a collective, the clock, the
    environment, random numbers or the rank."""

    name: str
    run: Callable[[fx.Graph, Plan], fx.Graph]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()


class Pipelines(NamedTuple):
    """The passes that make a schedule of a backward graph, and of a forward graph whose weights come while it reads
    them. ``landing`` makes the graph that copies one bucket's reduced gradient to host memory, with offload.
    ``parts``: of the proof, that features bring."""

    backward: tuple[Pass, ...]
    forward: tuple[Pass, ...]
    landing: Callable[[Plan, int], fx.Graph] | None = None
    parts: tuple[Part, ...] = ()


def copy_node(node: fx.Node, graph: fx.Graph, where: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copies a node to the end of another graph, with its name and metadata. ``where`` maps old nodes to new ones."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: where[n])
    where[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name, type_expr=node.type)
    # the record names nodes of the old graph, and would keep it alive
    where[node].meta = {key: item for key, item in node.meta.items() if key != "record"}
    return where[node]


def copy_graph(graph: fx.Graph, where: dict[fx.Node, fx.Node] | None = None) -> fx.Graph:
    """A copy with the same node names and metadata. ``where``: an empty dict, which then maps old nodes to new ones."""
    new = fx.Graph(owning_module=graph.owning_module)
    where = {} if where is None else where
    for node in graph.nodes:
        copy_node(node, new, where)
    return new


def returned_by(graph: fx.Graph) -> list[Any]:
    """The values that the graph returns, as a list."""
    returned: Any = graph.output_node().args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def is_random(node: fx.Node) -> bool:
    """Whether a second run gives other values."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
