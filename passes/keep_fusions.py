"""Keeps operations that Inductor would fuse in one segment, where a gradient operation would cut between them.

Inductor compiles each segment on its own, so a cut between two pointwise operations that read the same matmul's result
makes two kernels of one. Before and after, ``%mm`` the gradient that a SwiGLU gets from above::

    %mm = aten.mm(%g, %w_down)                          %mm = aten.mm(%g, %w_down)
    %d_up = aten.mul(%mm, %gate)                        %d_up = aten.mul(%mm, %gate)
    %mm_1 = aten.mm(%t, %x)                             %mm_1 = aten.mm(%t, %x)
    flatten_cast(2, "flat_grad[0]", (0,), [%mm_1])  ->  %d_gate = aten.mul(%mm, %up)
    %d_gate = aten.mul(%mm, %up)                        flatten_cast(2, "flat_grad[0]", (0,), [%mm_1])
    %mm_2 = aten.mm(%d_gate, %w_gate)                   %mm_2 = aten.mm(%d_gate, %w_gate)

A *part* is the nodes between two cuts. A *group* could be one kernel: pointwise operations and reductions of one part
that read each other or, at one number of elements, the same value, with no matmul in between. A whole group moves

    up    one part, if it reads a value that a group there makes or reads, and nothing that is made later
    down  one part, if only later parts use it, and its users in the next one are pointwise or reductions; a reduction
          stays, since its result is smaller than its input

and no further: a value lives at most one part longer than it did. Matmuls, attention and other operations that are
kernels of their own stay where they are, so a launch waits for some pointwise work at most. The pass leaves alone a
graph without gradient operations, and one in which an operation writes into an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from zc import torch_private
from zc.passes.base import Pass, copy_node
from zc.planning.plan import Plan
from zc.schedule.nodes import is_getitem, is_schedule_node, maker

_VIEW, _POINTWISE, _REDUCTION = "view", "pointwise", "reduction"
_aten = torch.ops.aten
_Operation = type(_aten.add.Tensor)
_MORE = {  # what torch has no tag for
    _aten._unsafe_view.default: _VIEW,
    **dict.fromkeys((_aten._to_copy.default, _aten.cat.default, _aten.full.default), _POINTWISE),
    **dict.fromkeys((_aten.arange.start_step, torch.ops.prims.iota.default), _POINTWISE),
}
_CanMove = Callable[[fx.Node, set[fx.Node]], bool]
_Read = tuple[fx.Node, str]  # a value, and over how many elements it is read


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    order = {node: k for k, node in enumerate(graph.nodes)}
    parts = _Parts(graph)
    is_first_run = not any(node.meta.get("moved") for node in order)
    is_cut = any(map(is_schedule_node, order))
    if is_first_run and is_cut and not any(torch_private.mutates(node.target) for node in order):
        parts.move()
    for node in order:
        if node.op == "get_attr" and node.users:  # a constant stands before its first user
            parts.of[node] = min(parts.of[node], *(parts.of[user] for user in node.users))
    new = fx.Graph(owning_module=graph.owning_module)
    where: dict[fx.Node, fx.Node] = {}
    for node in sorted(order, key=lambda n: (parts.of[n], is_schedule_node(n), order[n])):
        copy_node(node, new, where)
        if node in parts.moved:
            where[node].meta["moved"] = True
    return new


def _kind(node: fx.Node) -> str | None:
    """How Inductor compiles an operation: as a view, as part of a kernel, or (None) as a kernel of its own."""
    val, target = node.meta.get("val"), node.target
    if not isinstance(target, _Operation) or not isinstance(val, torch.Tensor):
        return None
    if target in _MORE or target.is_view:
        return _MORE.get(target, _VIEW)
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if torch.Tag.pointwise in target.tags:
        return _POINTWISE
    return _REDUCTION if torch.Tag.reduction in target.tags else None


class _Parts:
    """``of``: how many cuts stand before each node. The gradient operations after a part have its number."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of: dict[fx.Node, int] = {}
        self.kinds = {node: kind for node in graph.nodes if (kind := _kind(node)) is not None}
        self.moved: set[fx.Node] = set()
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        number, is_cut = 0, False
        for node in graph.nodes:
            if is_schedule_node(node):
                is_cut = True
            elif is_cut:
                number, is_cut = number + 1, False
            # results of a multi-output node stay with it
            self.of[node] = -1 if node.op == "placeholder" else self.of[maker(node)] if is_getitem(node) else number
        self.nodes: list[list[fx.Node]] = [[] for _ in range(number + 1)]  # of each part, in order
        for node, k in self.of.items():
            if node.op == "call_function" and not is_schedule_node(node):
                self.nodes[k].append(node)

    def move(self) -> None:
        """Moves groups until none can move; none moves twice."""
        before = None
        while before != len(self.moved):
            before = len(self.moved)
            for k in range(len(self.nodes)):
                if k + 1 < len(self.nodes):
                    self._move_to(self._down(k), k, k + 1)
                if k > 0:
                    self._move_to(self._up(k), k, k - 1)

    def _move_to(self, moving: set[fx.Node], k: int, to: int) -> None:
        self.moved |= moving
        self.of.update(dict.fromkeys(moving, to))
        self.nodes[k] = [node for node in self.nodes[k] if node not in moving]
        self.nodes[to] = sorted([*self.nodes[to], *moving], key=self.order.__getitem__)

    def _down(self, k: int) -> set[fx.Node]:
        def can_move(node: fx.Node, moving: set[fx.Node]) -> bool:
            is_free = node not in self.moved and bool(node.users) and self.kinds[node] != _REDUCTION
            return is_free and all(self.of[user] > k or user in moving for user in node.users)

        def is_joined(group: set[fx.Node]) -> bool:
            return any(user in self.kinds and self.of[user] == k + 1 for node in group for user in self._users(node))

        return self._movable(k, reversed, can_move, is_joined)

    def _up(self, k: int) -> set[fx.Node]:
        there = {node for node in self.nodes[k - 1] if self.kinds.get(node, _VIEW) != _VIEW}
        read = {read for node in there for read in self._reads(node)}

        def can_move(node: fx.Node, moving: set[fx.Node]) -> bool:
            return node not in self.moved and all(self.of[n] < k or n in moving for n in node.all_input_nodes)

        def is_joined(group: set[fx.Node]) -> bool:
            reads = {read for node in group for read in self._reads(node)}
            return not read.isdisjoint(reads) or any(source in there for source, _ in reads)

        return self._movable(k, iter, can_move, is_joined)

    def _movable(
        self,
        k: int,
        in_order: Callable[[list[fx.Node]], Iterable[fx.Node]],
        can_move: _CanMove,
        is_joined: Callable[[set[fx.Node]], bool],
    ) -> set[fx.Node]:
        """The groups of part ``k`` that can move as wholes and join something where they go, with their views.
        ``in_order``: the nodes that must move with a node come before it."""
        mine = list(in_order([node for node in self.nodes[k] if node in self.kinds]))
        groups = self._groups(k)
        staying: set[fx.Node] = set()
        while True:
            moving: set[fx.Node] = set()
            for node in mine:
                if node not in staying and can_move(node, moving):
                    moving.add(node)
            whole = [group for group in groups if group <= moving and is_joined(group)]
            in_groups = {node for group in whole for node in group}
            others = {node for node in mine if self.kinds[node] != _VIEW} - in_groups
            if others == staying:
                break
            staying = others
        moving = set(in_groups)
        for node in mine:
            is_of_group = self._base(node) in in_groups or not in_groups.isdisjoint(self._users(node))
            if self.kinds[node] == _VIEW and is_of_group and can_move(node, moving):
                moving.add(node)
        return moving

    def _groups(self, k: int) -> list[set[fx.Node]]:
        """The nodes of part ``k`` that could be one kernel each. They have one level: the number of other kernels
        before them."""
        level: dict[fx.Node, int] = {}
        group_of: dict[fx.Node, set[fx.Node]] = {}
        reader: dict[tuple[int, _Read], fx.Node] = {}
        for node in self.nodes[k]:
            before = [n for n in node.all_input_nodes if n in level]
            level[node] = max((level[n] + (n not in self.kinds) for n in before), default=0)
            if self.kinds.get(node, _VIEW) == _VIEW:
                continue
            group = group_of[node] = {node}
            for source, size in self._reads(node):
                joined = [reader.setdefault((level[node], (source, size)), node)]
                if source in group_of and level[source] == level[node]:
                    joined.append(source)
                for other in joined:
                    group |= group_of[other]
            group_of.update(dict.fromkeys(group, group))
        return list({id(group): group for group in group_of.values()}.values())

    def _reads(self, node: fx.Node) -> set[_Read]:
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        over = tensors[0] if self.kinds[node] == _REDUCTION else node
        return {(self._base(n), str(over.meta["val"].numel())) for n in tensors}

    def _base(self, node: fx.Node) -> fx.Node:
        """The value that a view is of, or the value itself."""
        while self.kinds.get(node) == _VIEW:
            node = node.all_input_nodes[0]
        return node

    def _users(self, node: fx.Node) -> set[fx.Node]:
        """The users of a value and of its views."""
        users: set[fx.Node] = set()
        for user in node.users:
            users |= self._users(user) if self.kinds.get(user) == _VIEW else {user}
        return users


PASS = Pass("keep_fusions", run, requires=frozenset({"reductions"}))
