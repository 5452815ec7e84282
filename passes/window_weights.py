"""Cuts a graph into windows, each of which reads the weights of few buckets.

**Sharded weights are there in their window alone** (stage 3, ``shard_frozen``). Before and after, ``%p`` a parameter in
bucket 1, slot 0, and ``%q`` one in bucket 0, slot 2; ``%p`` is saved for the backward, so the graph returns it::

                                              %take = take_weights(((1, 0),))
                                              %p_1 = %take[0]
    %t = aten.t(%p)                           %t = aten.t(%p_1)
    %mm = aten.mm(%x, %t)                     %mm = aten.mm(%x, %t)
    %t_1 = aten.t(%q)                   ->    %take_1 = take_weights(((0, 2),))
    %mm_1 = aten.mm(%mm, %t_1)                %q_1 = %take_1[0]
    output (%mm_1, %p)                        %t_1 = aten.t(%q_1)
                                              %mm_1 = aten.mm(%mm, %t_1)
                                              take_weights(())
                                              output (%mm_1, %p)

A window gets one more bucket as long as its bytes leave room for the next window's under `Plan.weight_cap`. So a block
whose buckets fit is one window and one segment. All weights that one module reads come in one window if they fit: ranks
that exchange messages gather in one order, and may run different graphs (an addmm of one row is a product and a sum).
A view of a weight that leaves its window, as an output or a gradient, is copied.

**Whole weights come, and stay** (``overlap_gather``). A window begins where another bucket is first read, and the main
stream waits for that bucket there. ``%p1`` is a parameter in ``gathered[1]``, ``%p0`` one in ``gathered[0]``::

    %t0 = aten.t(%p0)                         %t1 = aten.t(%p1)
    %t1 = aten.t(%p1)                         %mm = aten.mm(%x, %t1)
    %mm = aten.mm(%x, %t1)              ->    %t0 = aten.t(%p0)            meta["cut"]: a new segment starts here
    %mm_1 = aten.mm(%mm, %t0)                 %mm_1 = aten.mm(%mm, %t0)
    output (%mm_1, %t0)                       publish(0, "gathered[0]")
                                              publish(1, "gathered[1]")
                                              output (%mm_1, %t0)

The publishes at the end let code after the graph read every parameter.

Values made of parameters alone (views, casts) are made where something else first reads them in a window. Where windows
end, each makes them anew, unless they are much smaller (norms). Random ones stay, since a generator gives its numbers
in the order of the calls. The pass leaves alone a graph that reads no parameter, but for the publishes.

The idea of gathering each weight before its use and freeing it after: ZeRO-3 (arXiv:1910.02054, section 5.3) and
FSDP (arXiv:2304.11277).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from zc import torch_private
from zc.errors import PassError
from zc.passes.base import Pass, is_random
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import is_schedule_node, put
from zc.schedule.spec import Publish, TakeWeights

Place = tuple[int, int]  # bucket, slot
REDUCED = 8  # times fewer elements than the parameters that a value is made of: it is made once, and kept


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    reads = _Reads(graph, is_sharded=bool(plan.sharded))
    windows = _windows(_by_module(list(reads.by_node.values()), plan), plan)
    return _Rewrite(graph, reads, dict(zip(reads.by_node, windows, strict=True)), plan).graph


class _Reads:
    """Which weights each node of a graph reads, also through views and casts of them. ``is_sharded``: the weights are
    the sharded ones."""

    def __init__(self, graph: fx.Graph, *, is_sharded: bool) -> None:
        self.of_params: dict[fx.Node, tuple[fx.Node, ...]] = {}  # a value made of parameters alone -> the parameters
        self.by_node: dict[fx.Node, list[Place]] = {}  # a node that is none of these -> what is sharded and it reads
        returned = set(graph.output_node().all_input_nodes) if is_sharded else set()
        for node in graph.nodes:
            if node.op == "placeholder":
                if ("weight" if is_sharded else "buffer") in node.meta:
                    self.of_params[node] = (node,)
                continue
            sources = [source for used in node.all_input_nodes for source in self.of_params.get(used, ())]
            if node.op != "call_function" or not sources:
                continue
            if torch_private.mutates(node.target) and node.args[0] in self.of_params:
                raise PassError(f"{node.name} of a compiled graph writes to a parameter: stage 3 has no bytes of it")
            is_made_of_params = all(
                n in self.of_params or isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes
            )
            # made anew in each window, a dropped weight would have two masks
            is_kept = is_schedule_node(node) or node in returned or is_random(node)
            is_kept |= is_sharded and is_made_of_params and _is_reduced(node, sources)
            if is_made_of_params and not is_kept:
                self.of_params[node] = tuple(dict.fromkeys(sources))
            elif is_sharded:
                self.by_node[node] = [source.meta["weight"] for source in dict.fromkeys(sources)]


def _is_reduced(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether it is much smaller than the parameters that it is made of, and no view: a norm, a penalty's sum. What
    reads those of many weights would otherwise need all of these weights in its window. False for a symbolic size: to
    compare one guards the graph by it, or raises where it depends on data."""
    value, storages = node.meta.get("val"), {source.meta.get("storage") for source in sources}
    if not isinstance(value, torch.Tensor) or isinstance(value.numel(), torch.SymInt):
        return False
    if node.meta.get("storage") in storages - {None}:
        return False
    return bool(REDUCED * value.numel() <= sum(source.meta["val"].numel() for source in dict.fromkeys(sources)))


