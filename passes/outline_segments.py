"""Turns maximal runs of ATen nodes into segments, cut at each gradient operation.

Before and after::

    %mm = aten.mm(%x, %y)                      %segment_0 = segment("segment_0", %x, %y)
    %add = aten.add(%mm, %x)                   %getitem = %segment_0[0]
    flatten_cast(2, "flat_grad[0]", (0,), [%mm])   %getitem_1 = %segment_0[1]
    %mul = aten.mul(%add, %x)          ->      flatten_cast(2, "flat_grad[0]", (0,), [%getitem])
    output (%mul,)                             %segment_1 = segment("segment_1", %getitem_1, %x)
                                               %getitem_2 = %segment_1[0]
                                               output (%getitem_2,)

A node with ``meta["cut"]`` (window_weights) also starts a new segment.

Each segment is a GraphModule in ``node.meta["segment"]`` with canonical names (``arg0``, ``n1``, ...), so identical
layers have identical text and compile once. Results of a multi-output node stay with it. Each segment repeats the
get_attr nodes that it uses, and takes the symbolic sizes that it needs as inputs of their own.

An input is *donated* if nobody else uses it and no other value shares its storage: the segment may write its result
there. Its name is ``donated3`` instead of ``arg3``, because Inductor's cache looks at names and not at donation.

A segment runs on one stream. A node that the user's program has put on its own stream, or that records or waits for an
event of the program, raises PassError: inside a segment it would run on the wrong stream or in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from zc import torch_private
from zc.errors import PassError
from zc.passes.base import Pass, copy_node
from zc.planning.plan import Plan
from zc.schedule.nodes import is_getitem, is_schedule_node, maker, op_of, put
from zc.schedule.spec import Segment, TakeWeights

_OUTER_META = ("val", "storage", "gradient_of")  # of a segment's results
_KEPT_META = ("val", "tensor_meta")  # the rest (stack traces, names) differs between layers that are otherwise the same


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    _refuse_streams(graph)
    symbols = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.SymInt)]
    shared = _shared_storages(graph)
    new = fx.Graph(owning_module=graph.owning_module)
    where: dict[fx.Node, fx.Node] = {}
    pending: list[fx.Node] = []
    num_segments = sum(isinstance(op_of(node), Segment) for node in graph.nodes)

    def flush() -> None:
        nonlocal num_segments
        if any(node.op != "get_attr" for node in pending):
            where.update(_outline(new, pending, where, symbols, shared, f"segment_{num_segments}"))
            num_segments += 1
        pending.clear()

    for node in _keep_getitems_close(graph):
        if node.op in ("placeholder", "output") or is_schedule_node(node) or _of_segment(node):
            if node.op != "placeholder" and not _of_segment(node):
                flush()
            copy_node(node, new, where)
        else:
            if node.meta.get("cut"):
                flush()
            pending.append(node)
    return new


def _refuse_streams(graph: fx.Graph) -> None:
    for node in graph.nodes:
        use = torch_private.use_of_streams(node)
        if use is not None:
            raise PassError(
                f"{node.name} of a compiled graph uses {use}: a schedule has no streams or events of the program. Put "
                "that code in a function under torch.compiler.disable, which runs as in PyTorch"
            )


def _of_segment(node: fx.Node) -> bool:
    return is_getitem(node) and isinstance(op_of(maker(node)), Segment | TakeWeights)


def _keep_getitems_close(graph: fx.Graph) -> list[fx.Node]:
    """Program order, except that results of a multi-output node, and of a tuple among them, follow it at once: a tuple
    can't leave a segment."""
    order: dict[fx.Node, None] = {}

    def put_with_items(node: fx.Node) -> None:
        order[node] = None
        for user in node.users if not isinstance(node.meta.get("val"), torch.Tensor) else ():
            if is_getitem(user) and user not in order:
                put_with_items(user)

    for node in graph.nodes:
        if node not in order:
            put_with_items(node)
    return list(order)


