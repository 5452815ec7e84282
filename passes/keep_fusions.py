"""What Inductor would fuse stays in one segment, where a gradient operation would cut through it.

Segments are compiled each on their own, so a cut between two pointwise operations that read the same matmul's result makes
two kernels of one. Before and after, ``%mm`` the gradient that a SwiGLU gets from above::

    %mm = aten.mm(%g, %w_down)                          %mm = aten.mm(%g, %w_down)
    %d_up = aten.mul(%mm, %gate)                        %d_up = aten.mul(%mm, %gate)
    %mm_1 = aten.mm(%t, %x)                             %mm_1 = aten.mm(%t, %x)
    flatten_cast(2, "flat_grad[0]", (0,), [%mm_1])  ->  %d_gate = aten.mul(%mm, %up)
    %d_gate = aten.mul(%mm, %up)                        flatten_cast(2, "flat_grad[0]", (0,), [%mm_1])
    %mm_2 = aten.mm(%d_gate, %w_gate)                   %mm_2 = aten.mm(%d_gate, %w_gate)

A *part* is what stands between two cuts. A *group* is what one kernel could be: pointwise operations and reductions of one part
that read each other or, at one number of elements, the same value, with no matmul in between. A whole group moves

    up    one part, where it reads what a group there makes or reads, and nothing that is made later
    down  one part, where only later parts use it and one of its users there is pointwise or a reduction; reductions, which
          make what they read smaller, stay

and no further: a value lives at most one part longer than it did. Matmuls, attention and everything else that is a
kernel of its own stay where they are, so a launch waits at most for pointwise work. Left alone: a graph without gradient
operations, and one in which an operation writes into an argument.
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
_CanLeave = Callable[[fx.Node, set[fx.Node]], bool]
_Read = tuple[fx.Node, str]  # a value, and over how many elements it is read
_MORE = {  # what torch has no tag for
    _aten._unsafe_view.default: _VIEW,
    **dict.fromkeys((_aten._to_copy.default, _aten.cat.default, _aten.full.default), _POINTWISE),
    **dict.fromkeys((_aten.arange.start_step, torch.ops.prims.iota.default), _POINTWISE),
}


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    order = {node: k for k, node in enumerate(graph.nodes)}
    part = _parts(graph)
    if not any(map(is_schedule_node, order)) or any(torch_private.mutates(node.target) for node in order):
        moved = set()
    else:
        moved = _move(part, max(part.values()))
    for node in reversed(order):
        if node.op == "get_attr" and node.users:  # a constant stands before its first user
            part[node] = min(part[node], *(part[user] for user in node.users))
    new = fx.Graph(owning_module=graph.owning_module)
    where: dict[fx.Node, fx.Node] = {}
    for node in sorted(order, key=lambda n: (part[n], is_schedule_node(n), order[n])):
        copy_node(node, new, where)
        if node in moved:
            where[node].meta["moved"] = True  # once: a second run of the pass changes nothing
    return new


def _parts(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many cuts stand before each node; a result of a multi-output node counts as that node does. The gradient
    operations behind a part have its number, and the output one more than all."""
    part: dict[fx.Node, int] = {}
    number, is_cut = 0, False
    for node in graph.nodes:
        if is_schedule_node(node):
            is_cut = True
        elif is_cut:
            number, is_cut = number + 1, False
        part[node] = -1 if node.op == "placeholder" else part[maker(node)] if is_getitem(node) else number
    return part


def _move(part: dict[fx.Node, int], last: int) -> set[fx.Node]:
    """Changes ``part``; returns what it moved. Nothing moves twice."""
    kinds = {node: kind for node in part if (kind := _kind(node)) is not None}
    moved = {node for node in kinds if node.meta.get("moved")}
    before = None
    while before != len(moved):
        before = len(moved)
        for k in range(last + 1):
            moved |= _down(part, kinds, moved, k)
            moved |= _up(part, kinds, moved, k)
    return moved


def _kind(node: fx.Node) -> str | None:
    """What Inductor makes of an operation: nothing, a part of a kernel, or (None) something of its own."""
    val, target = node.meta.get("val"), node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(val, torch.Tensor) or is_schedule_node(node):
        return None
    if target in _MORE or target.is_view:
        return _MORE.get(target, _VIEW)
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return _POINTWISE if torch.Tag.pointwise in target.tags else _REDUCTION if torch.Tag.reduction in target.tags else None


