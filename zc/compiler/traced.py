"""A graph as AOTAutograd has traced it, before any pass: which parameters its inputs and outputs are, which values
share memory, and what its backward gets of the forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from zc import torch_private
from zc.errors import PassError, ZcError
from zc.passes.base import copy_graph, returned_by

if TYPE_CHECKING:
    from zc.compiler.blocks import Block
    from zc.engine.runtime import Runtime


class Traced(NamedTuple):
    """A graph of AOTAutograd's, with the arguments of an inner compiler. Its values have the marks of `mark_storages`.
    ``written``: positions of the inputs of Dynamo's graph that it writes in place; ``returned``: of those of which it
    returns views."""

    gm: fx.GraphModule
    kwargs: dict[str, Any]
    written: tuple[int, ...]
    returned: tuple[int, ...]

    @property
    def is_backward(self) -> bool:
        return bool(self.kwargs.get("is_backward"))

    @property
    def is_inference(self) -> bool:
        return bool(self.kwargs.get("is_inference"))


Hook = Callable[[Traced], Any]  # returns a boxed callable


def as_traced(gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
    """From the arguments that AOTAutograd calls its inner compiler with."""
    is_backward = bool(kwargs.get("is_backward"))
    had_regions = torch_private.inline_regions(gm)
    if is_backward:
        torch_private.apply_strides(gm, example_inputs)
    donated = torch_private.take_donated_inputs() if is_backward else ()
    mark_storages(gm.graph, () if had_regions else donated)  # the forward's regions may have saved a weight's view
    # it is Inductor's default; as an argument it would be part of the cache's key
    kwargs = {key: item for key, item in kwargs.items() if key != "get_decomp_fn"}
    return Traced(gm, kwargs, tuple(torch_private.written_inputs()), tuple(torch_private.returned_inputs()))


@dataclass
class Origin:
    """The graph of Dynamo's that AOTAutograd has made a forward and a backward of. ``names``: of the parameters among
    its inputs. ``block``: the one that it was traced for; None: it belongs to the very parameters that it is guarded
    by. ``with_grad``: positions of inputs that have a gradient; ``untrained``: of all others but sharded weights."""

    runtime: Runtime
    names: Sequence[str | None]
    untrained: Collection[int]
    with_grad: Collection[int]
    block: Block | None
    guard_identity: Callable[[], None]
    returned: list[int] = field(default_factory=list)  # inputs that are sharded weights, of which it returns views
    copied: set[str] = field(default_factory=set)  # inputs of the backward that are copies

    def name_of(self, node: fx.Node) -> str | None:
        """The parameter that an input of a forward or backward is.

        Relies on AOTAutograd's descriptors of inputs: ``placeholder.meta["desc"]`` is ``PlainAOTInput(idx)``
        (torch >= 2.9).
        """
        index = torch_private.input_index(node.meta.get("desc")) if node.op == "placeholder" else None
        return None if index is None else self.names[index]

    def is_of_block(self, node: fx.Node) -> bool:
        """Whether an input is a parameter of the block."""
        return self.block is not None and self.block.path(self.name_of(node)) is not None


class SavesAsEager:
    """Marks values of a joint graph that a backward may not derive again, since eager autograd saves them.

    It saves what an operation reads beside a value with a gradient. AOTAutograd may save an argument, a buffer or a
    frozen parameter instead, to derive such a value again, and code after a graph break or the loop may have written
    that by then (the next batch): a gradient would be made of the new values. Where the operation reads the input
    itself, eager autograd saves that, so its backward finds what was written, too, as does the compiled one.

    A clone of such an input (MoCo's ``queue.clone()``) is a value of its own. Inductor would put the input in its
    place: `keep_clones`, the first pass, gives it another name, which the marks take away again."""

    def __init__(self, origin: Origin) -> None:
        self._untrained, self._with_grad = frozenset(origin.untrained), frozenset(origin.with_grad)

    def keep_clones(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        indices = {node: torch_private.input_index(node.meta.get("desc")) for node in inputs}
        storages = {torch_private.storage_of(node) for node in inputs if indices[node] in self._untrained}
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            if torch_private.storage_of(node.all_input_nodes[0]) in storages - {None}:
                node.target = torch.ops.prims.clone.default

    def __repr__(self) -> str:  # part of the keys of its passes
        return f"zc {sorted(self._untrained)} {sorted(self._with_grad)}"

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.prims.clone.default):
            node.target = torch.ops.aten.clone.default
        inputs = graph.find_nodes(op="placeholder")
        index_of = {node: torch_private.input_index(node.meta.get("desc")) for node in inputs}
        derived = {node for node, index in index_of.items() if index in self._untrained}  # of them alone, or not
        storages = {torch_private.storage_of(node) for node in derived}
        with_grad = {node for node, index in index_of.items() if index in self._with_grad}
        of_backward = {node for node, index in index_of.items() if index is None}
        for node in graph.nodes:
            reads = node.all_input_nodes
            if node.op == "output" or not of_backward.isdisjoint(reads):
                of_backward.add(node)
            elif not with_grad.isdisjoint(reads):
                with_grad.add(node)
                for read in reads:
                    number = torch_private.storage_of(read)
                    if read in derived and number is not None:
                        torch_private.keep_for_backward(node if number in storages else read)
            elif not derived.isdisjoint(reads):
                derived.add(node)


def keep_from_writes(origin: Origin, traced: Traced) -> Traced:
    """A forward graph whose backward gets copies of values in the memory of inputs that the graph writes before it
    reads them. AOTAutograd saves such an input to derive from it again what eager autograd has saved (torch 2.11 to
    2.15): a gradient would be made of the new values.

    `CompiledBackward` refuses a buffer that the backward writes, too: its write would go to the copy."""
    before = traced.gm.graph
    written = {
        node.meta["storage"]
        for node in before.find_nodes(op="placeholder")
        if "storage" in node.meta and torch_private.input_index(node.meta.get("desc")) in traced.written
    }
    first = torch_private.num_forward_outputs()
    saved = returned_by(before)[first:] if first is not None else []
    if not any(isinstance(node, fx.Node) and node.meta.get("storage") in written for node in saved):
        return traced
    graph = copy_graph(before)
    outputs = returned_by(graph)
    inputs = graph.find_nodes(op="placeholder")
    fresh = max(node.meta.get("storage", 0) for node in graph.nodes) + 1
    copies: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(outputs[first:], first or 0):
        if not (isinstance(node, fx.Node) and node.meta.get("storage") in written):
            continue
        if node not in copies:
            origin.copied.add(node.name)
            with graph.inserting_after(inputs[-1] if node.op == "placeholder" else node):
                copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
            val = torch.ops.aten.clone.default(node.meta["val"])
            copies[node].meta = {"val": val, "storage": fresh + len(copies)}
        outputs[k] = copies[node]
    graph.output_node().args = (tuple(outputs),)
    return traced._replace(gm=fx.GraphModule(traced.gm, graph))


def own_inputs(graph: fx.Graph, origin: Origin) -> list[int]:
    """Positions among a graph's inputs of its block's parameters in buckets."""
    if origin.block is None:
        return []
    placeholders = graph.find_nodes(op="placeholder")
    positions = [k for k, node in enumerate(placeholders) if origin.is_of_block(node)]
    if not positions:
        raise PassError(f"a graph of block {origin.block.name} gets none of its parameters")
    return positions


def mark_weights(graph: fx.Graph, origin: Origin, weights: Collection[str]) -> list[str]:
    """``meta["param"]`` of each input that is one of the parameters ``weights``: its name. Returns these names."""
    names: list[str] = []
    for node in graph.find_nodes(op="placeholder"):
        name = origin.name_of(node)
        if name is not None and name in weights:
            node.meta["param"] = name
            names.append(name)
    return names


def mark_storages(graph: fx.Graph, donated: Sequence[int]) -> None:
    """``meta["storage"]`` of every value, and ``meta["donated"]`` of the inputs that AOTAutograd lets the backward
    overwrite.

    Relies on fake tensors sharing a storage where the real ones do.
    """
    numbers: dict[int, int] = {}
    placeholders = 0
    for node in graph.nodes:
        storage = torch_private.storage_of(node)
        if storage is not None:
            node.meta["storage"] = numbers.setdefault(storage, len(numbers))
        if node.op == "placeholder":
            node.meta["donated"] = placeholders in donated
            placeholders += 1


def refuse_writes_to_copies(graph: fx.Graph, origin: Origin) -> None:
    """Relies on AOTAutograd writing inputs by ``copy_`` alone (2.11 to 2.15)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        buffer = node.args[0]
        if isinstance(buffer, fx.Node) and buffer.name in origin.copied:
            raise ZcError(
                f"a buffer of shape {list(buffer.meta['val'].shape)} is written by the compiled forward and by its "
                "backward too: the backward has a copy, so its write would be lost. Let each write a buffer of its "
                'own, or put one of them under @torch.compiler.disable; or zc.compile(..., backend="eager")'
            )


def grad_of(graph: fx.Graph, origin: Origin) -> tuple[str | None, ...]:
    """Which parameter's gradient each output of the graph is. That of a frozen parameter, which something else asks
    for, goes through autograd, and zc.recompile is named there.

    Relies on AOTAutograd's descriptors: ``output.meta["desc"][i]`` is ``GradAOTOutput(grad_of=PlainAOTInput(idx))``
    with idx an index into the inputs of the backend call (torch >= 2.9).
    """
    returned = returned_by(graph)
    indices = [torch_private.grad_of_index(desc) for desc in graph.output_node().meta.get("desc", ())]
    if len(indices) != len(returned):
        raise PassError(f"the backward graph has {len(returned)} outputs and {len(indices)} descriptors")
    names = [origin.names[index] if index is not None else None for index in indices]
    return tuple(name if name in origin.runtime.params else None for name in names)