def _is_symbolic(node: fx.Node) -> bool:
    val = node.meta.get("val")
    sizes = (*val.shape, *val.stride()) if isinstance(val, torch.Tensor) and val.layout == torch.strided else (val,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


def _shared_storages(graph: fx.Graph) -> set[object]:
    """Storages that several values of the outer graph share: views of each other, outputs that are inputs."""
    number, cut = 0, {}
    for node in graph.nodes:
        number += is_schedule_node(node)
        cut[node] = number
    crossing = [
        n for n in graph.nodes if n.op == "placeholder" or any(cut[u] != cut[n] or u.op == "output" for u in n.users)
    ]
    seen: set[object] = set()
    twice: set[object] = {None}
    for node in crossing:
        storage = node.meta.get("storage")
        (twice if storage in seen else seen).add(storage)
    return twice


def _may_donate(node: fx.Node, inside: set[fx.Node], shared: set[object]) -> bool:
    """Whether the segment with nodes ``inside`` may overwrite ``node``. Of the graph's own inputs only those that
    AOTAutograd donates (``meta["donated"]``): saved activations, never parameters. A window's weights are read again,
    in the same bytes, by later windows."""
    if node.op == "placeholder" and not node.meta.get("donated"):
        return False
    if is_getitem(node) and isinstance(op_of(maker(node)), TakeWeights):
        return False
    return node.meta.get("storage") not in shared and all(user in inside for user in node.users)


def _outline(
    outer: fx.Graph,
    nodes: Sequence[fx.Node],
    where: dict[fx.Node, fx.Node],
    symbols: list[fx.Node],
    shared: set[object],
    key: str,
) -> dict[fx.Node, fx.Node]:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        inputs.update(dict.fromkeys(n for n in node.all_input_nodes if n not in inside and n.op != "get_attr"))
    outputs = [n for n in nodes if n.op != "get_attr" and any(user not in inside for user in n.users)]
    if any(_is_symbolic(n) for n in (*nodes, *inputs)):
        # Inductor takes a size only from an input that *is* the symbol, or from a dimension that is no expression
        inputs = {**dict.fromkeys(symbols), **inputs}
    donated = {n for n in inputs if _may_donate(n, inside, shared)}
    body = _canonical(outer, nodes, list(inputs), outputs, donated)
    call = put(outer, Segment(key, tuple(where[n] for n in inputs)), name=key)
    call.meta["segment"] = body
    items: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(outputs):
        items[node] = outer.call_function(operator.getitem, (call, k))
        items[node].meta = {k: node.meta[k] for k in _OUTER_META if k in node.meta}
    return items


def _canonical(
    outer: fx.Graph, nodes: Sequence[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], donated: set[fx.Node]
) -> fx.GraphModule:
    root: torch.nn.Module = outer.owning_module or torch.nn.Module()
    body = fx.Graph(owning_module=outer.owning_module)
    names: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        name = f"donated{i}" if node in donated else f"arg{i}"
        names[node] = body.create_node("placeholder", name, name=name)
    needed = {n for node in nodes for n in node.all_input_nodes if n.op == "get_attr"}
    todo = [n for n in needed if n not in nodes] + list(nodes)
    todo = sorted((n for n in todo if n.op == "get_attr"), key=lambda n: str(n.target)) + [
        n for n in todo if n.op != "get_attr"
    ]
    for i, node in enumerate(todo):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
        names[node] = body.create_node(node.op, node.target, args, kwargs, name=f"n{i}")
    for old, copied in names.items():
        copied.meta = {k: old.meta[k] for k in _KEPT_META if k in old.meta}
    body.output(tuple(names[n] for n in outputs))
    module = fx.GraphModule(root, body, class_name="Segment")
    module.meta["donated"] = tuple(i for i, node in enumerate(inputs) if node in donated)
    return module


PASS = Pass("outline_segments", run)
