"""A compiled graph as AOTAutograd's cache keeps it: as the graph that AOTAutograd has made.

A later process whose Dynamo graph has the same key gets that graph back, and zc's hook compiles it as if it had just
been traced: under the plan of this run, with a schedule that is proved anew, and segments out of Inductor's own cache.
So no stale schedule can run. An entry depends on one choice of zc's, which is part of the key: whether the forward is a
schedule. The backward is traced with the strides of what the forward saves, and these differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from zc import torch_private
from zc.compiler.traced import Hook, Traced
from zc.passes.base import copy_graph

# They name modules and functions of the program, and are for logs.
_NOT_KEPT = frozenset(
    ("example_value", "from_node", "fwd_nn_module_stack", "fwd_source_fn_stack", "nn_module_stack", "source_fn_stack")
)
_hook: ContextVar[Hook] = ContextVar("hook")


class SavedGraph(torch_private.output_code_class()):  # type: ignore[misc]
    """``run`` is the compiled graph, boxed. ``traced`` is what it is made from, with AOTAutograd's metadata of the
    forward.

    Lifetime: ``traced`` is empty once the cache has had the chance to write it, or ``run`` is made from it.
    """

    def __init__(self, traced: Traced, hook: Hook) -> None:
        super().__init__()
        torch_private.boxed(self)  # on the object: wrappers copy its attributes
        graph = copy_graph(traced.gm.graph)
        for node in graph.nodes:
            node.meta = {key: item for key, item in node.meta.items() if key not in _NOT_KEPT}
        self.traced = [(traced._replace(gm=_module(traced.gm, graph)), torch_private.forward_metadata())]
        self.run = hook(traced._replace(gm=_module(traced.gm, traced.gm.graph)))

    def __call__(self, args: list[Any]) -> Any:
        return self.run(args)

    def __copy__(self) -> SavedGraph:
        copied = object.__new__(SavedGraph)
        copied.__dict__.update(self.__dict__)
        return copied

    def prepare_for_serialization(self) -> None:
        """Called on the copy of this object that the cache writes."""
        self.run = None

    def __getstate__(self) -> dict[str, Any]:
        ((traced, metadata),) = self.traced
        kwargs = {k: item for k, item in traced.kwargs.items() if isinstance(item, (bool, int, str, list, tuple))}
        content = torch_private.dump_graph(traced.gm, (traced._replace(kwargs=kwargs), metadata))
        return {**self.__dict__, "traced": content}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises for content that can't be read: torch warns, and the graph is traced again."""
        traced, metadata = torch_private.load_graph(state["traced"])
        if not isinstance(traced, Traced):  # dill, where it is installed, makes a tuple for a class that is gone
            raise TypeError(f"the graph was kept as a {type(traced).__module__}.{type(traced).__name__}, of another zc")
        gm = _module(traced.gm, traced.gm.graph)
        self.__dict__.update(state, traced=[(traced._replace(gm=gm), metadata)])

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: dict[str, Any]) -> None:
        """Called after a cache hit, with the arguments that are this process's own. AOTAutograd compiles without grad
        mode; segments belong to the global state in which they were compiled."""
        traced, metadata = self.traced.pop()
        with torch_private.with_forward_metadata(metadata), torch.no_grad():
            self.run = _hook.get()(traced._replace(kwargs={**graph_kwargs, **traced.kwargs}))


@contextlib.contextmanager
def cached(hook: Hook) -> Iterator[Hook]:
    """Inside, graphs out of the cache go through ``hook``. Yields the hook for those that are traced."""
    graphs: list[SavedGraph] = []

    def compile_and_keep(traced: Traced) -> SavedGraph:
        graphs.append(SavedGraph(traced, hook))
        return graphs[-1]

    token = _hook.set(hook)
    try:
        yield compile_and_keep
    finally:
        _hook.reset(token)
        for graph in graphs:
            graph.traced.clear()


def _module(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """``graph`` with no more of ``gm`` than it reads: Inductor's key has what a module holds and the name of its class,
    and must be the same for a graph out of the cache."""
    return fx.GraphModule({node.target: attrgetter(node.target)(gm) for node in graph.find_nodes(op="get_attr")}, graph)