def _down(part: dict[fx.Node, int], kinds: dict[fx.Node, str], moved: set[fx.Node], k: int) -> set[fx.Node]:
    """The nodes that go from part ``k`` to the next; ``part`` says so then."""
    mine = [node for node in kinds if part[node] == k]

    def can_leave(node: fx.Node, leaving: set[fx.Node]) -> bool:
        is_free = node not in moved and bool(node.users) and kinds[node] != _REDUCTION
        return is_free and all(part[user] > k or user in leaving for user in node.users)

    def is_met(group: set[fx.Node]) -> bool:
        return any(user in kinds and part[user] == k + 1 for node in group for user in _users(node, kinds))

    going = _leaving(reversed(mine), _groups(part, kinds, k), kinds, can_leave, is_met)
    part.update(dict.fromkeys(going, k + 1))
    return going


def _up(part: dict[fx.Node, int], kinds: dict[fx.Node, str], moved: set[fx.Node], k: int) -> set[fx.Node]:
    """The nodes that go from part ``k`` to the one before."""
    mine = [node for node in kinds if part[node] == k]
    there = {node for node in kinds if part[node] == k - 1 and kinds[node] != _VIEW}
    read = {read for node in there for read in _reads(node, kinds)}

    def can_leave(node: fx.Node, leaving: set[fx.Node]) -> bool:
        return node not in moved and all(part[n] < k or n in leaving for n in node.all_input_nodes)

    def is_met(group: set[fx.Node]) -> bool:
        found = {read for node in group for read in _reads(node, kinds)}
        return not read.isdisjoint(found) or any(source in there for source, _ in found)

    going = _leaving(mine, _groups(part, kinds, k), kinds, can_leave, is_met)
    part.update(dict.fromkeys(going, k - 1))
    return going


def _leaving(
    order: Iterable[fx.Node],
    groups: list[set[fx.Node]],
    kinds: dict[fx.Node, str],
    can_leave: _CanLeave,
    is_met: Callable[[set[fx.Node]], bool],
) -> set[fx.Node]:
    """The groups that can leave as wholes and are met where they go, and the views that go with them. ``order``: each
    node behind those that must leave with it."""
    order = list(order)
    allowed = set(order)
    while True:
        leaving: set[fx.Node] = set()
        for node in order:
            if node in allowed and can_leave(node, leaving):
                leaving.add(node)
        whole = [group for group in groups if group <= leaving and is_met(group)]
        left_behind = allowed.intersection(*[set().union(*groups)]).difference(*whole)
        if not left_behind:
            break
        allowed -= left_behind
    going = set().union(*whole)
    made = set(going)
    for node in order:
        of_group = _base(node, kinds) in made or not made.isdisjoint(_users(node, kinds))
        if node in leaving and of_group and can_leave(node, going):
            going.add(node)
    return going


def _groups(part: dict[fx.Node, int], kinds: dict[fx.Node, str], k: int) -> list[set[fx.Node]]:
    """What of part ``k`` could be one kernel each: no two nodes of a group have a kernel of another kind in between."""
    level: dict[fx.Node, int] = {}
    group_of: dict[fx.Node, set[fx.Node]] = {}
    reader: dict[tuple[int, _Read], fx.Node] = {}
    for node in (n for n, at in part.items() if at == k and n.op == "call_function" and not is_schedule_node(n)):
        level[node] = max((level[n] + (n not in kinds) for n in node.all_input_nodes if n in level), default=0)
        if kinds.get(node, _VIEW) == _VIEW:
            continue
        group_of[node] = {node}
        for source, size in _reads(node, kinds):
            other = reader.setdefault((level[node], (source, size)), node)
            joined = [other, *([source] if source in group_of and level[source] == level[node] else [])]
            for one in joined:
                if group_of[one] is not group_of[node]:
                    group_of[node] |= group_of[one]
                    group_of.update(dict.fromkeys(group_of[node], group_of[node]))
    return list({id(group): group for group in group_of.values()}.values())


def _reads(node: fx.Node, kinds: dict[fx.Node, str]) -> set[_Read]:
    """What an operation reads, and over how many elements it runs."""
    sources = {_base(n, kinds) for n in node.all_input_nodes}
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    over = tensors[0] if kinds[node] == _REDUCTION and tensors else node
    return {(source, str(over.meta["val"].numel())) for source in sources}


def _base(node: fx.Node, kinds: dict[fx.Node, str]) -> fx.Node:
    """What a view is a view of."""
    while kinds.get(node) == _VIEW and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users(node: fx.Node, kinds: dict[fx.Node, str]) -> set[fx.Node]:
    """Who uses a value or a view of it."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _users(user, kinds) if kinds.get(user) == _VIEW else {user}
    return found


PASS = Pass("keep_fusions", run, requires=frozenset({"reductions"}))