def _by_module(reads: Sequence[Sequence[Place]], plan: Plan) -> list[set[int]]:
    """The buckets of each node, and those of what other nodes read of the same modules, if all of it fits."""
    module_of = {(b, k): plan.bucket(b).slots[k].name.rpartition(".")[0] for places in reads for b, k in places}
    buckets_of: dict[str, set[int]] = {}
    for (bucket, _), module in module_of.items():
        buckets_of.setdefault(module, set()).add(bucket)
    wanted = []
    for places in reads:
        own = {bucket for bucket, _ in places}
        more = own.union(*(buckets_of[module_of[place]] for place in places))
        wanted.append(more if _nbytes(more, plan) <= plan.weight_cap else own)
    return wanted


def _windows(reads: Sequence[set[int]], plan: Plan) -> list[int]:
    """The number of the window in which each node stands, for the buckets that it reads."""
    limit = max([plan.weight_cap // 2, *(_nbytes(own, plan) for own in reads)])
    numbers: list[int] = []
    number, open_buckets = 0, set[int]()
    for own in reads:
        if _nbytes(open_buckets | own, plan) > limit:
            number, open_buckets = number + 1, set()
        open_buckets |= own
        numbers.append(number)
    return numbers


def _nbytes(buckets: Iterable[int], plan: Plan) -> int:
    return sum(plan.bucket(bucket).nbytes_gathered for bucket in buckets)


class _Rewrite:
    """The graph with its windows."""

    def __init__(self, graph: fx.Graph, reads: _Reads, windows: dict[fx.Node, int], plan: Plan) -> None:
        self.graph = fx.Graph(owning_module=graph.owning_module)
        self._reads, self._copies, self._is_sharded = reads, dict[fx.Node, fx.Node](), bool(plan.sharded)
        self._inside: dict[fx.Node, fx.Node] = {}  # a value made of parameters -> its copy in the present window
        self._order = {node: k for k, node in enumerate(graph.nodes)}
        self._waited: set[str] = set()  # buffers of whole weights that have been read so far
        params = {node: None for node, made_of in reads.of_params.items() if made_of == (node,)}
        sharded = list(params) if self._is_sharded else []
        storages = {param.meta.get("storage") for param in sharded} - {None}
        of_place = {param.meta["weight"]: param for param in sharded}
        places: dict[int, dict[Place, None]] = {}
        for node, number in windows.items():
            places.setdefault(number, {}).update(dict.fromkeys(reads.by_node[node]))
        current = -1
        for node in graph.nodes:
            if node in params:
                self._inside[node] = self._copy(node)
            elif node.op == "output":
                if windows:
                    put(self.graph, TakeWeights(()))
                    self._inside = {param: self._copies[param] for param in params}  # returned as they have come
                self._bring(node.all_input_nodes)
                for bucket in () if self._is_sharded else plan.buckets:
                    put(self.graph, Publish(bucket.index, Buffer("gathered", bucket.index)))
                self._copy(node)
            elif node not in reads.of_params:
                if windows.get(node, current) != current:
                    current = windows[node]
                    self._open({place: of_place[place] for place in places[current]})
                for used in node.all_input_nodes if is_schedule_node(node) else ():
                    self._detach(used, storages)
                copied = self._copy(node)
                if node in windows and not is_schedule_node(node) and node.meta.get("storage") in storages:
                    self._copies[node] = self._clone(copied)

    def _open(self, params: dict[Place, fx.Node]) -> None:
        take = put(self.graph, TakeWeights(tuple(params)))
        self._inside.clear()
        for k, param in enumerate(params.values()):
            item = self.graph.call_function(operator.getitem, (take, k))
            item.meta = {key: value for key, value in param.meta.items() if key in ("val", "tensor_meta", "storage")}
            self._inside[param] = item

    def _bring(self, values: Iterable[fx.Node]) -> None:
        """Puts those of ``values`` that are made of parameters into the present window, with what they are made of, in
        their old order."""
        needed: set[fx.Node] = set()
        ahead = list(values)
        while ahead:
            value = ahead.pop()
            if value in self._reads.of_params and value not in self._inside and value not in needed:
                needed.add(value)
                ahead += value.all_input_nodes
        for value in sorted(needed, key=self._order.__getitem__):
            self._inside[value] = self._put_copy(value)

    def _copy(self, node: fx.Node) -> fx.Node:
        self._bring(node.all_input_nodes)
        self._copies[node] = copied = self._put_copy(node)
        return copied

    def _put_copy(self, node: fx.Node) -> fx.Node:
        here = self._inside
        copied = self.graph.node_copy(node, lambda n: here[n] if n in here else self._copies[n])
        copied.meta.pop("record", None)
        if not self._is_sharded and node.op == "call_function":
            read = {used.meta["buffer"] for used in node.all_input_nodes if "buffer" in used.meta}
            if read - self._waited and self._waited:  # the first bucket is waited for at the start in any case
                copied.meta["cut"] = True
            self._waited |= read
        return copied

    def _detach(self, node: fx.Node, storages: set[object]) -> None:
        """A gradient that is a weight, or a view of one, waits for its bucket as a copy."""
        if node in self._reads.of_params and node.meta.get("storage") in storages:
            self._bring([node])
            self._inside[node] = self._clone(self._inside[node], node.meta)

    def _clone(self, value: fx.Node, meta: dict[str, object] | None = None) -> fx.Node:
        clone = self.graph.call_function(torch.ops.aten.clone.default, (value,))
        own = ("storage", "record", "weight", "buffer")
        clone.meta = {key: item for key, item in (meta or value.meta).items() if key not in own}
        return clone


PASS = Pass("window_weights", run)
